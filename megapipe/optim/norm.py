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

    def start(self, owned: Sequence[FlatBuffers], flats: Sequence[Tensor], scale: float | Tensor = 1.0) -> Late[float]:
        """Sum the squares of each parameter, then those sums in the global order, in float64.

        On each rank zeros stand for the parameters of others, so the all-reduce is exact; one pipeline speaks for its
        replicas. It is the world's, whose communicator no message between stages shares. Rows of a few elements are
        summed in the flat tensor's type first: a sum in float64 alone would copy all of it on a CPU.

        Args:
            flats: one for each of `owned`, tensors of its share's size.
            scale: what they are still to be multiplied by.
        """
        mesh = self.mesh
        squares = torch.zeros(len(self.index), dtype=torch.float64, device=mesh.device)
        for b, flat in zip(owned, flats, strict=True):
            if names := self.counted(b):
                wide = torch.promote_types(flat.dtype, torch.float32)
                rows = torch.linalg.vector_norm(flat.view(-1, ALIGN), dim=1, dtype=wide).double().mul_(scale).square_()
                rows = b.gathered(rows)  # 1/32 of the weights' bytes, and the sum has the bits of an unsplit one
                squares[self._places(names)] = torch.stack([rows[b.rows(n)].sum() for n in names])
        # A parameter that is split has a part of its square on each rank; one that is whole counts on the first alone.
        if mesh.experts.ranks == mesh.tp.ranks or not (experts := self._experts(owned)):
            mesh.tp.all_reduce(squares)
        else:
            # Experts lie on a grid of their own: each kind is summed over its ranks, and they meet in one vector
            # again.
            places = self._places(experts)
            of_experts = mesh.experts.all_reduce(squares[places])
            mesh.tp.all_reduce(squares.index_fill_(0, places, 0.0))[places] = of_experts
        # Of all pipelines one speaks: sums of replicas are the same numbers, and would count again.
        if 0 not in mesh.pp.ranks:
            squares.zero_()
        pending = mesh.world.start_all_reduce(squares)
        return Late(cache(lambda: pending.wait().sum()), lambda values: math.sqrt(values[0]))

    def zeros(self, owned: Sequence[FlatBuffers], *, split: bool) -> int:
        """Elements of the gradients that are exactly zero. split: a rank has a share of them."""
        found = torch.zeros(2, dtype=torch.int64, device=self.mesh.device)
        for b in owned:
            for name in self.counted(b):
                grad = b.own_part(b.reduced, name)
                found[int(layout_of(self.params[name]).experts)] += grad.numel() - grad.count_nonzero()
        if split:
            self.mesh.dp_cp.all_reduce(found[:1])
            self.mesh.edp.all_reduce(found[1:])
        return int(self._of_model(found))

    def of_frozen(self, params: Sequence[nn.Parameter]) -> float:
        """The norm of parameters that are not trained, of those that count on this rank."""
        squares = torch.zeros(2, dtype=torch.float64, device=self.mesh.device)
        for param in params:
            squares[int(layout_of(param).experts)] += param.detach().double().square().sum()
        return math.sqrt(self._of_model(squares))

    def _of_model(self, sums: Tensor) -> float:
        """The model's sum of [2], what this rank's dense parameters and its experts have of it, each element once."""
        self.mesh.tp.all_reduce(sums[:1])
        self.mesh.experts.all_reduce(sums[1:])
        return self.mesh.pp.all_reduce(sums).sum().item()

    def counted(self, b: FlatBuffers) -> list[str]:
        """The parameters in a buffer that count on this rank."""
        return [n for n in b.own if n in self.index and layout_of(self.params[n]).is_first(self.mesh.tp)]

    def _experts(self, owned: Sequence[FlatBuffers]) -> list[str]:
        """Parameters that lie on the experts' grid, the same on all ranks of a stage."""
        return [n for b in owned for n in b.own if n in self.index and layout_of(self.params[n]).experts]

    def _places(self, names: Sequence[str]) -> Tensor:
        """Places of parameters in the global order, on the device once: a list would be copied there in every step."""
        key = tuple(names)
        if key not in self._placed:
            self._placed[key] = torch.tensor([self.index[n] for n in names], device=self.mesh.device)
        return self._placed[key]
