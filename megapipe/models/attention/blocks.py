"""Attention computed block by block, so that no tensor of s x s scores is ever kept.

Keys and values may arrive in parts. Outputs for the parts are merged by the logarithms of their
softmax denominators; from these, backward computes each block's probabilities again (Dao et al.
2022, section 3.1; Liu et al. 2023, Ring Attention, section 3). torch's own kernels cannot be used
with dropout: they draw masks from a global generator. Here a mask belongs to the layer, sample,
head and position, and is the same under every parallel layout.
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
from megapipe.tensor_parallel.rng import MicrobatchContext, draws

# Scores and queries of a block on a CPU. More would leave the cache, or compute more scores that
# the causal mask then removes.
_SCORES = 1 << 21
_ROWS = 128
_SCORES_GPU = 1 << 25
_ROWS_GPU = 512


class _Block(NamedTuple):
    """A block of the scores: some queries, and some keys that they attend to.

    Attributes:
        queries, keys: the positions of the queries and keys in the whole sequence.
        rows: the slice of the queries in this rank's tensor of queries. columns: the slice of the
            keys in its tensor of keys.
        whole: positions of the queries that share one dropout mask, the same on all ranks.
            `queries` is the part of `whole` that is on this rank.
        first: the first key that any query of `whole` attends to; the dropout mask begins there.
    """

    queries: range
    keys: range
    rows: slice
    columns: slice
    whole: range
    first: int


@dataclass(frozen=True)
class MaskSpec:
    """Which keys each query attends to, and how dropout changes the probabilities.

    Attention is causal: a query never attends to later tokens. The methods cut the scores of this
    rank into blocks and compute one block's scores and dropout mask.

    Attributes:
        length: tokens of the whole sequences.
        stream: the running microbatch, with the seed of random numbers and the tokens on this rank.
        window: how many earlier tokens a query attends to, in addition to its own; None for all.
        documents: if given, a query attends only to its own document.
        p: probability of dropout.
        site: names the layer and this dropout in it. Stream and site seed the dropout masks.
        heads: the ranks that split the heads.
        cap: c if scores are capped to c tanh(score / c); None if they are not.
    """

    length: int
    stream: MicrobatchContext
    window: int | None = None
    documents: Documents | None = None
    p: float = 0.0
    site: tuple[object, ...] = ()
    heads: Axis = ALONE
    cap: float | None = None

    def first_seen(self, token: int) -> int:
        """Return the first token that the query at position `token` attends to.

        If the sequences have different documents there, the result is the earliest first token.
        """
        first = 0
        if self.window is not None:
            first = max(0, token - self.window)
        if self.documents is not None:
            first = max(first, self.documents.first_seen(token))
        return first

    def blocks(self, q: Tensor, queries: Tokens, keys: Tokens) -> Iterator[_Block]:
        """Yield the blocks of this rank's queries and the given keys that are not fully masked.

        With dropout, blocks are cut from the whole sequence and span all of its keys. A mask then
        is the same however context and tensor parallelism cut the sequence and the heads.

        Args:
            q: [b, heads, s/c, d], used for its sizes and device.
            queries: positions of the rows of q.
            keys: positions of the given keys, which may come from another rank.
        """
        on_cpu = q.device.type == "cpu"
        scores = _SCORES if on_cpu else _SCORES_GPU
        size = _ROWS if on_cpu else _ROWS_GPU
        width = max(size, scores // (q.shape[0] * q.shape[1] * size))
        if self.p:
            # A mask is drawn at once for all keys of a row; fewer rows keep the block small.
            width = self.length
            rows_drawn = scores // (q.shape[0] * q.shape[1] * self.heads.size * width)
            size = min(size, max(16, rows_drawn))
        # Cut from the whole sequence on every rank: a dropout block then has the same number, and
        # the same random stream, wherever its queries are.
        for begin in range(0, self.length, size):
            whole = range(begin, min(begin + size, self.length))
            first = 0 if self.window is None else max(0, begin - self.window)
            for rows, row_slice in _within(whole, queries):
                low = first
                if self.documents is not None:
                    low = max(first, self.documents.first_seen(rows.start))
                # Ends at the block's last query: no later key is ever multiplied.
                for left in range(low, rows.stop, width):
                    columns = range(left, min(left + width, rows.stop))
                    for seen, column_slice in _within(columns, keys):
                        yield _Block(rows, seen, row_slice, column_slice, whole, first)

    def scores(self, rows: Tensor, keys: Tensor, block: _Block) -> Tensor:
        """Return the scores q k^T / sqrt(d) of a block, capped, minus infinity where masked.

        Args:
            rows: [n, r, d], queries for n pairs of a sequence and a query group. A pair has r rows:
                the block's queries of the group's first head, then of its second, and so on.
            keys: [n, m, d], the block's keys.
        Returns: [n, r, m], at least float32.
        """
        scores = rows.new_empty(*rows.shape[:2], keys.shape[1])
        # The product is scaled before it is rounded: unscaled scores could overflow.
        scores = scores.baddbmm_(rows, keys.mT, beta=0, alpha=_scale(rows)).to(_sums(rows))
        if self.cap is not None:
            scores.div_(self.cap).tanh_().mul_(self.cap)
        queries = block.queries
        masked = block.keys
        if self.window is None and self.documents is None:
            # Every query attends to all keys before the first query: only the others need a mask.
            masked = range(max(masked.start, queries.start), masked.stop)
        if len(masked):
            unseen = self._unseen(queries, masked, rows.device)
            sequences = len(unseen) if unseen.ndim > 2 else 1
            by_query = scores.view(sequences, -1, len(queries), keys.shape[1])
            by_query[..., keys.shape[1] - len(masked) :].masked_fill_(unseen, float("-inf"))
        return scores

    def slope(self, scores: Tensor) -> Tensor | None:
        """Return the derivative of the cap at these capped scores; None for plain ones.

        With s = c tanh(x / c), the derivative is ds/dx = 1 - (s / c)^2, and 0 where masked.
        """
        if self.cap is None:
            return None
        # A masked score is minus infinity, and its probability of 0 times that would be nan.
        return 1 - (scores.clamp(min=-self.cap) / self.cap).square_()

    def kept(self, scores: Tensor, sequences: int, block: _Block) -> Tensor:
        """Return the block's dropout mask: 1 for a probability that is kept, 0 for a dropped one.

        Args:
            scores: [n, r, m], used for its sizes and device.
            sequences: b, the number of sequences.
        Returns: [b, heads, queries, keys].
        """
        n, rows, _ = scores.shape
        whole = block.whole
        first = block.first
        # Heads come first: draws generates only this rank's slice of the first dimension.
        heads = n * rows // (sequences * len(block.queries))
        shape = (heads, sequences, len(whole), whole.stop - first)
        # In backward another microbatch's stream may be current.
        with self.stream.active():
            draw = draws(shape, *self.site, whole.start, device=scores.device, tp=self.heads, dim=0)
        draw = draw[:, :, _from(block.queries, whole.start), _from(block.keys, first)]
        return draw.ge_(self.p).transpose(0, 1)

    def _unseen(self, queries: range, keys: range, device: torch.device) -> Tensor:
        """Return a mask that is True where a query may not attend to a key.

        Args:
            queries, keys: positions in the whole sequence.
        Returns: [queries, keys], or [b, 1, queries, keys] with documents.
        """
        reach = self.length if self.window is None else self.window
        seen = band(len(queries), len(keys), queries.start - keys.start, reach, device)
        if self.documents is not None:
            number = numbers_of(self.documents, device)[:, None]
            same = number[..., _from(queries), None] == number[..., None, _from(keys)]
            seen = seen & same
        return ~seen


# Shapes below. n: pairs of a sequence and a query group. g: query heads in a group. The rows of a
# group's heads, one head after another, are multiplied with the group's keys in one product.


class Sums(NamedTuple):
    """The attention output over the keys processed so far, which `attend` updates.

    Attributes:
        out: [n, g, s/c, d], the output normalised over these keys, for n pairs of a sequence and a
            query group with g heads each.
        lse: [n, g, s/c, 1], the logarithm of the softmax denominator. Before the first key it is
            -inf, or the head's sink.
    """

    out: Tensor
    lse: Tensor

    @staticmethod
    def empty(q: Tensor, groups: int, sinks: Tensor | None = None) -> Sums:
        """Return the state before any key, for queries q [b, heads, s, d].

        Args:
            groups: the number of query groups; each has heads / groups heads.
            sinks: [heads], the logarithm of a term that each head's softmax denominator has in
                addition to its keys; None for no such term.
        """
        shape = (q.shape[0] * groups, q.shape[1] // groups, q.shape[2])
        out = torch.zeros(*shape, q.shape[3], dtype=_sums(q), device=q.device)
        lse = out.new_full((*shape, 1), float("-inf"))
        if sinks is not None:
            # A key with the value 0 that all queries attend to: only the denominator knows it.
            lse.view(q.shape[0], q.shape[1], -1).copy_(sinks[:, None])
        return Sums(out, lse)


def attend(
    mask: MaskSpec, q: Tensor, queries: Tokens, kv: Tensor, held: Tokens, sums: Sums
) -> None:
    """Add the attention to some keys and values to the sums, in place.

    Args:
        mask: which keys each query attends to.
        q: [b, heads, s/c, d], at the positions `queries`.
        kv: keys and values [2, b, groups, m, d], at the positions `held`.
        sums: the output over the keys so far, which is updated.
    """
    keys, values = map(_pairs, kv)
    for block in mask.blocks(q, queries, held):
        scores = mask.scores(_rows(q, block, len(keys)), keys[:, block.columns], block)
        most = scores.amax(-1, keepdim=True)
        # Rows that may attend to none of these keys: -inf - -inf would be nan.
        most.masked_fill_(most == float("-inf"), 0)
        p = scores.sub_(most).exp_()
        # Before dropout: a dropped probability still counts in the denominator.
        lse = most + p.sum(-1, keepdim=True).log()
        if mask.p:
            _drop(p, mask.kept(p, len(q), block))
        o = (p.to(values.dtype) @ values[:, block.columns]).to(p.dtype)
        out, before = (x[:, :, block.rows] for x in sums)
        most = most.view_as(before)
        after = torch.logaddexp(before, lse.view_as(before))
        # Rows that have seen no key yet have -inf here, too.
        base = after.masked_fill(after == float("-inf"), 0)
        # out = out e^(before - after) + o e^(most - after): both parts under one denominator.
        o = o.view_as(out).mul_((most - base).exp_().mul_(1 / (1 - mask.p)))
        out.mul_((before - base).exp_()).add_(o)
        before.copy_(after)


def differentiate(
    mask: MaskSpec,
    q: Tensor,
    queries: Tokens,
    kv: Tensor,
    held: Tokens,
    grad: Tensor,
    lse: Tensor,
    delta: Tensor,
    dq: Tensor,
) -> Tensor:
    """Return the gradient of some keys and values, and add these keys' part of the gradient of q.

    Args:
        mask: which keys each query attends to.
        q: [b, heads, s/c, d], at the positions `queries`.
        kv: keys and values [2, b, groups, m, d], at the positions `held`.
        grad: gradient of the whole output, [b, heads, s/c, d].
        lse: [n, g, s/c, 1], `Sums.lse` after all keys; n counts pairs of a sequence and a group.
        delta: [n, g, s/c, 1], the sum over d of grad x output. With lse it makes the gradient of
            one part of the keys independent of the other parts.
        dq: [n, g, s/c, d], the gradient of q, updated in place.
    Returns: [2, b, groups, m, d].
    """
    keys, values = map(_pairs, kv)
    dk = torch.zeros_like(keys, dtype=dq.dtype)
    dv = torch.zeros_like(values, dtype=dq.dtype)
    for block in mask.blocks(q, queries, held):
        columns = block.columns
        rows = _rows(q, block, len(keys))
        do = _rows(grad, block, len(keys))
        norm = lse[:, :, block.rows].reshape(len(keys), -1, 1)
        share = delta[:, :, block.rows].reshape(len(keys), -1, 1)
        # With the denominator over all keys these are the final probabilities at once.
        scores = mask.scores(rows, keys[:, columns], block)
        slope = mask.slope(scores)
        p = scores.sub_(norm).exp_()
        # Dropout's factor, here once for the gradients of both values and probabilities.
        do = do * (1 / (1 - mask.p))
        dp = (do @ values[:, columns].mT).to(p.dtype)
        kept = mask.kept(p, len(q), block) if mask.p else None
        # The softmax's backward needs the probabilities before dropout. The values' gradient needs
        # them after dropout.
        ds = _drop(dp, kept).sub_(share).mul_(p)
        if slope is not None:
            ds.mul_(slope)
        ds = ds.to(rows.dtype)
        p = _drop(p, kept)
        into = dq[:, :, block.rows]
        into.add_((ds @ keys[:, columns]).view_as(into), alpha=_scale(rows))
        dk[:, columns].add_(ds.mT @ rows)  # += would copy the sum onto itself
        dv[:, columns].add_(p.to(do.dtype).mT @ do)
    # The scale of the scores, once at the end instead of in each block.
    return torch.stack((dk.mul_(_scale(q)), dv)).view(kv.shape)


@lru_cache(maxsize=8)  # shared by all layers and blocks
def band(queries: int, keys: int, ahead: int, window: int, device: torch.device) -> Tensor:
    """Return the mask of causal attention within a window. It is cached: do not change it.

    Args:
        queries, keys: numbers of queries and keys.
        ahead: query i has the position of key i + ahead.
        window: how many earlier keys a query attends to, in addition to its own.
    Returns: [queries, keys], True where query i attends to key j: 0 <= i + ahead - j <= window.
    """
    rows = torch.arange(queries, device=device)[:, None]
    distance = rows + ahead - torch.arange(keys, device=device)
    return (distance >= 0) & (distance <= window)


def _drop(scores: Tensor, kept: Tensor | None) -> Tensor:
    """Zero the elements of `scores` where the dropout mask is 0, in place, and return them.

    Args:
        kept: the mask of `MaskSpec.kept`; None drops nothing.
    """
    if kept is not None:
        # A product is faster than masked_fill.
        scores.view(kept.shape).mul_(kept)
    return scores


def _within(tokens: range, spans: Tokens) -> Iterator[tuple[range, slice]]:
    """Yield the overlap of `tokens` with each span, and its rows in a tensor of these spans.

    Args:
        tokens: positions in the whole sequence.
        spans: positions of the tensor's rows, one span after another.
    Yields: (positions in the overlap, slice of the tensor's rows). Other spans are skipped.
    """
    for span, at in zip(spans, accumulate(map(len, spans), initial=0), strict=False):
        part = range(max(tokens.start, span.start), min(tokens.stop, span.stop))
        if len(part):
            yield part, _from(part, span.start - at)


def _from(tokens: range, start: int = 0) -> slice:
    return slice(tokens.start - start, tokens.stop - start)


def _rows(x: Tensor, block: _Block, pairs: int) -> Tensor:
    """Return the block's queries of x [b, heads, s, d] as [pairs, rows, d]; fp16 becomes float32.

    Args:
        pairs: number of pairs of a sequence and a query group. rows is the group's heads x queries.
    """
    return _wide(x[:, :, block.rows]).reshape(pairs, -1, x.shape[-1])


def _pairs(x: Tensor) -> Tensor:
    """Return x [b, groups, s, d] as [b x groups, s, d], contiguous; fp16 becomes float32."""
    return _wide(x).contiguous().flatten(0, 1)


def _wide(x: Tensor) -> Tensor:
    # The largest fp16 number is 65504, and scores can exceed it.
    if x.dtype == torch.float16:
        return x.float()
    return x


def _sums(x: Tensor) -> torch.dtype:
    return torch.promote_types(x.dtype, torch.float32)


def _scale(q: Tensor) -> float:
    return float(q.shape[-1] ** -0.5)
