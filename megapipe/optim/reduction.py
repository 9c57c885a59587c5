"""The sums of a step's gradients over ranks, stage by stage: those that begin early and those that are left."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch

from megapipe.optim.buffers import FlatBuffers
from megapipe.optim.sharded.buffers import ShardedBuffers
from megapipe.optim.ties import Ties


def all_of(ends: Sequence[Callable[[], None]]) -> Callable[[], None]:
    """Waits for each in turn."""

    def finish() -> None:
        for end in ends:
            end()

    return finish


@dataclass(frozen=True)
class Reduction:
    """The sums of one step's gradients over tensor parallel, replicas and twins, and over the uses of tied weights.

    Attributes:
        chunks: of each of this rank's stages, in ascending order, its buckets in the order in which they are done.
        ready: of each bucket the first of its layers, and how many its stage has.
        twins: those of them that exist on another rank too, in one order on both.
        ties: weights that are used several times.
        whole: buffers that are reduced at the end of all.
        dtype: what gradients are rounded to on their way over data parallel, if not their own.
    """

    chunks: Sequence[Sequence[FlatBuffers]]
    ready: Sequence[Sequence[tuple[int, int]]]
    twins: Sequence[FlatBuffers]
    ties: Ties
    whole: Sequence[FlatBuffers] = ()
    dtype: torch.dtype | None = None
    _begun: set[int] = field(default_factory=set)
    _early: dict[int, list[Callable[[], None]]] = field(default_factory=lambda: defaultdict(list))

    @property
    def by_layers(self) -> bool:
        """Return whether any bucket is done before its whole stage is."""
        return any(first for row in self.ready for first, _ in row)

    @property
    def sharded(self) -> list[ShardedBuffers]:
        """The buffers whose gradients are reduced after each run of passes."""
        return [b for chunk in self.chunks for b in chunk if isinstance(b, ShardedBuffers)]

    def start_early(self, chunk: int, layer: int, layers: int) -> None:
        """Begin to sum the buckets of a stage's layers from `layer` on, whose gradients are complete."""
        early = self._early[chunk]
        for n, buffers in enumerate(self.chunks[chunk][:-1]):
            first, count = self.ready[chunk][n]
            # Buckets are done in order, so those that began are the first ones: their number says which come next.
            if n >= len(early) and layer <= first and layers == count:
                early.append(self._start(buffers))

    def begin(self, chunk: int) -> None:
        """Take memory for what the backwards of a run write, on this rank's stage number `chunk`."""
        for buffers in self.chunks[chunk]:
            if isinstance(buffers, ShardedBuffers):
                buffers.begin_grads()

    def start(self, chunk: int) -> Callable[[], None]:
        """Begin to sum the gradients of this rank's stage number `chunk` over tensor and data parallel.

        Returns: what waits for the sums.
        """
        self._begun.add(chunk)
        # One at a time: what the one before read is free when the next begins.
        for sharded in self.sharded:
            if sharded not in self.chunks[chunk]:  # whose own may have begun early
                sharded.end_reduce()
        early = self._early.pop(chunk, [])
        return all_of([*early, *(self._start(buffers) for buffers in self.chunks[chunk][len(early) :])])

    def _start(self, buffers: FlatBuffers) -> Callable[[], None]:
        dp = buffers.replicas
        buffers.sum_over_tp(self.ties.mesh.tp)
        # The uses of a weight have other shares on their ranks, so under ZeRO-1 each is summed whole.
        apart = self.ties.apart if buffers.shares.size > 1 and not isinstance(buffers, ShardedBuffers) else ()
        grads = [self.ties.main_grad(name) for name in buffers.own if name in apart]
        whole = [dp.start_all_reduce(grad.clone() if self.dtype is None else grad.to(self.dtype)) for grad in grads]
        finish_all = buffers.start_reduce(self.dtype)

        def finish() -> None:
            finish_all()
            for grad, pending in zip(grads, whole, strict=True):
                grad.copy_(pending.wait())

        return finish

    def finish(self) -> None:
        """Sum what was not begun, wait for it, and add twins and ties. What was begun must have ended."""
        for finish in [self.start(chunk) for chunk in range(len(self.chunks)) if chunk not in self._begun]:
            finish()
        for buffers in self.whole:
            self._start(buffers)()
        for sharded in self.sharded:
            sharded.sum_tied(self.ties.mesh.tp, self.dtype)
        # After data parallel, and in one order on both ranks: a sum of two sums has the same bits on either.
        for buffers in self.twins:
            for part in buffers.parts:
                self.ties.mesh.twins.all_reduce(part)
        self.ties.add_gradients()
        for sharded in self.sharded:
            sharded.take_tied()
