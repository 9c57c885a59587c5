"""Gather the weights of a rank's stages over data parallelism.

It happens after an update (ZeRO-1), or before each run of a stage's passes (ZeRO-3).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from megapipe.optim.buffers import FlatBuffers
from megapipe.optim.reduction import all_of


class Gathers:
    """The gathering of a rank's weights under ZeRO, stage by stage.

    The executor calls `start` before a stage's passes and `drop` after them. `whole` is for other
    code, and `updated` notes that weights have changed. Stages are numbered by their position on
    this rank. A stage whose parameters use the memory of another stage also needs that stage's
    weights. For example, a head may run before the stage with its tied embedding.

    Args:
        chunks: for each stage, its buffers.
        needed: for each stage, the stages whose weights it reads, including itself.
        drops: whether `drop` releases weights, which are gathered again before their next use.
        in_eight_bits: whether `start` gathers some weights in 8 bits. Only `whole` gathers these in
            their own type, such as bf16.
    """

    def __init__(
        self,
        chunks: Sequence[Sequence[FlatBuffers]],
        needed: Sequence[set[int]],
        *,
        drops: bool = False,
        in_eight_bits: bool = False,
    ) -> None:
        self._chunks = chunks
        self._needed = needed
        self._drops = drops
        self._in_eight_bits = in_eight_bits
        # Stages without current weights, and functions that wait for gatherings under way.
        # Buckets whose weights are dropped start without them.
        self._stale = set(range(len(chunks))) if drops or in_eight_bits else set[int]()
        self._gathering = dict[int, Callable[[], None]]()
        # For each stage, the stages that read its weights at this time.
        self._users: list[set[int]] = [set() for _ in chunks]

    def updated(self) -> None:
        """Note that each rank has updated its share, so that all weights must be gathered again."""
        self._stale = set(range(len(self._chunks)))

    def start(self, chunk: int) -> Callable[[], None]:
        """Start to gather the weights that a stage reads and this rank lacks.

        `chunk` is the position of the stage on this rank.
        Returns: a function that waits for the weights.
        """
        needed = self._needed[chunk]
        for other in needed:
            self._users[other].add(chunk)
        # In ascending order, because gatherings are collective.
        for stale in sorted(needed & self._stale):
            self._stale.remove(stale)
            gathers = [buffers.start_gather() for buffers in self._chunks[stale]]
            self._gathering[stale] = all_of(gathers)

        def finish() -> None:
            for under_way in sorted(needed & self._gathering.keys()):
                self._gathering.pop(under_way)()

        return finish

    def drop(self, chunk: int) -> None:
        """Release the weights of a stage, after the passes that a gather was made for.

        The schedule says which consecutive passes those are. Tied weights that another stage still
        reads are kept. If `drops` is False, nothing is released. `chunk` is the position of the
        stage on this rank.
        """
        for other in self._needed[chunk]:
            self._users[other].discard(chunk)
            # The last reader releases the weights.
            if self._drops and not self._users[other]:
                for buffers in self._chunks[other]:
                    buffers.drop()
                self._stale.add(other)

    def settle(self) -> None:
        """Gather the updated weights now.

        This has no effect if passes gather the weights before each use.
        """
        if not self._drops:
            for finish in [self.start(chunk) for chunk in sorted(self._stale)]:
                finish()

    @contextmanager
    def whole(self, chunks: Sequence[int] | None = None) -> Iterator[None]:
        """Return a context in which weights of the rank are gathered, to be read or written.

        All ranks must write equal values. At the end of the context each rank keeps its share of
        the values.

        Args:
            chunks: the positions of the stages whose weights are gathered; None for all.
        """
        if chunks is None:
            chunks = range(len(self._chunks))
        everything = [buffers for chunk in chunks for buffers in self._chunks[chunk]]
        if self._in_eight_bits:
            for finish in [buffers.start_whole() for buffers in everything]:
                finish()
        else:
            for finish in [self.start(chunk) for chunk in chunks]:
                finish()
        try:
            yield
        finally:
            for buffers in everything:
                buffers.end_whole()
            for chunk in chunks:
                self.drop(chunk)
            # The 8-bit copies still hold the weights before the block.
            if self._in_eight_bits:
                self.updated()
