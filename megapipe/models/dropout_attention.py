"""Attention with dropout, block of queries by block of queries, so that nothing of s x s is kept.

torch's kernels draw their masks from a global generator; ours belong to layer, sample and block. Kept for backward are
q, k and v, which the model holds anyway: a block's probabilities and its mask are computed again (Dao et al. 2022,
section 3.1).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megapipe.distributed.axis import Axis
from megapipe.distributed.tokens import Documents
from megapipe.tensor_parallel.rng import Stream, current_stream, dropped

_SCORES, _ROWS = 1 << 21, 128
"""Scores and queries of a block: more leave a CPU's cache, or compute more of what the mask removes."""
_SCORES_GPU, _ROWS_GPU = 1 << 25, 512


class _Span(NamedTuple):
    """A block: queries begin .. end - 1, which see no key before `first`."""

    first: int
    begin: int
    end: int


class _Block(NamedTuple):
    """What the blocks of a call share.

    Rows are those of a group's heads, one head after another: they share one product with the group's keys.
    """

    p: float
    site: tuple[object, ...]
    tp: Axis
    window: int | None
    stream: Stream
    document_of: Tensor | None

    def probabilities(self, rows: Tensor, keys: Tensor, span: _Span) -> Tensor:
        """rows [n, r, d] and keys [n, m, d] of n pairs of a sequence and a group -> [n, r, m]."""
        scores = rows.new_empty(*rows.shape[:2], keys.shape[1])
        scores.baddbmm_(rows, keys.mT, beta=0, alpha=_scale(rows))  # scaled before it is rounded
        unseen, at = self._unseen(span, rows.device)
        by_query = scores.view(1 if unseen.ndim == 2 else len(unseen), -1, span.end - span.begin, keys.shape[1])
        by_query[..., at:].masked_fill_(unseen, float("-inf"))
        return scores.softmax(-1)

    def dropped(self, probabilities: Tensor, sequences: int, span: _Span) -> Tensor:
        """Which of them are."""
        n, r, keys = probabilities.shape
        queries = span.end - span.begin
        # the heads first: of a slice of that dimension no more is drawn
        shape = (n * r // (sequences * queries), sequences, queries, keys)
        with self.stream.active():
            mask = dropped(shape, self.p, *self.site, span.begin, device=probabilities.device, tp=self.tp, dim=0)
        return mask.transpose(0, 1).reshape(n, r, keys)

    def _unseen(self, span: _Span, device: torch.device) -> tuple[Tensor, int]:
        """[queries, keys], or [b, 1, queries, keys] inside documents, and the first of those keys; queries see all
        before that."""
        first, begin, end = span
        if self.window is None and self.document_of is None:
            return ~band(end - begin, end - begin, 0, end, device), begin
        seen = band(end - begin, end - first, begin - first, end if self.window is None else self.window, device)
        if (of := self.document_of) is not None:
            seen = seen & (of[:, None, begin:end, None] == of[:, None, None, first:end])
        return ~seen, 0


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, block: _Block, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        ctx.save_for_backward(q, k, v)
        ctx.block = block
        out, (keys, values) = torch.empty_like(q), map(_pairs, (k, v))
        for span in _spans(q, block):
            seen = slice(span.first, span.end)
            p = block.probabilities(_rows(q, span, len(keys)), keys[:, seen], span)
            p.masked_fill_(block.dropped(p, len(q), span), 0)
            o = (p @ values[:, seen]).mul_(1 / (1 - block.p))
            _queries(out, span).copy_(o.view_as(_queries(out, span)))
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (q, k, v), block = ctx.saved_tensors, ctx.block
        dq, (keys, values) = torch.empty_like(q), map(_pairs, (k, v))
        dk, dv = (torch.zeros_like(x, dtype=torch.promote_types(x.dtype, torch.float32)) for x in (keys, values))
        for span in _spans(q, block):
            seen = slice(span.first, span.end)
            rows, do = (_rows(x, span, len(keys)) for x in (q, grad))
            do = do * (1 / (1 - block.p))
            p = block.probabilities(rows, keys[:, seen], span)
            dropped = block.dropped(p, len(q), span)
            dp = (do @ values[:, seen].mT).masked_fill_(dropped, 0)
            ds = torch.ops.aten._softmax_backward_data(dp, p, -1, dp.dtype)
            _queries(dq, span).copy_((ds @ keys[:, seen]).mul_(_scale(q)).view_as(_queries(dq, span)))
            dk[:, seen].add_(ds.mT @ rows)  # += would copy the sum onto itself
            dv[:, seen].add_(p.masked_fill_(dropped, 0).mT @ do)
        return None, dq, dk.mul_(_scale(q)).to(k.dtype).view_as(k), dv.to(v.dtype).view_as(v)


_attention: Callable[..., Tensor] = _Attention.apply


def attention_with_dropout(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    p: float,
    *site: object,
    tp: Axis,
    window: int | None = None,
    documents: Documents | None = None,
) -> Tensor:
    """Causal softmax(q k^T / sqrt(d)) with each probability dropped with p, times v.

    Args:
        q: [b, heads/t, s, d].
        k, v: [b, groups/t, s, d], each group for heads/groups successive heads.
        site: layer and place in it; with the running stream it names the masks, whatever t is.
        window: how many earlier tokens a query sees, beside itself; None for all.
        documents: a query sees its own only.
    Returns: [b, heads/t, s, d]. Scores have q's type (float32 for fp16), softmax and the sums over blocks are float32.
        Memory: some tensors of one block's scores, in forward and in backward.
    """
    of = None
    if documents is not None:
        rows = [torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths)) for lengths in documents.lengths]
        of = torch.stack(rows).to(q.device, non_blocking=True)
    return _attention(_Block(p, site, tp, window, current_stream(), of), q, k, v)


@lru_cache(maxsize=8)  # shared by all layers and blocks
def band(queries: int, keys: int, ahead: int, window: int, device: torch.device) -> Tensor:
    """[queries, keys], True where query i, which is key i + ahead, sees key j: 0 <= i + ahead - j <= window."""
    distance = torch.arange(queries, device=device)[:, None] + ahead - torch.arange(keys, device=device)
    return (distance >= 0) & (distance <= window)


def _spans(q: Tensor, block: _Block) -> Iterator[_Span]:
    """The same under every t, as the masks belong to the blocks."""
    scores, most = (_SCORES, _ROWS) if q.device.type == "cpu" else (_SCORES_GPU, _ROWS_GPU)
    b, heads, s, _ = q.shape
    rows = min(most, max(16, scores // (b * heads * block.tp.size * s)))
    for begin in range(0, s, rows):
        yield _Span(0 if block.window is None else max(0, begin - block.window), begin, min(begin + rows, s))


def _queries(x: Tensor, span: _Span) -> Tensor:
    return x[:, :, span.begin : span.end]


def _rows(x: Tensor, span: _Span, pairs: int) -> Tensor:
    """The block's part of x [b, heads, s, d] as [pairs, rows, d]."""
    return _wide(_queries(x, span)).reshape(pairs, -1, x.shape[-1])


def _pairs(x: Tensor) -> Tensor:
    """[b, groups, s, d] -> [b groups, s, d], contiguous."""
    return _wide(x).contiguous().flatten(0, 1)


def _wide(x: Tensor) -> Tensor:
    return x.float() if x.dtype == torch.float16 else x  # fp16 ends at 65504, which scores can pass


def _scale(q: Tensor) -> float:
    return float(q.shape[-1] ** -0.5)
