"""The norm of all heads' queries together, and of all keys, with heads split over ranks.

Its mean of squares is over the heads of all tensor-parallel ranks. Ranks sum their parts, one
number for each token, and never gather the heads.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from megapipe.config import ModelConfig
from megapipe.distributed.axis import Axis
from megapipe.distributed.layout import Layout, parameter
from megapipe.tensor_parallel.eager import eager


class HeadsNorm(nn.Module):
    """The weight [heads x d] of an RMSNorm over all heads; each rank has its own heads' part.

    `norm_heads` applies the norms of queries and keys.

    Args:
        heads: the number of heads on all ranks.
    """

    def __init__(self, config: ModelConfig, heads: int, tp: Axis) -> None:
        super().__init__()
        size = heads * config.head_dim
        self.epsilon = config.norm_epsilon
        self.one_more = config.apply_layernorm_1p
        self.tp = tp
        start = 0.0 if self.one_more else 1.0
        self.weight = parameter(Layout((size,), 0, mean=start), size // tp.size)


class _NormHeads(torch.autograd.Function):
    """y = x r w with r = 1 / sqrt(mean(x^2) + epsilon), for queries and keys at once."""

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        q_weight: Tensor,
        k_weight: Tensor,
        tp: Axis,
        epsilon: float,
    ) -> tuple[Tensor, Tensor]:
        wide = torch.promote_types(q.dtype, torch.float32)
        # One message for both: [2, s, b].
        squares = torch.stack([_sum(x.to(wide).square()) for x in (q, k)])
        squares = tp.all_reduce(squares)
        outs = []
        for x, weight, total in zip((q, k), (q_weight, k_weight), squares, strict=True):
            scale = (total / (weight.numel() * tp.size) + epsilon).rsqrt_()
            outs.append((x.to(wide) * scale[..., None, None] * _by_head(weight, x)).to(x.dtype))
        ctx.save_for_backward(q, k, q_weight, k_weight, squares)
        ctx.tp = tp
        ctx.epsilon = epsilon
        return outs[0], outs[1]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        q, k, q_weight, k_weight, squares = ctx.saved_tensors
        tp = ctx.tp
        wide = squares.dtype
        # With u = x r and g = dy w: dx = r (g - u mean(g u)). The mean is over all ranks' heads.
        parts = []
        sums = []
        for x, weight, total, grad in zip(
            (q, k), (q_weight, k_weight), squares, grads, strict=True
        ):
            size = weight.numel() * tp.size
            scale = (total / size + ctx.epsilon).rsqrt_()[..., None, None]
            unit = x.to(wide) * scale
            dy = grad.to(wide)
            inner = dy * _by_head(weight, x)
            parts.append((scale, unit, dy, inner, size))
            sums.append(_sum(inner * unit))
        dots = tp.all_reduce(torch.stack(sums))
        found: list[Tensor] = []
        weights: list[Tensor] = []
        for (scale, unit, dy, inner, size), dot, weight in zip(
            parts, dots, (q_weight, k_weight), strict=True
        ):
            dx = scale * (inner - unit * (dot / size)[..., None, None])
            found.append(dx.to(q.dtype))
            weights.append((dy * unit).sum((0, 1)).flatten().to(weight.dtype))
        return *found, *weights, None, None


_norm_heads: Callable[..., tuple[Tensor, Tensor]] = _NormHeads.apply


@eager
def norm_heads(q: Tensor, k: Tensor, q_norm: HeadsNorm, k_norm: HeadsNorm) -> tuple[Tensor, Tensor]:
    """Norm the queries of all heads of a token together, and the keys; return both.

    Costs an all-reduce of two numbers for each token over tp, and another one in backward.

    Args:
        q: [s, b, heads/t, d], of this rank's heads. k: [s, b, groups/t, d].
        q_norm, k_norm: the weights, and the axis tp.
    """
    weights = []
    for norm in (q_norm, k_norm):
        weights.append(norm.weight + 1 if norm.one_more else norm.weight)
    return _norm_heads(q, k, *weights, q_norm.tp, q_norm.epsilon)


def _sum(x: Tensor) -> Tensor:
    """Return the sum over heads and channels of x [s, b, heads, d]: [s, b]."""
    return x.sum((-2, -1))


def _by_head(weight: Tensor, x: Tensor) -> Tensor:
    """Return a weight [heads x d] as [heads, d] like x [.., heads, d], in at least float32."""
    return weight.view(x.shape[-2:]).to(torch.promote_types(weight.dtype, torch.float32))
