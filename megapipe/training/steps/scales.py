"""Scales of a rank's products in eight bits: quantised weights for a step, largest values for those to come."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from megapipe.distributed.mesh import ProcessMesh
from megapipe.tensor_parallel.fp8.products import Delayed, Scaled


class Scales:
    """Scales of one rank.

    Args:
        modules: its stages.
        mirrored: DualPipe's: a stage exists twice, on mirrored ranks.
    """

    def __init__(self, modules: Sequence[nn.Module], mesh: ProcessMesh, *, mirrored: bool) -> None:
        self._axes = [mesh.tp, mesh.dp_cp, *([mesh.twins] if mirrored else [])]
        named = dict(pair for module in modules for pair in module.named_modules())
        # By name: in one order on a rank and its mirror image.
        self._own = [part for _, part in sorted(named.items()) if isinstance(part, Scaled)]
        self._delayed = [part for part in self._own if isinstance(part, Delayed)]

    def begin(self) -> None:
        """Start a step, or start it again, with weights that may be others."""
        for part in self._own:
            part.keeping(True)

    @contextmanager
    def of_a_step(self) -> Iterator[None]:
        """The passes of a step, in which weights do not change between two of them that read one."""
        self.begin()
        try:
            yield
        finally:
            for part in self._own:
                part.keeping(False)

    def moved(self) -> list[tuple[Tensor, Tensor]]:
        """Return each history and what it is after this step. Collective over the ranks with these layers: one value
        of each tensor."""
        if not self._delayed:
            return []
        seen = torch.stack([part.seen for part in self._delayed])
        for axis in self._axes:
            axis.all_reduce(seen, "max")
        return [(part.amax_history, part.after(row)) for part, row in zip(self._delayed, seen, strict=True)]
