"""Causal attention on a CPU, which computes only half of the s x s scores.

Queries are cut into blocks; each block meets the keys up to its end. torch's kernel takes three
times as long in bf16, because its tiles are too small for fast matrix products. Saved for backward
are q, k and v, which the model keeps anyway; probabilities are computed again (Chen et al. 2016).
On a processor with AMX tiles, kernels/attention.c computes bf16 one head at a time, in 0.35 of the
time of the blocks.
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
"""Queries of a block. Fewer make small products; more compute scores that the mask removes."""
_SCORES = 1 << 21
"""Scores held at once, unless one query group's block has more."""


class _CausalAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        ctx.save_for_backward(q, k, v)
        out = _empty_like(q)
        ctx.by_tiles = has_attention(q, k, v)
        if ctx.by_tiles:
            attention_(q, k, v, out)
            return out
        for queries, keys, values, outs in _pairs(q, k, v, out):
            q_rows, k_rows, v_rows = map(_rows, (queries, keys, values))
            space = _space(queries)
            for first, end, rows in _blocks(queries):
                k_seen = k_rows[:, :end].contiguous()
                p = _probabilities(q_rows[:, rows], k_seen, end - first, space)
                outs[:, first:end] = (p @ v_rows[:, :end]).view_as(outs[:, first:end])
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, ...]:
        q, k, v = ctx.saved_tensors
        grads = tuple(map(_empty_like, (q, k, v)))
        if ctx.by_tiles:
            # C reads any strides but the last one.
            if grad.stride(-1) != 1:
                grad = grad.contiguous()
            attention_(q, k, v, grad, *grads, backward=True)
            return grads
        scale = _scale(q)
        sums = torch.promote_types(q.dtype, torch.float32)
        for queries, keys, values, outs, dq, dk, dv in _pairs(q, k, v, grad, *grads):
            q_rows, k_rows, v_rows, do_rows = map(_rows, (queries, keys, values, outs))
            # A key receives a summand from every later block; bf16 would be rounded each time.
            dk_sum = torch.zeros_like(k_rows, dtype=sums)
            dv_sum = torch.zeros_like(k_rows, dtype=sums)
            space = _space(queries)
            second_space = _space(queries)
            for first, end, rows in _blocks(queries):
                q_block = q_rows[:, rows].contiguous()
                do_block = do_rows[:, rows].contiguous()
                k_seen = k_rows[:, :end].contiguous()
                v_seen = v_rows[:, :end].contiguous()
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
    """Return softmax(q k^T / sqrt(d)) v under the causal mask.

    Args:
        q: [b, heads, s, d].
        k, v: [b, groups, s, d]; heads/groups successive heads share a group.
    Returns: [b, heads, s, d], contiguous as [s, b, heads, d]. Scores and probabilities have q's
        type (float32 for fp16); softmax and the sums over blocks are float32 in between. Memory:
        two blocks of scores, each at most 2M scores or one group's. With AMX tiles: 32 rows of
        float32 scores and their gradient.
    """
    return _causal_attention(q, k, v)


# Shapes below. n: pairs of a sequence and a query group. g: query heads in a group. The g rows of
# a token follow each other, so that a group's heads share one product with the group's keys.


