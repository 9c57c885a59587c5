"""Sum a step's gradients over ranks, stage by stage, partly while passes still compute."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch

from megapipe.optim.buffers import FlatBuffers
from megapipe.optim.sharded.buffers import ShardedBuffers
from megapipe.optim.ties import Ties


def all_of(ends: Sequence[Callable[[], None]]) -> Callable[[], None]:
    """Return a function that calls each of the functions in `ends`, in order."""

    def finish() -> None:
        for end in ends:
            end()

    return finish


@dataclass(frozen=True)
class Reduction:
    """The sums over ranks of one step's gradients. The executor starts them stage by stage.

    Gradients are summed over tensor parallelism, over data parallelism, over DualPipe's replicas
    and over parameters with a tied weight. The executor calls `begin` before a stage's backward
    passes, and `start` after the last one. During the last one it may call `start_early`, for
    buckets whose layers are complete. `finish` is called at the end of the step.

    Attributes:
        chunks: for each stage of this rank, its buckets in the order in which they are complete.
        ready: for each stage and bucket, (the bucket's first layer within the stage, the stage's
            number of layers). The bucket is complete once the backward has passed this layer.
        twins: buckets that also exist on the mirrored rank, in the same order on both ranks.
        ties: weights that are used several times.
        whole: buckets whose gradients stay unsharded though others are sharded; `finish` sums them.
        dtype: type to which gradients are rounded for the transfer over data parallelism; None to
            keep their type.
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
        """Whether any bucket is complete before its whole stage is."""
        return any(first for row in self.ready for first, _ in row)

    @property
    def sharded(self) -> list[ShardedBuffers]:
        """The buckets with sharded gradients, which are summed after each sequence of passes."""
        return [b for chunk in self.chunks for b in chunk if isinstance(b, ShardedBuffers)]

    def start_early(self, chunk: int, layer: int, layers: int) -> None:
        """Start to sum a stage's complete buckets while its last backward still runs.

        Args:
            chunk: the position of the stage on this rank.
            layer: the gradients of the stage's layers from this position on are complete.
            layers: number of layers of the stage.
        """
        early = self._early[chunk]
        for n, buffers in enumerate(self.chunks[chunk][:-1]):
            first, count = self.ready[chunk][n]
            # Buckets are complete in order, so the ones that have begun are the first ones.
            is_next = n >= len(early)
            if is_next and layer <= first and layers == count:
                early.append(self._start(buffers))

    def begin(self, chunk: int) -> None:
        """Allocate sharded gradients in full, before backward passes of a stage write to them.

        `chunk` is the position of the stage on this rank.
        """
        for buffers in self.chunks[chunk]:
            if isinstance(buffers, ShardedBuffers):
                buffers.begin_grads()

    def start(self, chunk: int) -> Callable[[], None]:
        """Start to sum the gradients of a stage over tensor and data parallelism.

        Args:
            chunk: the position of the stage on this rank.
        Returns: a function that waits for the sums.
        """
        self._begun.add(chunk)
        # One stage at a time: its gradients are released before the next stage's sum begins. The
        # stage's own buckets may have begun early and go on.
        for sharded in self.sharded:
            if sharded not in self.chunks[chunk]:
                sharded.end_reduce()
        early = self._early.pop(chunk, [])
        late = [self._start(buffers) for buffers in self.chunks[chunk][len(early) :]]
        return all_of([*early, *late])

    def _start(self, buffers: FlatBuffers) -> Callable[[], None]:
        """Start to sum the gradients of one bucket; return a function that waits for the sums."""
        dp = buffers.replicas
        buffers.sum_over_tp(self.ties.mesh.tp)
        # The uses of a weight on several ranks have different places, thus different shares. Under
        # ZeRO-1 each use is therefore summed in full, in addition to the reduce-scatter.
        in_full: set[str] = set()
        if buffers.shares.size > 1 and not isinstance(buffers, ShardedBuffers):
            in_full = self.ties.across_ranks
        grads = [self.ties.main_grad(name) for name in buffers.own if name in in_full]
        sums = []
        for grad in grads:
            copy = grad.clone() if self.dtype is None else grad.to(self.dtype)
            sums.append(dp.start_all_reduce(copy))
        finish_all = buffers.start_reduce(self.dtype)

        def finish() -> None:
            finish_all()
            for grad, pending in zip(grads, sums, strict=True):
                grad.copy_(pending.wait())

        return finish

    def finish(self) -> None:
        """Sum the remaining gradients: stages without `start`, DualPipe's replicas, tied weights.

        The functions that `start` returned must have been called before. The method waits for all
        sums.
        """
        left = [chunk for chunk in range(len(self.chunks)) if chunk not in self._begun]
        for finish in [self.start(chunk) for chunk in left]:
            finish()
        for buffers in self.whole:
            self._start(buffers)()
        for sharded in self.sharded:
            sharded.sum_tied(self.ties.mesh.tp, self.dtype)
        # After data parallelism, and in one order on both ranks: the sum of two sums is then
        # bitwise equal on both.
        for buffers in self.twins:
            for part in buffers.parts:
                self.ties.mesh.twins.all_reduce(part)
        self.ties.add_gradients()
        for sharded in self.sharded:
            sharded.take_tied()
