"""The norm of the whole model's gradient: the same bits under every layout, and no rank waits until it reads it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache

import torch
from torch import Tensor, nn

from megapipe.distributed.late import Late
from megapipe.distributed.layout import layout_of
from megapipe.distributed.mesh import ProcessMesh
from megapipe.optim.buffers import ALIGN, FlatBuffers


@dataclass(frozen=True)
class Norm:
    """Sums over parameters, each of which counts on one rank of a pipeline.

    Attributes:
        index: place of each parameter of the model in the global order.
        params: of this rank by name.
    """

    mesh: ProcessMesh
    index: Mapping[str, int]
    params: Mapping[str, nn.Parameter]
    _placed: dict[tuple[str, ...], Tensor] = field(default_factory=dict)

    def start(self, owned: Sequence[FlatBuffers], flats: Sequence[Tensor]) -> Late[float]:
        """Sum the squares of each parameter, then those sums in the global order, in float64.

        On each rank zeros stand for the parameters of others, so the all-reduce is exact; one pipeline speaks for its
        replicas. It is the world's, whose communicator no message between stages shares. Rows of a few elements are
        summed in the flat tensor's type first: a sum in float64 alone would copy all of it on a CPU.

        Args:
            flats: one for each of `owned`, tensors of its share's size.
        """
        squares = torch.zeros(len(self.index), dtype=torch.float64, device=self.mesh.device)
        for b, flat in zip(owned, flats, strict=True):
            if names := self.counted(b):
                wide = torch.promote_types(flat.dtype, torch.float32)
                rows = torch.linalg.vector_norm(flat.view(-1, ALIGN), dim=1, dtype=wide).double().square()
                rows = b.gathered(rows)  # 1/32 of the weights' bytes, and the sum has the bits of an unsplit one
                squares[self._places(names)] = torch.stack([rows[b.rows(n)].sum() for n in names])
        # A parameter that is split has a part of its square on each rank; one that is whole counts on the first alone.
        self.mesh.tp.all_reduce(squares)
        if 0 not in self.mesh.pp.ranks:
            squares.zero_()
        pending = self.mesh.world.start_all_reduce(squares)
        return Late(cache(lambda: pending.wait().sum()), lambda values: math.sqrt(values[0]))

    def counted(self, b: FlatBuffers) -> list[str]:
        """The parameters in a buffer that count on this rank."""
        first = self.mesh.tp.rank == 0
        return [n for n in b.own if n in self.index and (first or layout_of(self.params[n]).dim is not None)]

    def _places(self, names: Sequence[str]) -> Tensor:
        """Places of parameters in the global order, on the device once: a list would be copied there in every step."""
        key = tuple(names)
        if key not in self._placed:
            self._placed[key] = torch.tensor([self.index[n] for n in names], device=self.mesh.device)
        return self._placed[key]
