"""Attention of sequences that are cut over context-parallel ranks, in three ways.

1. p2p: keys and values go around a ring, while each rank computes with the part that it has
   (Liu et al. 2023).
2. all_gather: every rank gathers all keys and values at once (Dubey et al. 2024, section 3.3.2).
3. a2a: ranks exchange their tokens of all heads for all tokens of some heads (Jacobs et al. 2023,
   DeepSpeed-Ulysses). Between the two exchanges any attention of uncut sequences runs.

In 1 and 2 only the local keys are saved for backward, which communicates them again. Keys and
values are one tensor [2, b, groups/t, s/c, d].
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from megapipe.distributed.axis import Axis, at_waits
from megapipe.distributed.tokens import Cut, Tokens
from megapipe.errors import ConfigError
from megapipe.models.attention.blocks import MaskSpec, Sums, attend, differentiate

Use = Callable[[Tensor, Tokens], None]
"""(keys and values, their positions) -> None: the forward's step for one part of the keys."""
Differentiate = Callable[[Tensor, Tokens], Tensor]
"""(keys and values, their positions) -> their gradient: the backward of a `Use`."""


@dataclass(eq=False)
class _Part:
    """Keys and values of one slice of a microbatch, kept for later slices.

    Attributes:
        cut: the slice, and which of its tokens are on this rank.
        kept: returns keys and values, reloaded from the host if they were moved there.
        grad: the sum of the gradients from later slices; None before the first gradient.
    """

    cut: Cut
    kept: Callable[[], Tensor]
    grad: Tensor | None = None

    @property
    def kv(self) -> Tensor:
        """The keys and values of the slice, [2, b, groups/t, s/c, d]."""
        return self.kept()

    @property
    def end(self) -> int:
        """The position of the token after the slice's last one, in the whole sequence."""
        return self.cut.piece.stop if self.cut.piece else 0


def _parts(mask: MaskSpec) -> dict[int, _Part]:
    """Return {first token of a slice: its keys and values} for a microbatch's slices at one layer.

    Forward passes add to this dictionary, backward passes remove from it.

    Args:
        mask: the layer's mask, which has the microbatch.
    """
    parts: dict[int, _Part] = mask.stream.prefix.setdefault(mask.site, {})
    return parts


def _before(mask: MaskSpec) -> list[_Part]:
    """Return the keys and values of the earlier slices that this slice attends to, in order.

    The list is empty if microbatches are not cut into slices.

    Args:
        mask: the layer's mask, which has the microbatch and its slice.
    """
    piece = mask.stream.piece
    if piece is None:
        return []
    first = mask.first_seen(piece.start)
    earlier = sorted(begin for begin in _parts(mask) if begin < piece.start)
    parts = [_parts(mask)[begin] for begin in earlier]
    return [part for part in parts if part.end > first]


def _is_seen_later(mask: MaskSpec, piece: range) -> bool:
    """Return whether any later slice attends to tokens of one slice.

    The result is False at the end of the sequence, and where every sequence starts a new document
    after the slice.

    Args:
        mask: the layer's mask.
        piece: the tokens of the slice.
    """
    return piece.stop < mask.length and _sees(mask, piece, piece.stop)


def _sees(mask: MaskSpec, piece: range, begin: int) -> bool:
    """Return whether a later slice attends to tokens of an earlier one.

    Args:
        mask: the layer's mask.
        piece: the tokens of the earlier slice.
        begin: the first token of the later slice.
    """
    return mask.first_seen(begin) < piece.stop


