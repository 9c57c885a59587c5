"""Edges of a tensor-parallel region: collectives of a tensor there, and of its gradient.

The edges are the conjugate pairs f, g of Shoeybi et al. 2019, section 3, and those of Korthikanti et al. 2022, section
4.2.2, for a sequence split over the same ranks outside of the regions: what one direction adds up the other copies.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megapipe.distributed.axis import Axis, Pending
from megapipe.tensor_parallel.pieces import Pieces


class Edge(NamedTuple):
    """forward: of the tensor. backward: of its gradient. Both may work in place on what they are given.

    first: is this rank's the first of the summands, which takes what is to be added once?
    pieces: products beside it are made in pieces, while those of others travel.
    """

    forward: Callable[[Tensor], Pending] = Pending
    backward: Callable[[Tensor], Pending] = Pending
    first: bool = True
    pieces: Pieces | None = None


INSIDE = Edge()
"""An edge at which nothing happens."""


def opening(tp: Axis, sequence_parallel: bool, in_pieces: bool = False) -> Edge:
    """Into a region: from the whole [s, ...], or from this rank's [s/t, ...] under sequence parallelism."""
    if tp.size == 1:
        return INSIDE
    pieces = Pieces(tp, sequence_parallel) if in_pieces else None
    if sequence_parallel:
        return Edge(tp.start_all_gather, tp.start_reduce_scatter, pieces=pieces)
    return Edge(backward=tp.start_all_reduce, pieces=pieces)


def closing(tp: Axis, sequence_parallel: bool, in_pieces: bool = False) -> Edge:
    """Out of a region, where each rank has a summand [s, ...]: to the sum, or to this rank's [s/t, ...] of it."""
    if tp.size == 1:
        return INSIDE
    pieces = Pieces(tp, sequence_parallel) if in_pieces else None
    if sequence_parallel:
        return Edge(tp.start_reduce_scatter, tp.start_all_gather, tp.rank == 0, pieces)
    return Edge(tp.start_all_reduce, first=tp.rank == 0, pieces=pieces)


class _Across(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, edge: Edge) -> Tensor:
        ctx.edge = edge
        return edge.forward(x.clone()).wait()  # it may work in place

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return ctx.edge.backward(grad.contiguous()).wait(), None


def across(x: Tensor, edge: Edge) -> Tensor:
    """A tensor over an edge, differentiably."""
    return _Across.apply(x, edge)  # type: ignore[no-untyped-call, no-any-return]
