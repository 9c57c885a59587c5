"""Collectives that autograd can differentiate: each forward has the backward that makes sharded layers exact.

The pairs are those of Shoeybi et al. 2019, section 3: f (identity forward, all-reduce backward) opens a tensor-parallel
region and g (all-reduce forward, identity backward) closes it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from megapipe.mesh import Axis


class _Copy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, tp: Axis) -> Tensor:
        ctx.tp = tp
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return ctx.tp.all_reduce(grad.contiguous().clone()), None


_copy: Callable[..., Tensor] = _Copy.apply


class _Reduce(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, tp: Axis) -> Tensor:
        ctx.mark_dirty(x)
        return tp.all_reduce(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


_reduce: Callable[..., Tensor] = _Reduce.apply


class _GatherLast(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, tp: Axis) -> Tensor:
        ctx.tp = tp
        return gather_last(x, tp)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad.chunk(ctx.tp.size, -1)[ctx.tp.rank].contiguous(), None


_gather_last: Callable[..., Tensor] = _GatherLast.apply


def copy_to_tensor_parallel(x: Tensor, tp: Axis) -> Tensor:
    """Enter a tensor-parallel region: x as it is; its gradient is summed over tp."""
    return x if tp.size == 1 else _copy(x, tp)


def reduce_from_tensor_parallel(x: Tensor, tp: Axis) -> Tensor:
    """Leave a tensor-parallel region: x summed over tp, in place."""
    return x if tp.size == 1 else _reduce(x, tp)


def gather_from_tensor_parallel(x: Tensor, tp: Axis) -> Tensor:
    """[..., n/t] on each rank -> [..., n] on all."""
    return x if tp.size == 1 else _gather_last(x, tp)


def gather_last(x: Tensor, tp: Axis) -> Tensor:
    """`gather_from_tensor_parallel` without a gradient."""
    return torch.cat(tp.all_gather(x.unsqueeze(0)).unbind(0), dim=-1)
