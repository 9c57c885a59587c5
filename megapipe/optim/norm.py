"""Compute the norm of the whole model's gradient, bitwise equal under every layout.

The host does not wait for the norm until it reads it.
"""

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
    """Norms and counts over all parameters of the model; each parameter counts once.

    The optimizer uses `start` for the gradients' norm, `zeros` for --log-num-zeros-in-grad, and
    `of_frozen` for frozen parameters.

    Attributes:
        mesh: this rank's mesh.
        index: {name: position of the parameter in the order of the whole model}.
        params: {name: parameter} of this rank.
    """

    mesh: ProcessMesh
    index: Mapping[str, int]
    params: Mapping[str, nn.Parameter]
    _placed: dict[tuple[str, ...], Tensor] = field(default_factory=dict)

    def start(
        self, owned: Sequence[FlatBuffers], flats: Sequence[Tensor], scale: float | Tensor = 1.0
    ) -> Late[float]:
        """Start to compute the L2 norm of flat tensors over the whole model.

        The squares of each parameter are summed first. These sums are then added in the order of
        the model, in float64. Collective over the mesh.

        Args:
            owned: buckets (flat buffers) whose main parameters are on this rank.
            flats: for each bucket a flat tensor of the elements that this rank updates, such as
                gradients.
            scale: factor by which the tensors are still to be multiplied.
        Returns: the norm; reading it waits for the device.
        """
        mesh = self.mesh
        # On each rank zeros stand for the parameters of other ranks, so that the all-reduce below
        # adds one number and zeros: it is exact in any order.
        squares = torch.zeros(len(self.index), dtype=torch.float64, device=mesh.device)
        for b, flat in zip(owned, flats, strict=True):
            names = self.counted(b)
            if names:
                # Rows of ALIGN elements are summed in the tensor's type first. A float64 sum of all
                # would make a float64 copy of the tensor on a CPU.
                wide = torch.promote_types(flat.dtype, torch.float32)
                rows = torch.linalg.vector_norm(flat.view(-1, ALIGN), dim=1, dtype=wide)
                rows = rows.double().mul_(scale).square_()
                # The sums of rows are 1/32 of the weights' bytes. Gathered from all shares, they
                # make a parameter's sum bitwise equal to one without ZeRO.
                rows = b.gathered(rows)
                squares[self._places(names)] = torch.stack([rows[b.rows(n)].sum() for n in names])
        # Each rank has a part of the square of a parameter that is split. One that is not split
        # counts on the first rank alone.
        experts = []
        if mesh.experts.ranks != mesh.tp.ranks:
            experts = self._experts(owned)
        if not experts:
            mesh.tp.all_reduce(squares)
        else:
            # Experts are split over other ranks than dense parameters. Each kind is summed over its
            # own ranks, and both meet in one vector again.
            places = self._places(experts)
            of_experts = mesh.experts.all_reduce(squares[places])
            mesh.tp.all_reduce(squares.index_fill_(0, places, 0.0))[places] = of_experts
        # Replicas of the pipeline have equal sums, so only the one with rank 0 counts.
        if 0 not in mesh.pp.ranks:
            squares.zero_()
        # Over the world, whose communicator carries no messages between stages.
        pending = mesh.world.start_all_reduce(squares)
        return Late(cache(lambda: pending.wait().sum()), lambda values: math.sqrt(values[0]))

    def zeros(self, owned: Sequence[FlatBuffers], *, split: bool) -> int:
        """Return the number of gradient elements that are exactly zero. Collective over the mesh.

        Args:
            owned: buckets (flat buffers) whose main parameters are on this rank.
            split: whether each data-parallel rank has only a share of the gradients.
        """
        found = torch.zeros(2, dtype=torch.int64, device=self.mesh.device)
        for b in owned:
            for name in self.counted(b):
                grad = b.own_part(b.reduced, name)
                kind = int(layout_of(self.params[name]).experts)
                found[kind] += grad.numel() - grad.count_nonzero()
        # Dense parameters and experts have different replicas, thus different shares.
        if split:
            self.mesh.dp_cp.all_reduce(found[:1])
            self.mesh.edp.all_reduce(found[1:])
        return int(self._of_model(found))

    def of_frozen(self, params: Sequence[nn.Parameter]) -> float:
        """Return the L2 norm of frozen parameters. Collective over pipeline, tp and experts.

        Args:
            params: the frozen parameters that count on this rank.
        """
        squares = torch.zeros(2, dtype=torch.float64, device=self.mesh.device)
        for param in params:
            kind = int(layout_of(param).experts)
            squares[kind] += param.detach().double().square().sum()
        return math.sqrt(self._of_model(squares))

    def _of_model(self, sums: Tensor) -> float:
        """Return the total of the sums of all ranks that hold one replica of the model.

        Args:
            sums: [2], this rank's sums over dense parameters and over experts; overwritten.
        """
        self.mesh.tp.all_reduce(sums[:1])
        self.mesh.experts.all_reduce(sums[1:])
        return self.mesh.pp.all_reduce(sums).sum().item()

    def counted(self, b: FlatBuffers) -> list[str]:
        """Return the names of a buffer's parameters that count on this rank.

        A parameter that repeats a tied weight counts on no rank. A parameter that tensor
        parallelism does not split counts only on the first rank.

        Args:
            b: the buffer.
        """
        tp = self.mesh.tp
        return [n for n in b.own if n in self.index and layout_of(self.params[n]).is_first(tp)]

    def _experts(self, owned: Sequence[FlatBuffers]) -> list[str]:
        """Return the names of experts' parameters in some buckets.

        All ranks of a stage return the same names.
        """
        names = [n for b in owned for n in b.own if n in self.index]
        return [n for n in names if layout_of(self.params[n]).experts]

    def _places(self, names: Sequence[str]) -> Tensor:
        """Return the positions of parameters in the model's order, as a tensor on the device.

        The tensor is cached, because a new one would be copied to the device in every step.

        Args:
            names: names of the parameters.
        """
        key = tuple(names)
        if key not in self._placed:
            places = [self.index[n] for n in names]
            self._placed[key] = torch.tensor(places, device=self.mesh.device)
        return self._placed[key]