def _pairs(q: Tensor, k: Tensor, *others: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Yield the tensors for n query groups, of any sequences, at a time.

    n is chosen so that the scores of one block stay in the cache.

    Args:
        q: [b, heads, s, d]. k: [b, groups, s, d]. others: of either shape.
    Yields: views of (q, k, *others), each [n, s, g, d]. g is heads / groups for tensors shaped like
        q, and 1 for tensors shaped like k.
    """
    groups = k.shape[1]
    views = []
    for x in (q, k, *others):
        by_group = x.view(len(x), groups, x.shape[1] // groups, *x.shape[2:])
        views.append(by_group.transpose(2, 3).flatten(0, 1))
    _, s, per_token, _ = views[0].shape
    # As many pairs at a time as keep the scores of a block in the cache.
    size = max(1, _SCORES // (_BLOCK * s * per_token))
    return zip(*(torch.split(x, size) for x in views), strict=True)


def _empty_like(x: Tensor) -> Tensor:
    """Return an uninitialised [b, heads, s, d] that is contiguous as [s, b, heads, d].

    The projections around attention use that order.
    """
    b, heads, s, d = x.shape
    return x.new_empty(s, b, heads, d).permute(1, 2, 0, 3)


def _rows(x: Tensor) -> Tensor:
    """Return x [n, s, g, d] as [n, s x g, d], contiguous and in the type of scores.

    Products of strided rows take longer than this copy.
    """
    return x.to(_wide(x)).contiguous().flatten(1, 2)


def _wide(x: Tensor) -> torch.dtype:
    """Return the type of scores: float32 for fp16, whose largest number scores can exceed."""
    if x.dtype == torch.float16:
        return torch.float32
    return x.dtype


def _space(queries: Tensor) -> Tensor:
    """Return memory for the scores of any block of the queries [n, s, g, d].

    Allocated once: the operating system clears the memory that it hands out, which takes time.
    """
    n, s, per_token, _ = queries.shape
    return queries.new_empty(n * min(_BLOCK, s) * per_token * s, dtype=_wide(queries))


def _part(space: Tensor, shape: torch.Size) -> Tensor:
    return space[: shape.numel()].view(shape)


def _blocks(queries: Tensor) -> Iterator[tuple[int, int, slice]]:
    """Cut the queries [n, s, g, d] into blocks of tokens.

    Yields: (first token, token after the last, slice of the block in the queries viewed as
        [n, s x g, d]).
    """
    _, s, per_token, _ = queries.shape
    for first in range(0, s, _BLOCK):
        end = min(first + _BLOCK, s)
        yield first, end, slice(first * per_token, end * per_token)


def _probabilities(q: Tensor, k: Tensor, tokens: int, space: Tensor) -> Tensor:
    """Return the attention probabilities of a block of queries, in the given memory.

    Args:
        q: [n, tokens x g, d]: queries of n query groups with g heads each. The block's tokens are
            the last `tokens` of the `end` tokens of k.
        k: [n, end, d].
        tokens: number of tokens in the block.
        space: memory from `_space`, overwritten.
    Returns: [n, tokens x g, end].
    """
    scores = _part(space, torch.Size((*q.shape[:2], k.shape[1])))
    torch.baddbmm(scores, q, k.mT, beta=0, alpha=_scale(q), out=scores)
    if has_loops(scores):
        kernels.causal_softmax_(scores, tokens)
        return scores
    mask = _mask(tokens, q.shape[1] // tokens, q.dtype)
    scores[:, :, -tokens:].add_(mask)  # += would copy the sum onto itself
    return torch.softmax(scores, -1, out=scores)


def _scores_grad(p: Tensor, dp: Tensor, scale: float) -> Tensor:
    """Return the gradient of the unscaled scores q k^T, in the memory of dp.

    Args:
        p: probabilities, [n, rows, keys]. dp: their gradient, overwritten.
        scale: the factor that makes scores of q k^T, 1 / sqrt(d).
    """
    if has_loops(p, dp):
        kernels.softmax_backward_(p, dp, scale)
        return dp
    torch.ops.aten._softmax_backward_data.out(dp, p, -1, dp.dtype, grad_input=dp)
    return dp.mul_(scale)


@cache
def _mask(tokens: int, per_token: int, dtype: torch.dtype) -> Tensor:
    """Return the mask that is added to scores: minus infinity where a key is later, else 0.

    Args:
        tokens: tokens of a block, as queries and as keys.
        per_token: rows of each query token, one for each head of a group.
    Returns: [tokens x per_token, tokens].
    """
    later = torch.full((tokens, tokens), float("-inf"), dtype=dtype).triu_(1)
    return later.repeat_interleave(per_token, dim=0)


def _scale(q: Tensor) -> float:
    return float(q.shape[-1] ** -0.5)
