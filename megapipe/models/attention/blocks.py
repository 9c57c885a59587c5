"""Attention of some tokens of a sequence to others, block of queries by block of queries: nothing of s x s is kept.

Keys may come in parts: outputs are merged by the logarithm of their sum of exponentials, from which backward makes a
block's probabilities again (Dao et al. 2022, section 3.1; Liu et al. 2023, Ring Attention, section 3). torch's kernels
draw dropout masks from a global generator; ours belong to layer, sample, head and place in the whole sequence.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor

from megapipe.distributed.axis import ALONE, Axis
from megapipe.distributed.tokens import Documents, Tokens, numbers_of
from megapipe.tensor_parallel.rng import Stream, draws

_SCORES, _ROWS = 1 << 21, 128
"""Scores and queries of a block: more leave a CPU's cache, or compute more of what the mask removes."""
_SCORES_GPU, _ROWS_GPU = 1 << 25, 512


class _Block(NamedTuple):
    """Some queries, which see some keys.

    Attributes:
        queries, keys: their positions; rows, columns: where they lie in what is here.
        whole, first: the queries of a block of the whole sequence, and the first key that any of them sees: dropout
            draws for those.
    """

    queries: range
    keys: range
    rows: slice
    columns: slice
    whole: range
    first: int


@dataclass(frozen=True)
class Sight:
    """The sight of a query: what it sees, and with which probability a part of that is dropped.

    Attributes:
        length: of the whole sequences.
        window: how many earlier tokens a query sees, beside itself; None for all.
        documents: a query sees its own only.
        p, site, stream: of dropout; site is layer and place in it, and with the stream it names the masks.
        heads: who shares the heads.
    """

    length: int
    stream: Stream
    window: int | None = None
    documents: Documents | None = None
    p: float = 0.0
    site: tuple[object, ...] = ()
    heads: Axis = ALONE

    def first_seen(self, token: int) -> int:
        """The first token that a query at this place sees, in the sequence of the microbatch where that is earliest."""
        first = 0 if self.window is None else max(0, token - self.window)
        return first if self.documents is None else max(first, self.documents.first_seen(token))

    def blocks(self, q: Tensor, queries: Tokens, keys: Tokens) -> Iterator[_Block]:
        """Blocks, with dropout cut where the whole sequence is, under any c and t, as masks belong to them, and with
        all keys, as a mask is drawn at once."""
        scores, size = (_SCORES, _ROWS) if q.device.type == "cpu" else (_SCORES_GPU, _ROWS_GPU)
        width = max(size, scores // (q.shape[0] * q.shape[1] * size))
        # A mask is drawn for whole rows of scores, so that no cut of the sequence changes it.
        if self.p:
            width = self.length
            size = min(size, max(16, scores // (q.shape[0] * q.shape[1] * self.heads.size * width)))
        for begin in range(0, self.length, size):
            whole = range(begin, min(begin + size, self.length))
            first = 0 if self.window is None else max(0, begin - self.window)
            for rows, here in _within(whole, queries):
                low = first if self.documents is None else max(first, self.documents.first_seen(rows.start))
                for left in range(low, rows.stop, width):
                    for seen, there in _within(range(left, min(left + width, rows.stop)), keys):
                        yield _Block(rows, seen, here, there, whole, first)

    def scores(self, rows: Tensor, keys: Tensor, block: _Block) -> Tensor:
        """rows [n, r, d] and keys [n, m, d] of n pairs of a sequence and a group -> [n, r, m], in `_sums` type."""
        scores = rows.new_empty(*rows.shape[:2], keys.shape[1])
        scores = scores.baddbmm_(rows, keys.mT, beta=0, alpha=_scale(rows)).to(_sums(rows))  # scaled, then rounded
        queries, seen = block.queries, block.keys
        if self.window is None and self.documents is None:  # they see all before the first of them
            seen = range(max(seen.start, queries.start), seen.stop)
        if len(seen):
            unseen = self._unseen(queries, seen, rows.device)
            by_query = scores.view(len(unseen) if unseen.ndim > 2 else 1, -1, len(queries), keys.shape[1])
            by_query[..., keys.shape[1] - len(seen) :].masked_fill_(unseen, float("-inf"))
        return scores

    def kept(self, scores: Tensor, sequences: int, block: _Block) -> Tensor:
        """[b, heads, queries, keys]: 1 for those of the scores that are, 0 for those that dropout zeroes."""
        n, rows, _ = scores.shape
        whole, first = block.whole, block.first
        # the heads first: of a slice of that dimension no more is drawn
        shape = (n * rows // (sequences * len(block.queries)), sequences, len(whole), whole.stop - first)
        with self.stream.active():
            draw = draws(shape, *self.site, whole.start, device=scores.device, tp=self.heads, dim=0)
        draw = draw[:, :, _from(block.queries, whole.start), _from(block.keys, first)]
        return draw.ge_(self.p).transpose(0, 1)

    def _unseen(self, queries: range, keys: range, device: torch.device) -> Tensor:
        """[queries, keys], or [b, 1, queries, keys] inside documents."""
        reach = self.length if self.window is None else self.window
        seen = band(len(queries), len(keys), queries.start - keys.start, reach, device)
        if self.documents is not None:
            of = numbers_of(self.documents, device)[:, None]
            seen = seen & (of[..., _from(queries), None] == of[..., None, _from(keys)])
        return ~seen


# Below, n: pairs of a sequence and a query group, g: query heads in a group. The rows of a group's heads, one head
# after another, share one product with the group's keys.


class Sums(NamedTuple):
    """Attention to the keys so far: [n, g, s/c, d] and [n, g, s/c, 1]."""

    out: Tensor
    lse: Tensor

    @staticmethod
    def empty(q: Tensor, groups: int) -> Sums:
        shape = (q.shape[0] * groups, q.shape[1] // groups, q.shape[2])
        out = torch.zeros(*shape, q.shape[3], dtype=_sums(q), device=q.device)
        return Sums(out, out.new_full((*shape, 1), float("-inf")))


def attend(sight: Sight, q: Tensor, queries: Tokens, kv: Tensor, held: Tokens, sums: Sums) -> None:
    """Add what keys and values [2, b, groups, m, d] at `held` are to q [b, heads, n, d] at `queries`."""
    keys, values = map(_pairs, kv)
    for block in sight.blocks(q, queries, held):
        scores = sight.scores(_rows(q, block, len(keys)), keys[:, block.columns], block)
        most = scores.amax(-1, keepdim=True)
        most.masked_fill_(most == float("-inf"), 0)  # of rows that see none of these keys
        p = scores.sub_(most).exp_()
        # Before dropout: what is dropped still counts in the denominator.
        lse = most + p.sum(-1, keepdim=True).log()
        if sight.p:
            _drop(p, sight.kept(p, len(q), block))
        o = (p.to(values.dtype) @ values[:, block.columns]).to(p.dtype)
        out, before = (x[:, :, block.rows] for x in sums)
        most, lse = most.view_as(before), lse.view_as(before)
        after = torch.logaddexp(before, lse)
        # Rows that have seen no key yet: -inf from -inf would be nan.
        base = after.masked_fill(after == float("-inf"), 0)
        o = o.view_as(out).mul_((most - base).exp_().mul_(1 / (1 - sight.p)))
        out.mul_((before - base).exp_()).add_(o)
        before.copy_(after)


def differentiate(
    sight: Sight,
    q: Tensor,
    queries: Tokens,
    kv: Tensor,
    held: Tokens,
    grad: Tensor,
    lse: Tensor,
    delta: Tensor,
    dq: Tensor,
) -> Tensor:
    """The gradient of `kv` from that of the whole output, [b, heads, n, d]; adds to that of q, `dq` [n, g, s/c, d].

    delta: the sum over d of grad x output, which with `lse` [n, g, s/c, 1] stands for all keys that are not at hand.
    """
    keys, values = map(_pairs, kv)
    dk, dv = (torch.zeros_like(x, dtype=dq.dtype) for x in (keys, values))
    for block in sight.blocks(q, queries, held):
        columns = block.columns
        rows, do = (_rows(x, block, len(keys)) for x in (q, grad))
        norm, share = (x[:, :, block.rows].reshape(len(keys), -1, 1) for x in (lse, delta))
        p = sight.scores(rows, keys[:, columns], block).sub_(norm).exp_()
        do = do * (1 / (1 - sight.p))
        dp = (do @ values[:, columns].mT).to(p.dtype)
        kept = sight.kept(p, len(q), block) if sight.p else None
        # Softmax's backward takes the probabilities from before dropout, the values' gradient those from after it.
        ds = _drop(dp, kept).sub_(share).mul_(p).to(rows.dtype)
        p = _drop(p, kept)
        into = dq[:, :, block.rows]
        into.add_((ds @ keys[:, columns]).view_as(into), alpha=_scale(rows))
        dk[:, columns].add_(ds.mT @ rows)  # += would copy the sum onto itself
        dv[:, columns].add_(p.to(do.dtype).mT @ do)
    return torch.stack((dk.mul_(_scale(q)), dv)).view(kv.shape)


@lru_cache(maxsize=8)  # shared by all layers and blocks
def band(queries: int, keys: int, ahead: int, window: int, device: torch.device) -> Tensor:
    """[queries, keys], True where query i, which is key i + ahead, sees key j: 0 <= i + ahead - j <= window."""
    distance = torch.arange(queries, device=device)[:, None] + ahead - torch.arange(keys, device=device)
    return (distance >= 0) & (distance <= window)


def _drop(scores: Tensor, kept: Tensor | None) -> Tensor:
    """Drop scores in place. A product is faster than a mask."""
    if kept is not None:
        scores.view(kept.shape).mul_(kept)
    return scores


def _within(tokens: range, spans: Tokens) -> Iterator[tuple[range, slice]]:
    """Tokens that are in each span, and where they lie."""
    for span, at in zip(spans, accumulate(map(len, spans), initial=0), strict=False):
        part = range(max(tokens.start, span.start), min(tokens.stop, span.stop))
        if len(part):
            yield part, _from(part, span.start - at)


def _from(tokens: range, start: int = 0) -> slice:
    return slice(tokens.start - start, tokens.stop - start)


def _rows(x: Tensor, block: _Block, pairs: int) -> Tensor:
    """The block's part of x [b, heads, s, d] as [pairs, rows, d]."""
    return _wide(x[:, :, block.rows]).reshape(pairs, -1, x.shape[-1])


def _pairs(x: Tensor) -> Tensor:
    """[b, groups, s, d] -> [b groups, s, d], contiguous."""
    return _wide(x).contiguous().flatten(0, 1)


def _wide(x: Tensor) -> Tensor:
    return x.float() if x.dtype == torch.float16 else x  # fp16 ends at 65504, which scores can pass


def _sums(x: Tensor) -> torch.dtype:
    return torch.promote_types(x.dtype, torch.float32)


def _scale(q: Tensor) -> float:
    return float(q.shape[-1] ** -0.5)
