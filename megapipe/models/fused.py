"""The operations between a layer's matrix products, each fused into one kernel on a GPU.

SwiGLU, rotary embedding, and a residual sum with the norm that follows it. Each saves only its
inputs for backward and computes everything else again.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from megapipe.kernels.region import is_fused, region


@region("swiglu(Tensor x, Tensor? weight) -> Tensor")
def _swiglu(x: Tensor, weight: Tensor | None) -> Tensor:
    gate, up = x.chunk(2, dim=-1)
    y = F.silu(gate) * up
    # With --moe-router-dtype fp32 the weight is wider than x, and would widen the whole layer.
    return y if weight is None else (y * weight[:, None]).to(x.dtype)


@region("swiglu_backward(Tensor x, Tensor? weight, Tensor grad) -> Tensor[]")
def _swiglu_backward(x: Tensor, weight: Tensor | None, grad: Tensor) -> list[Tensor]:
    gate, up = x.chunk(2, dim=-1)
    silu = F.silu(gate)
    weighted = grad if weight is None else (grad * weight[:, None]).to(x.dtype)
    # The whole gradient of x = [gate, up] is one tensor, which the next product reads as it is.
    d_gate = torch.ops.aten.silu_backward(weighted * up, gate)
    d_x = torch.cat((d_gate, weighted * silu), dim=-1)
    if weight is None:
        return [d_x]
    # A row's sum of f products in 16 bits would lose most of its digits.
    sums = torch.promote_types(weight.dtype, torch.float32)
    return [d_x, (grad * silu * up).sum(-1, dtype=sums).to(weight.dtype)]


# Autograd would keep silu(gate), too: half as much again as x.
class _Swiglu(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, weight)
        return _swiglu(x, weight)  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        d_x, *d_weight = _swiglu_backward(*ctx.saved_tensors, grad)
        return d_x, *(d_weight or [None])


def swiglu(x: Tensor, weight: Tensor | None = None) -> Tensor:
    """Return silu(gate) x up (Shazeer 2020) for x = [gate, up], times each row's weight.

    Args:
        x: [..., 2f]; with the weight the only tensor saved for backward.
        weight: [R] for x of [R, 2f], or None.
    Returns: [..., f], in x's type.
    """
    return _Swiglu.apply(x, weight)  # type: ignore[no-any-return, no-untyped-call]


@region("rotate(Tensor x, Tensor cos, Tensor sin, bool interleaved, bool back) -> Tensor")
def _rotate(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool, back: bool) -> Tensor:
    """Rotate the first channels of x, or rotate them back.

    Args:
        x: [s, b, heads, d]. cos, sin: [s, 1 or b, 1, dim].
        interleaved: channels 2i and 2i+1 form a pair; otherwise i and i + dim/2.
        back: use the opposite angle, as for the gradient.
    """
    if back:
        sin = -sin
    dim = cos.shape[-1]
    half = dim // 2
    turn = x[..., :dim].to(cos.dtype)
    rest = x[..., dim:]
    if interleaved:
        # Pairs (2i, 2i+1) become (i, i + dim/2), are rotated so, and go back to their places.
        turn = turn.reshape(*turn.shape[:-1], half, 2).transpose(-1, -2).flatten(-2)
    swapped = torch.cat((-turn[..., half:], turn[..., :half]), dim=-1)
    turned = turn * cos + swapped * sin
    if interleaved:
        turned = turned.reshape(*turned.shape[:-1], 2, half).transpose(-1, -2).flatten(-2)
    turned = turned.to(x.dtype)
    if rest.shape[-1]:
        return torch.cat((turned, rest), dim=-1)
    return turned


class _Rotate(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
        # A rotation is linear: its gradient needs the angles and not x.
        ctx.save_for_backward(cos, sin)
        ctx.interleaved = interleaved
        return _rotate(x, cos, sin, interleaved, False)  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        cos, sin = ctx.saved_tensors
        return _rotate(grad, cos, sin, ctx.interleaved, True), None, None, None


def turned(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
    """Rotate the first `dim` channels of every head by given angles.

    Args:
        x: [s, b, heads, d], d at least dim.
        cos, sin: [s, 1 or b, 1, dim], of each channel's angle.
        interleaved: channels 2i and 2i+1 form a pair; otherwise i and i + dim/2.
    Returns: [s, b, heads, d] in x's type; channels from dim on are unchanged.
    """
    return _Rotate.apply(x, cos, sin, interleaved)  # type: ignore[no-any-return, no-untyped-call]


def _plain_norm(x: Tensor, weight: Tensor, bias: Tensor | None, epsilon: float) -> Tensor:
    """Return torch's LayerNorm of x [..., n], or its RMSNorm if there is no bias.

    weight: [n]. bias: [n] or None. epsilon: added to the variance, or to the mean square.
    """
    if bias is None:
        return F.rms_norm(x, weight.shape, weight, epsilon)
    return F.layer_norm(x, weight.shape, weight, bias, epsilon)


_norm = region("norm(Tensor x, Tensor weight, Tensor? bias, float epsilon) -> Tensor")(_plain_norm)


@region(
    "add_norm(Tensor x, Tensor delta, Tensor weight, Tensor? bias, float epsilon) "
    "-> (Tensor, Tensor)"
)
def _add_norm(
    x: Tensor, delta: Tensor, weight: Tensor, bias: Tensor | None, epsilon: float
) -> tuple[Tensor, Tensor]:
    total = x + delta
    return total, _plain_norm(total, weight, bias, epsilon)


@region(
    "norm_backward(Tensor grad, Tensor? carried, Tensor x, Tensor weight, Tensor? bias, "
    "float epsilon) -> Tensor[]"
)
def _norm_backward(
    grad: Tensor,
    carried: Tensor | None,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    epsilon: float,
) -> list[Tensor]:
    """Return the gradients of x, weight and, for LayerNorm, bias, in this order.

    Args:
        grad: gradient of the norm's output, [..., n].
        carried: gradient of x from the residual connection, which is added to the gradient of x; or
            None.
        x: [..., n], the norm's input. bias: None for RMSNorm.
    """
    # With u = (x - mean) scale and g = dy weight (Ba et al. 2016):
    #   dx = scale (g - u mean(g u) - mean(g)). RMSNorm has neither mean.
    dtype = torch.promote_types(x.dtype, torch.float32)
    wide = x.to(dtype)
    dy = grad.to(dtype)
    if bias is not None:
        wide = wide - wide.mean(-1, keepdim=True)
    scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + epsilon)
    unit = wide * scale
    inner = dy * weight
    dx = inner - unit * (inner * unit).mean(-1, keepdim=True)
    if bias is not None:
        dx = dx - inner.mean(-1, keepdim=True)
    dx = dx * scale
    if carried is not None:
        dx = dx + carried
    sums = [(dy * unit).flatten(0, -2).sum(0)]
    if bias is not None:
        sums.append(dy.flatten(0, -2).sum(0))
    return [dx.to(x.dtype), *(total.to(weight.dtype) for total in sums)]


class _AddNormed(torch.autograd.Function):
    """(x, delta) -> (x + delta, norm(x + delta)).

    Both outputs have a gradient with respect to the sum; the backward kernel adds the two.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        delta: Tensor | None,
        weight: Tensor,
        bias: Tensor | None,
        epsilon: float,
    ) -> tuple[Tensor, Tensor]:
        if delta is None:
            total = x.view_as(x)
            y = _norm(x, weight, bias, epsilon)
        else:
            total, y = _add_norm(x, delta, weight, bias, epsilon)
        ctx.save_for_backward(total, weight, bias)
        ctx.epsilon = epsilon
        ctx.adds = delta is not None
        # An unused output then has the gradient None instead of a tensor of zeros.
        ctx.set_materialize_grads(False)
        return total, y

    @staticmethod
    def backward(
        ctx: Any, carried: Tensor | None, grad: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        # Only the sum was used: its gradient goes on unchanged.
        if grad is None:
            return carried, carried if ctx.adds else None, None, None, None
        dx, d_weight, *d_bias = _norm_backward(grad, carried, *ctx.saved_tensors, ctx.epsilon)
        return dx, dx if ctx.adds else None, d_weight, *(d_bias or [None]), None


def add_norm(
    x: Tensor, delta: Tensor | None, weight: Tensor, bias: Tensor | None, epsilon: float
) -> tuple[Tensor, Tensor]:
    """Return (x + delta, norm(x + delta)): one kernel on a GPU, torch's operations on a CPU.

    Args:
        x: [..., n]. delta: [..., n], or None to add nothing: the first result is then x or a view
            of it.
        weight: [n]. bias: [n] for LayerNorm, None for RMSNorm.
        epsilon: added to the variance, or to the mean square.
    """
    if is_fused(x):
        return fused_add_norm(x, delta, weight, bias, epsilon)  # type: ignore[no-any-return]
    total = x if delta is None else x + delta
    return total, _plain_norm(total, weight, bias, epsilon)


fused_add_norm: Callable[..., Any] = _AddNormed.apply
