"""The weights of a rank's stages, gathered over data parallel: after an update, or before each run of passes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from megapipe.optim.buffers import FlatBuffers
from megapipe.optim.reduction import all_of


class Gathers:
    """The gathering of weights, stage by stage.

    A stage's are there when those are that it borrows: a head may run before the stage whose embedding it uses.

    Args:
        chunks: of each of this rank's stages its buffers.
        lenders: the stages that each has weights of, itself among them.
        drops: weights are there between a gathering and `drop` alone.
        in_eight_bits: passes have some of them so, and in their own type they are there within `whole` alone.
    """

    def __init__(
        self,
        chunks: Sequence[Sequence[FlatBuffers]],
        lenders: Sequence[set[int]],
        *,
        drops: bool = False,
        in_eight_bits: bool = False,
    ) -> None:
        self._chunks, self._lenders = chunks, lenders
        self._drops, self._in_eight_bits = drops, in_eight_bits
        self._stale = set[int]()
        self._gathering = dict[int, Callable[[], None]]()
        self._users: list[set[int]] = [set() for _ in chunks]

    def updated(self) -> None:
        """A rank has new weights of its share; under ZeRO-1 the rest are of the step before until it is gathered."""
        self._stale = set(range(len(self._chunks)))

    def start(self, chunk: int) -> Callable[[], None]:
        """Begin to gather the weights of this rank's stage number `chunk` if they are not there; what is returned waits
        for them."""
        chunks = self._lenders[chunk]
        for lender in chunks:
            self._users[lender].add(chunk)
        for stale in sorted(chunks & self._stale):
            self._stale.remove(stale)
            self._gathering[stale] = all_of([buffers.start_gather() for buffers in self._chunks[stale]])

        def finish() -> None:
            for under_way in sorted(chunks & self._gathering.keys()):
                self._gathering.pop(under_way)()

        return finish

    def drop(self, chunk: int) -> None:
        """The last pass of a run that reads the weights of a stage is over."""
        for lender in self._lenders[chunk]:
            self._users[lender].discard(chunk)
            if self._drops and not self._users[lender]:
                for buffers in self._chunks[lender]:
                    buffers.drop()
                self._stale.add(lender)

    def settle(self) -> None:
        """Gather the weights that a step has left for the next, where they stay."""
        if not self._drops:
            for finish in [self.start(chunk) for chunk in sorted(self._stale)]:
                finish()

    @contextmanager
    def whole(self) -> Iterator[None]:
        """All weights of the rank are there, to be read or written; what is written is each rank's whole model."""
        everything = [buffers for chunk in self._chunks for buffers in chunk]
        if self._in_eight_bits:
            for finish in [buffers.start_whole() for buffers in everything]:
                finish()
        else:
            for finish in [self.start(chunk) for chunk in range(len(self._chunks))]:
                finish()
        try:
            yield
        finally:
            for buffers in everything:
                buffers.end_whole()
            for chunk in range(len(self._chunks)):
                self.drop(chunk)
            if self._in_eight_bits:
                self.updated()
