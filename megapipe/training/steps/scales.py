"""FP8 scales of a rank's layers: quantised weights of one step, and the amax histories."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from megapipe.distributed.mesh import ProcessMesh
from megapipe.tensor_parallel.fp8.products import Delayed, Scaled


class Scales:
    """The scales of all FP8 layers on one rank.

    `begin` drops quantised weights of earlier steps. `during_step` keeps each quantised weight for
    the passes of one step. `buffer_updates` returns the amax histories after the step.

    Args:
        modules: this rank's stages.
        mesh: this rank's mesh.
        mirrored: under DualPipe a stage exists on two ranks, which share their scales.
    """

    def __init__(self, modules: Sequence[nn.Module], mesh: ProcessMesh, *, mirrored: bool) -> None:
        self._axes = [mesh.tp, mesh.dp_cp]
        if mirrored:
            self._axes.append(mesh.twins)
        named = dict(pair for module in modules for pair in module.named_modules())
        # Sorted by name, so that a rank and its mirror image have the same order.
        self._own = [part for _, part in sorted(named.items()) if isinstance(part, Scaled)]
        self._delayed = [part for part in self._own if isinstance(part, Delayed)]

    def begin(self) -> None:
        """Drop quantised weights at the start of a step, or when a step starts again."""
        for part in self._own:
            part.keeping(True)

    @contextmanager
    def during_step(self) -> Iterator[None]:
        """Return a context for a step's passes, which quantise each weight once.

        No weight may change between two uses inside it.
        """
        self.begin()
        try:
            yield
        finally:
            for part in self._own:
                # The update that follows changes the weights.
                part.keeping(False)

    def buffer_updates(self) -> list[tuple[Tensor, Tensor]]:
        """Return (amax history, the history after this step) of each tensor that is scaled for FP8.

        Each absolute maximum is the largest over all ranks with the layer. Collective over these.
        """
        if not self._delayed:
            return []
        # One reduction for all tensors and axes.
        seen = torch.stack([part.seen for part in self._delayed])
        for axis in self._axes:
            axis.all_reduce(seen, "max")
        return [
            (part.amax_history, part.after(row))
            for part, row in zip(self._delayed, seen, strict=True)
        ]
