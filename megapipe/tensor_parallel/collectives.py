"""The collectives at the edges of a tensor-parallel region, for a tensor and for its gradient.

They are the conjugate pairs f and g of Shoeybi et al. 2019, section 3. Under sequence parallelism,
where the sequence is split over the same ranks outside of the regions, they are the pairs of
Korthikanti et al. 2022, section 4.2.2. If one direction sums, the other copies.

    region:            opens                  closes
    tensor parallel:   copy / all-reduce      all-reduce / copy         (forward / backward)
    + sequence:        all-gather / r.-s.     reduce-scatter / all-gather
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megapipe.distributed.axis import Axis, Pending
from megapipe.tensor_parallel.pieces import CollectiveMatmul


class Edge(NamedTuple):
    """The collectives at an edge of a tensor-parallel region, where tensors enter or leave it.

    Forward runs a collective on the tensor, such as an all-gather. Backward runs the conjugate
    collective on the gradient, such as a reduce-scatter.

    Attributes:
        forward, backward: start a collective on a tensor, which they may overwrite, and return
            its pending result.
        first: True on the rank that adds a bias. The others do not, as the sum over ranks would
            contain the bias t times.
        pieces: if given, the product at this edge is computed in pieces of its rows, which overlap
            with the collective.
    """

    forward: Callable[[Tensor], Pending] = Pending
    backward: Callable[[Tensor], Pending] = Pending
    first: bool = True
    pieces: CollectiveMatmul | None = None


INSIDE = Edge()
"""An edge without communication."""


def opening(tp: Axis, sequence_parallel: bool, in_pieces: bool = False) -> Edge:
    """Return the collectives where a tensor [s, ...] enters a region that ranks split.

    Under sequence parallelism the tensor is [s/t, ...] before it enters, on each of t ranks.

    Args:
        tp: the t ranks that split the region.
        sequence_parallel: outside of the region a rank has only its part of the tokens.
        in_pieces: compute the product in pieces, which overlap with the collective.
    """
    if tp.size == 1:
        return INSIDE
    pieces = CollectiveMatmul(tp, sequence_parallel) if in_pieces else None
    if sequence_parallel:
        # Every rank computes a gradient for all rows. The reduce-scatter sums them, and leaves each
        # rank the rows that it gave to the all-gather.
        return Edge(tp.start_all_gather, tp.start_reduce_scatter, pieces=pieces)
    # Forward needs nothing, as every rank has all rows. In backward a rank knows only its columns'
    # summand of the input's gradient.
    return Edge(backward=tp.start_all_reduce, pieces=pieces)


def closing(tp: Axis, sequence_parallel: bool, in_pieces: bool = False) -> Edge:
    """Return the collectives where a tensor leaves the region: every rank has a summand [s, ...].

    The result is the sum; under sequence parallelism this rank's tokens [s/t, ...] of the sum.

    Args:
        tp: the ranks that split the region.
        sequence_parallel: outside of the region a rank has only its part of the tokens.
        in_pieces: compute the product in pieces, which overlap with the collective.
    """
    if tp.size == 1:
        return INSIDE
    pieces = CollectiveMatmul(tp, sequence_parallel) if in_pieces else None
    # Only rank 0 adds the bias (`first`): the sum over the ranks would contain it t times.
    if sequence_parallel:
        return Edge(tp.start_reduce_scatter, tp.start_all_gather, tp.rank == 0, pieces)
    return Edge(tp.start_all_reduce, first=tp.rank == 0, pieces=pieces)


class _Across(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, edge: Edge) -> Tensor:
        ctx.edge = edge
        return edge.forward(x.clone()).wait()  # the collective may overwrite its argument

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        # autograd may hand the same gradient to another function too, as an addition does.
        return ctx.edge.backward(grad.clone(memory_format=torch.contiguous_format)).wait(), None


def across(x: Tensor, edge: Edge) -> Tensor:
    """Return x after an edge's forward collective; backward runs the edge's backward one.

    x is not changed.
    """
    return _Across.apply(x, edge)  # type: ignore[no-untyped-call, no-any-return]