def _without_turns() -> AbstractContextManager[None]:
    """Return a context in which this rank runs no other pass while it waits for messages.

    The number of earlier slices depends on the documents of this data-parallel rank. Ranks with
    other documents wait a different number of times. If the two passes of a pair alternated at
    these waits, ranks that share experts would start collectives in different orders and deadlock.
    """
    return at_waits.do(None, at_waits.watch)


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        mask: MaskSpec,
        way: str,
        has_graph: bool,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        sinks: Tensor | None,
    ) -> Tensor:
        stream = mask.stream
        # One tensor, so that a step of the ring sends one message.
        kv = torch.stack((k, v))
        # Once for each forward: every rank and slice merges its keys into this state.
        sums = Sums.empty(q, k.shape[1], sinks)
        mine = stream.cut.spans(mask.length)

        def use(kv: Tensor, held: Tokens) -> None:
            attend(mask, q, mine, kv, held, sums)

        # A forward that will be recomputed has no graph; it stores the slice only if later slices
        # need it. The recomputation then finds it, with the gradients of the later slices in it.
        piece = stream.piece
        is_new = piece is not None and piece.start not in _parts(mask)
        if piece and is_new and (has_graph or _is_seen_later(mask, piece)):
            kept = stream.keep(kv, partial(_sees, mask, piece))
            _parts(mask)[piece.start] = _Part(stream.cut, kept)
        meet = _ring if "p2p" in way else _all_at_once
        with _without_turns():
            for part in _before(mask):
                meet(mask, part.cut, part.kv, use)
        meet(mask, stream.cut, kv, use)
        # empty_like keeps the strides of q, which is contiguous as [s, b, heads, d]: the next
        # projection reads the output without a copy.
        out = torch.empty_like(q).copy_(sums.out.view(q.shape))
        # A slice's keys are stored once, for itself and for later slices.
        own = (k, v) if stream.piece is None else ()
        ctx.save_for_backward(sinks, q, *own, out, sums.lse)
        ctx.mask = mask
        ctx.way = way
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        sinks, q, *own, out, lse = ctx.saved_tensors
        mask: MaskSpec = ctx.mask
        piece = mask.stream.piece
        mine = mask.stream.cut.spans(mask.length)
        part = None if piece is None else _parts(mask)[piece.start]
        dq = torch.zeros(*lse.shape[:3], q.shape[-1], dtype=lse.dtype, device=q.device)
        # Dao et al. 2022, section 3.1: delta = sum(p dp) of the softmax's backward, over all keys.
        delta = (grad.to(lse.dtype) * out).sum(-1).reshape(lse.shape)

        def use(kv: Tensor, held: Tokens) -> Tensor:
            return differentiate(mask, q, mine, kv, held, grad, lse, delta, dq)

        back = _ring_back if "p2p" in ctx.way else _all_back
        with _without_turns():
            for before in _before(mask):
                of_part = back(mask, before.cut, before.kv, use)
                before.grad = of_part if before.grad is None else before.grad.add_(of_part)
        kv = part.kv if part else torch.stack(own)
        dkv = back(mask, mask.stream.cut, kv, use)
        # Backward passes run from the last slice to the first: later slices have added theirs.
        if part and part.grad is not None:
            dkv = dkv.add_(part.grad)
        if piece is not None:
            del _parts(mask)[piece.start]
        dk, dv = dkv.to(q.dtype)
        dq = torch.empty_like(q).copy_(dq.view(q.shape))
        return None, None, None, dq, dk, dv, _sinks_gradient(sinks, lse, delta)


_attention: Callable[..., Tensor] = _Attention.apply


def _sinks_gradient(sinks: Tensor | None, lse: Tensor, delta: Tensor) -> Tensor | None:
    """Return the gradient of the sinks [heads] from this rank's queries; None without sinks.

    A sink is one more score of each query, whose value vector is 0. With p = exp(sink - lse) the
    gradient is p (0 - delta), summed over the queries.

    Args:
        lse, delta: [n, g, s/c, 1], the logarithm of the softmax denominator, and the sum over d of
            output x its gradient.
    """
    if sinks is None:
        return None
    heads = len(sinks)
    p = (sinks.to(lse.dtype)[:, None] - lse.view(-1, heads, lse.shape[2])).exp_()
    return -(p * delta.view(p.shape)).sum((0, 2)).to(sinks.dtype)


def context_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: MaskSpec,
    way: str = "p2p",
    sinks: Tensor | None = None,
) -> Tensor:
    """Return softmax(q k^T / sqrt(d)) v over all keys that the mask allows, on any rank.

    Args:
        q: [b, heads/t, s/c, d], this rank's tokens as the mask's stream says.
        k, v: [b, groups/t, s/c, d]; heads/groups successive heads share a group.
        way: "p2p" or "all_gather"; "a2a+p2p" acts as "p2p". No effect where c is 1.
        sinks: [heads/t], the logarithm of an additional term of each head's softmax denominator;
            None for the plain softmax.
    Returns: [b, heads/t, s/c, d]. Scores have q's type (float32 for fp16); softmax and sums are
        float32. Memory: a few float32 tensors of one block's scores, the output in float32, and
        the keys of two ranks (p2p) or of all ranks.
    """
    if mask.stream.cp.size == 1:
        way = "p2p"
    return _attention(mask, way, torch.is_grad_enabled(), q, k, v, sinks)


def _ring(mask: MaskSpec, cut: Cut, kv: Tensor, use: Use) -> None:
    """Call `use` with the keys and values of each rank: first this rank's, then its predecessors'.

    Sends c - 1 messages around the ring, each while `use` computes with keys that have arrived.

    Args:
        mask: the layer's mask, which has the ranks.
        cut: which tokens kv has.
        kv: this rank's keys and values, [2, b, groups/t, s/c, d].
        use: called with the keys and values of one rank and their positions.
    """
    cp = mask.stream.cp
    for step in range(cp.size):
        coming = cp.start_shift(kv) if step < cp.size - 1 else None
        use(kv, cut.spans(mask.length, (cp.rank - step) % cp.size))
        if coming is not None:
            kv = coming.wait()


