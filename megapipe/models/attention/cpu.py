"""Causal attention on a CPU: blocks of queries, each with the keys up to its end, so that half of s x s is computed.

torch's kernel takes three times as long in bf16, because its tiles are too small for fast matrix products. Kept for
backward are q, k and v, which the model holds anyway; the probabilities are computed again (Chen et al. 2016).
A processor with tiles does a head at once (`kernels/attention.c`), in bf16, in 0.35 of their time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

import torch
from torch import Tensor

from megapipe.kernels import cpu as kernels
from megapipe.kernels.attention import attention_, has_attention
from megapipe.kernels.cpu import has_loops

_BLOCK = 128
"""Queries of a block: fewer make small products, more compute more of what the mask removes."""
_SCORES = 1 << 21
"""Scores held at once, or those of a block of one query group."""


class _CausalAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        ctx.save_for_backward(q, k, v)
        out, ctx.by_tiles = _empty_like(q), has_attention(q, k, v)
        if ctx.by_tiles:
            attention_(q, k, v, out)
            return out
        for queries, keys, values, outs in _pairs(q, k, v, out):
            q_rows, k_rows, v_rows = map(_rows, (queries, keys, values))
            space = _space(queries)
            for first, end, rows in _blocks(queries):
                p = _probabilities(q_rows[:, rows], k_rows[:, :end].contiguous(), end - first, space)
                outs[:, first:end] = (p @ v_rows[:, :end]).view_as(outs[:, first:end])
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, ...]:
        q, k, v = ctx.saved_tensors
        grads = tuple(map(_empty_like, (q, k, v)))
        if ctx.by_tiles:
            attention_(q, k, v, grad if grad.stride(-1) == 1 else grad.contiguous(), *grads, backward=True)
            return grads
        scale, sums = _scale(q), torch.promote_types(q.dtype, torch.float32)
        for queries, keys, values, outs, dq, dk, dv in _pairs(q, k, v, grad, *grads):
            q_rows, k_rows, v_rows, do_rows = map(_rows, (queries, keys, values, outs))
            dk_sum, dv_sum = (torch.zeros_like(k_rows, dtype=sums) for _ in range(2))
            space, second_space = _space(queries), _space(queries)
            for first, end, rows in _blocks(queries):
                q_block, do_block = (x[:, rows].contiguous() for x in (q_rows, do_rows))
                k_seen, v_seen = (x[:, :end].contiguous() for x in (k_rows, v_rows))
                p = _probabilities(q_block, k_seen, end - first, space)
                dv_sum[:, :end].add_(p.mT @ do_block)
                dp = torch.bmm(do_block, v_seen.mT, out=_part(second_space, p.shape))
                ds = _scores_grad(p, dp, scale)
                dq[:, first:end] = (ds @ k_seen).view_as(dq[:, first:end])
                dk_sum[:, :end].add_(ds.mT @ q_block)
            dk.copy_(dk_sum.view_as(dk))
            dv.copy_(dv_sum.view_as(dv))
        return grads


_causal_attention: Callable[..., Tensor] = _CausalAttention.apply


def causal_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """softmax(q k^T / sqrt(d)) v with each query seeing the keys up to its own position.

    Args:
        q: [b, heads, s, d].
        k, v: [b, groups, s, d], each group for heads/groups successive heads.
    Returns: [b, heads, s, d], contiguous as [s, b, heads, d]. Scores and probabilities have q's type, float32 for fp16;
        softmax and the sums over blocks are float32 in between. Memory: two blocks of scores, at most 2M each or one
        group's. By a processor's tiles: scores are float32, 32 rows of them and their gradient.
    """
    return _causal_attention(q, k, v)


# Below, n: pairs of a sequence and a query group, g: query heads in a group. A token's g rows follow each other, so
# that a group's heads share one product with its keys.


def _pairs(q: Tensor, k: Tensor, *others: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Pairs of sequence and query group, [b, heads or groups, s, d], as views [n, s, g or 1, d] of a few at a time."""
    views = [
        x.view(len(x), k.shape[1], x.shape[1] // k.shape[1], *x.shape[2:]).transpose(2, 3).flatten(0, 1)
        for x in (q, k, *others)
    ]
    _, s, per_token, _ = views[0].shape
    # As many pairs at a time as keep the scores of a block in the cache.
    return zip(*(torch.split(x, max(1, _SCORES // (_BLOCK * s * per_token))) for x in views), strict=True)


def _empty_like(x: Tensor) -> Tensor:
    """[b, heads, s, d] that is contiguous as [s, b, heads, d], as the layers around attention want it."""
    b, heads, s, d = x.shape
    return x.new_empty(s, b, heads, d).permute(1, 2, 0, 3)


def _rows(x: Tensor) -> Tensor:
    """[n, s, g, d] -> [n, s g, d], contiguous: products of strided rows take longer than this copy."""
    return x.to(_wide(x)).contiguous().flatten(1, 2)


def _wide(x: Tensor) -> torch.dtype:
    """The type of scores. fp16 ends at 65504, which they can pass."""
    return torch.float32 if x.dtype == torch.float16 else x.dtype


def _space(queries: Tensor) -> Tensor:
    """Room for the scores of any block: allocated once, for the system clears what it hands out."""
    n, s, per_token, _ = queries.shape
    return queries.new_empty(n * min(_BLOCK, s) * per_token * s, dtype=_wide(queries))


def _part(space: Tensor, shape: torch.Size) -> Tensor:
    return space[: shape.numel()].view(shape)


def _blocks(queries: Tensor) -> Iterator[tuple[int, int, slice]]:
    """First token, end and rows of each block."""
    _, s, per_token, _ = queries.shape
    for first in range(0, s, _BLOCK):
        end = min(first + _BLOCK, s)
        yield first, end, slice(first * per_token, end * per_token)


def _probabilities(q: Tensor, k: Tensor, tokens: int, space: Tensor) -> Tensor:
    """Probabilities of the rows q [n, tokens g, d], whose tokens are the last ones of the keys k [n, end, d]."""
    scores = _part(space, torch.Size((*q.shape[:2], k.shape[1])))
    torch.baddbmm(scores, q, k.mT, beta=0, alpha=_scale(q), out=scores)
    if has_loops(scores):
        kernels.causal_softmax_(scores, tokens)
        return scores
    scores[:, :, -tokens:].add_(_mask(tokens, q.shape[1] // tokens, q.dtype))  # += would copy the sum onto itself
    return torch.softmax(scores, -1, out=scores)


def _scores_grad(p: Tensor, dp: Tensor, scale: float) -> Tensor:
    """The gradient of scores before they are scaled, in the place of dp, their probabilities' gradient."""
    if has_loops(p, dp):
        kernels.softmax_backward_(p, dp, scale)
        return dp
    torch.ops.aten._softmax_backward_data.out(dp, p, -1, dp.dtype, grad_input=dp)
    return dp.mul_(scale)


@cache
def _mask(tokens: int, per_token: int, dtype: torch.dtype) -> Tensor:
    """[tokens per_token, tokens]: minus infinity where a key is later than the query."""
    later = torch.full((tokens, tokens), float("-inf"), dtype=dtype).triu_(1)
    return later.repeat_interleave(per_token, dim=0)


def _scale(q: Tensor) -> float:
    return float(q.shape[-1] ** -0.5)
