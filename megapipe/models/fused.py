"""Regions between the products of a layer: SwiGLU, rotary embedding, a residual sum with the norm behind it.

Each keeps its inputs for backward and computes the rest again.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from megapipe.kernels.region import is_fused, region


@region("swiglu(Tensor x) -> Tensor")
def _swiglu(x: Tensor) -> Tensor:
    gate, up = x.chunk(2, dim=-1)
    return F.silu(gate) * up


@region("swiglu_backward(Tensor x, Tensor grad) -> Tensor")
def _swiglu_backward(x: Tensor, grad: Tensor) -> Tensor:
    gate, up = x.chunk(2, dim=-1)
    return torch.cat((torch.ops.aten.silu_backward(grad * up, gate), grad * F.silu(gate)), dim=-1)


class _Swiglu(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return _swiglu(x)  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return _swiglu_backward(*ctx.saved_tensors, grad)  # type: ignore[no-any-return]


def swiglu(x: Tensor) -> Tensor:
    """silu(gate) x up of [gate; up], [..., 2f] -> [..., f] (Shazeer 2020); x alone is kept."""
    return _Swiglu.apply(x)  # type: ignore[no-any-return, no-untyped-call]


@region("weighted_swiglu(Tensor x, Tensor weight) -> Tensor")
def _weighted_swiglu(x: Tensor, weight: Tensor) -> Tensor:
    gate, up = x.chunk(2, dim=-1)
    return (F.silu(gate) * up * weight[:, None]).to(x.dtype)


@region("weighted_swiglu_backward(Tensor x, Tensor weight, Tensor grad) -> (Tensor, Tensor)")
def _weighted_swiglu_backward(x: Tensor, weight: Tensor, grad: Tensor) -> tuple[Tensor, Tensor]:
    gate, up = x.chunk(2, dim=-1)
    silu, given = F.silu(gate), (grad * weight[:, None]).to(x.dtype)
    d_x = torch.cat((torch.ops.aten.silu_backward(given * up, gate), given * silu), dim=-1)
    return d_x, (grad * silu * up).sum(-1, dtype=torch.promote_types(weight.dtype, torch.float32)).to(weight.dtype)


class _WeightedSwiglu(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return _weighted_swiglu(x, weight)  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        return _weighted_swiglu_backward(*ctx.saved_tensors, grad)  # type: ignore[no-any-return]


def weighted_swiglu(x: Tensor, weight: Tensor) -> Tensor:
    """`swiglu` of rows x [R, 2f], each times its weight [R] -> [R, f], in x's type."""
    return _WeightedSwiglu.apply(x, weight)  # type: ignore[no-any-return, no-untyped-call]


@region("rotate(Tensor x, Tensor cos, Tensor sin, bool interleaved, bool back) -> Tensor")
def _rotate(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool, back: bool) -> Tensor:
    sin, dim = -sin if back else sin, cos.shape[-1]
    half = dim // 2
    turn, rest = x[..., :dim].to(cos.dtype), x[..., dim:]
    if interleaved:
        turn = turn.reshape(*turn.shape[:-1], half, 2).transpose(-1, -2).flatten(-2)
    swapped = torch.cat((-turn[..., half:], turn[..., :half]), dim=-1)
    turned = turn * cos + swapped * sin
    if interleaved:
        turned = turned.reshape(*turned.shape[:-1], 2, half).transpose(-1, -2).flatten(-2)
    turned = turned.to(x.dtype)
    return torch.cat((turned, rest), dim=-1) if rest.shape[-1] else turned


class _Rotate(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
        ctx.save_for_backward(cos, sin)
        ctx.interleaved = interleaved
        return _rotate(x, cos, sin, interleaved, False)  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        cos, sin = ctx.saved_tensors
        return _rotate(grad, cos, sin, ctx.interleaved, True), None, None, None


def turned(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
    """x [s, b, heads, d] with its first channels rotated, by angles whose cos and sin [s, 1 or b, 1, dim] are given."""
    return _Rotate.apply(x, cos, sin, interleaved)  # type: ignore[no-any-return, no-untyped-call]


def _plain_norm(x: Tensor, weight: Tensor, bias: Tensor | None, epsilon: float) -> Tensor:
    """LayerNorm of x [..., n], without bias RMSNorm, by torch's kernel."""
    if bias is None:
        return F.rms_norm(x, weight.shape, weight, epsilon)
    return F.layer_norm(x, weight.shape, weight, bias, epsilon)


_norm = region("norm(Tensor x, Tensor weight, Tensor? bias, float epsilon) -> Tensor")(_plain_norm)


@region("add_norm(Tensor x, Tensor delta, Tensor weight, Tensor? bias, float epsilon) -> (Tensor, Tensor)")
def _add_norm(x: Tensor, delta: Tensor, weight: Tensor, bias: Tensor | None, epsilon: float) -> tuple[Tensor, Tensor]:
    total = x + delta
    return total, _plain_norm(total, weight, bias, epsilon)


@region("norm_backward(Tensor grad, Tensor? carried, Tensor x, Tensor weight, Tensor? bias, float epsilon) -> Tensor[]")
def _norm_backward(
    grad: Tensor, carried: Tensor | None, x: Tensor, weight: Tensor, bias: Tensor | None, epsilon: float
) -> list[Tensor]:
    dtype = torch.promote_types(x.dtype, torch.float32)
    wide, dy = x.to(dtype), grad.to(dtype)
    if bias is not None:
        wide = wide - wide.mean(-1, keepdim=True)
    scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + epsilon)
    unit, inner = wide * scale, dy * weight
    dx = inner - unit * (inner * unit).mean(-1, keepdim=True)
    if bias is not None:
        dx = dx - inner.mean(-1, keepdim=True)
    dx = dx * scale if carried is None else dx * scale + carried
    sums = [(dy * unit).flatten(0, -2).sum(0)] + ([] if bias is None else [dy.flatten(0, -2).sum(0)])
    return [dx.to(x.dtype), *(total.to(weight.dtype) for total in sums)]


class _AddNormed(torch.autograd.Function):
    """x [..., n] and what is added to it -> the sum and its norm; the gradients of both are added where they meet."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, delta: Tensor | None, weight: Tensor, bias: Tensor | None, epsilon: float
    ) -> tuple[Tensor, Tensor]:
        if delta is None:
            total, y = x.view_as(x), _norm(x, weight, bias, epsilon)
        else:
            total, y = _add_norm(x, delta, weight, bias, epsilon)
        ctx.save_for_backward(total, weight, bias)
        ctx.epsilon, ctx.adds = epsilon, delta is not None
        ctx.set_materialize_grads(False)
        return total, y

    @staticmethod
    def backward(ctx: Any, carried: Tensor | None, grad: Tensor | None) -> tuple[Tensor | None, ...]:
        if grad is None:
            return carried, carried if ctx.adds else None, None, None, None
        dx, dweight, *dbias = _norm_backward(grad, carried, *ctx.saved_tensors, ctx.epsilon)
        return dx, dx if ctx.adds else None, dweight, *(dbias or [None]), None


def add_norm(
    x: Tensor, delta: Tensor | None, weight: Tensor, bias: Tensor | None, epsilon: float
) -> tuple[Tensor, Tensor]:
    """x [..., n] + delta and the LayerNorm of that, without bias its RMSNorm; on a CPU by torch's kernels."""
    if is_fused(x):
        return fused_add_norm(x, delta, weight, bias, epsilon)  # type: ignore[no-any-return]
    total = x if delta is None else x + delta
    return total, _plain_norm(total, weight, bias, epsilon)


fused_add_norm: Callable[..., Any] = _AddNormed.apply