def _ring_back(mask: MaskSpec, cut: Cut, kv: Tensor, use: Differentiate) -> Tensor:
    """Return the gradient of this rank's keys and values, summed over all ranks.

    Sends 2 (c - 1) messages: gradients follow their keys around the ring one step later, and the
    last message brings them back to the rank that owns the keys.

    Args:
        mask: the layer's mask, which has the ranks.
        cut: which tokens kv has.
        kv: this rank's keys and values, [2, b, groups/t, s/c, d].
        use: (keys and values, positions) -> their gradient from this rank's queries.
    Returns: the shape of kv, [2, b, groups/t, s/c, d].
    """
    cp = mask.stream.cp
    own = torch.empty(())
    sums = None
    for step in range(cp.size):
        coming = cp.start_shift(kv) if step < cp.size - 1 else None
        grads = use(kv, cut.spans(mask.length, (cp.rank - step) % cp.size))
        if step == 0:
            own = grads
        else:
            # Sums travel in 16 bits, half the bytes, and are added in float32.
            if sums is not None:
                grads = grads.add_(sums.wait())
            # A channel of its own: the keys of the next step are under way at the same time.
            sums = cp.start_shift(grads.to(kv.dtype), channel=1)
        if coming is not None:
            kv = coming.wait()
    if sums is None:
        return own
    return own.add_(sums.wait())


def _all_at_once(mask: MaskSpec, cut: Cut, kv: Tensor, use: Use) -> None:
    """Call `use` once with the keys and values of all ranks, after one all-gather.

    Args:
        mask: the layer's mask, which has the ranks.
        cut: which tokens kv has.
        kv: this rank's keys and values, [2, b, groups/t, s/c, d].
        use: called with the keys and values, and their positions.
    """
    cp = mask.stream.cp
    parts = cp.all_gather(kv).chunk(cp.size)
    whole = cut.join(parts, 3) if cp.size > 1 else kv
    use(whole, replace(cut, rank=0, size=1).spans(mask.length))


def _all_back(mask: MaskSpec, cut: Cut, kv: Tensor, use: Differentiate) -> Tensor:
    """Return the gradient of this rank's keys and values, summed over all ranks.

    Makes one all-gather and one reduce-scatter.

    Args:
        mask: the layer's mask, which has the ranks.
        cut: which tokens kv has.
        kv: this rank's keys and values, [2, b, groups/t, s/c, d].
        use: (keys and values of all ranks, positions) -> their gradient from this rank's queries.
    Returns: the shape of kv.
    """
    cp = mask.stream.cp
    whole: list[Tensor] = []
    _all_at_once(mask, cut, kv, lambda kv, held: whole.append(use(kv, held)))
    # The gathered tensor starts at the slice, so it is cut as a sequence and not as a slice.
    mine = Cut(cut.rank, cut.size)
    # A reduce-scatter gives rank r the r-th run of rows. A rank's tokens are two separate runs, and
    # so are put together first.
    by_rank = [mine.take(whole[0], 3, rank) for rank in range(cp.size)]
    return cp.reduce_scatter(torch.cat(by_rank).to(kv.dtype))


class _Exchange(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, cp: Axis, to_heads: bool) -> Tensor:
        ctx.cp = cp
        ctx.to_heads = to_heads
        return _exchange(x, cp, to_heads)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return _exchange(grad, ctx.cp, not ctx.to_heads), None, None


exchange: Callable[[Tensor, Axis, bool], Tensor] = _Exchange.apply
"""`_exchange`, with its gradient, which is the inverse exchange."""


def _exchange(x: Tensor, cp: Axis, to_heads: bool) -> Tensor:
    """Return x after an exchange of tokens for heads over the context-parallel ranks.

    Args:
        x: [s/c, b, heads, d], or [s, b, heads/c, d].
        cp: the ranks.
        to_heads: the direction: [s/c, b, heads, d] -> [s, b, heads/c, d] if True, else the inverse.
    """
    cut = Cut(cp.rank, cp.size)
    if to_heads:
        return cut.join(cp.all_to_all(torch.stack(x.chunk(cp.size, 2))).unbind(), 0)
    by_rank = torch.stack([cut.take(x, 0, r) for r in range(cp.size)])
    return torch.cat(cp.all_to_all(by_rank).unbind(), 2)


def whole_sequences(
    core: Callable[[Tensor, Tensor, Tensor], Tensor], cp: Axis
) -> Callable[..., Tensor]:
    """Turn an attention of uncut sequences into one of sequences cut over cp (a2a).

    Args:
        core: (q, k, v) -> [s, b, heads x d], with q [s, b, heads, d], k and v [s, b, groups, d];
            called with 1/c of the heads.
    Returns: a function (q, k, v) -> [s/c, b, heads x d], with q [s/c, b, heads, d], k and v [s/c,
        b, groups, d]. The function makes two exchanges: of q, k and v, and of the output.
    Raises: (the function) ConfigError if heads or groups are not divisible by the number of ranks.
    """

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if q.shape[2] % cp.size or k.shape[2] % cp.size:
            raise ConfigError(
                f"--cp-comm-type a2a deals heads to ranks, and {q.shape[2]} query and "
                f"{k.shape[2]} key heads here are not both divisible by {cp.size} context-parallel "
                "ranks. Use --cp-comm-type p2p."
            )
        # One exchange of all three: q, k and v of the first rank's heads, of the second's, ...
        by_rank = zip(*(x.chunk(cp.size, 2) for x in (q, k, v)), strict=True)
        mixed = torch.cat([part for parts in by_rank for part in parts], 2)
        sizes = [x.shape[2] // cp.size for x in (q, k, v)]
        out = core(*torch.split(exchange(mixed, cp, True), sizes, 2))
        return exchange(out, cp, False)

    return attend
