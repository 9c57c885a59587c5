"""Attention of sequences that are cut over context-parallel ranks: three ways in which queries and keys meet.

Either keys and values [2, b, groups/t, s/c, d] come to the queries, by kv head: around a ring while the block at hand
is computed (p2p; Liu et al. 2023), or all at once (all_gather; Dubey et al. 2024, section 3.3.2). Or ranks trade their
tokens of all heads for all tokens of some (a2a; Jacobs et al. 2023, DeepSpeed-Ulysses), between which any attention of
whole sequences stands. Kept for backward is what is here; keys travel once more.
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
from megapipe.models.attention.blocks import Sight, Sums, attend, differentiate

Use = Callable[[Tensor, Tokens], None]
"""A use of the keys and values of these tokens."""
Differentiate = Callable[[Tensor, Tokens], Tensor]
"""The backward of a use; returns their gradient."""


@dataclass(eq=False)
class _Part:
    """Keys and values of one slice of a microbatch, and what later slices have added to their gradient."""

    cut: Cut
    kept: Callable[[], Tensor]
    grad: Tensor | None = None

    @property
    def kv(self) -> Tensor:
        return self.kept()

    @property
    def end(self) -> int:
        return self.cut.piece.stop if self.cut.piece else 0


def _parts(sight: Sight) -> dict[int, _Part]:
    """Slices of the microbatch at this layer, by where they begin: forwards add, backwards take away."""
    parts: dict[int, _Part] = sight.stream.prefix.setdefault(sight.site, {})
    return parts


def _before(sight: Sight) -> list[_Part]:
    """The slices before this one that it sees, in order; none where microbatches are whole."""
    piece = sight.stream.piece
    if piece is None:
        return []
    first = sight.first_seen(piece.start)
    return [part for begin, part in sorted(_parts(sight).items()) if begin < piece.start and part.end > first]


def _is_seen_later(sight: Sight, piece: range) -> bool:
    """Does a slice behind this one see any of it? None does where the sequence ends, or a document in each."""
    return piece.stop < sight.length and _sees(sight, piece, piece.stop)


def _sees(sight: Sight, piece: range, begin: int) -> bool:
    """Does a slice that begins there, behind this one, see any of it?"""
    return sight.first_seen(begin) < piece.stop


def _for_itself() -> AbstractContextManager[None]:
    """Let no other pass go on at the waits for slices: how many a slice sees follows this rank's documents, and experts
    are shared with ranks that have others."""
    return at_waits.do(None, at_waits.watch)


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, sight: Sight, way: str, has_graph: bool, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        stream, kv = sight.stream, torch.stack((k, v))
        sums, mine = Sums.empty(q, k.shape[1]), stream.cut.spans(sight.length)

        def use(kv: Tensor, held: Tokens) -> None:
            attend(sight, q, mine, kv, held, sums)

        # A forward without graph, which is computed again, keeps what others need alone; then it is there already, with
        # the gradients of the slices behind it.
        piece = stream.piece
        if piece and piece.start not in _parts(sight) and (has_graph or _is_seen_later(sight, piece)):
            _parts(sight)[piece.start] = _Part(stream.cut, stream.keep(kv, partial(_sees, sight, piece)))
        meet = _ring if "p2p" in way else _all_at_once
        with _for_itself():
            for part in _before(sight):
                meet(sight, part.cut, part.kv, use)
        meet(sight, stream.cut, kv, use)
        out = torch.empty_like(q).copy_(sums.out.view(q.shape))
        # The keys of a slice are kept once, for itself and for those behind it.
        ctx.save_for_backward(q, *((k, v) if stream.piece is None else ()), out, sums.lse)
        ctx.sight, ctx.way = sight, way
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        q, *own, out, lse = ctx.saved_tensors
        sight, piece = ctx.sight, ctx.sight.stream.piece
        mine = sight.stream.cut.spans(sight.length)
        part = None if piece is None else _parts(sight)[piece.start]
        dq = torch.zeros(*lse.shape[:3], q.shape[-1], dtype=lse.dtype, device=q.device)
        delta = (grad.to(lse.dtype) * out).sum(-1).reshape(lse.shape)

        def use(kv: Tensor, held: Tokens) -> Tensor:
            return differentiate(sight, q, mine, kv, held, grad, lse, delta, dq)

        back = _ring_back if "p2p" in ctx.way else _all_back
        with _for_itself():
            for before in _before(sight):
                of_part = back(sight, before.cut, before.kv, use)
                before.grad = of_part if before.grad is None else before.grad.add_(of_part)
        dkv = back(sight, sight.stream.cut, part.kv if part else torch.stack(own), use)
        if part and part.grad is not None:
            dkv = dkv.add_(part.grad)
        if piece is not None:
            del _parts(sight)[piece.start]
        dk, dv = dkv.to(q.dtype)
        return None, None, None, torch.empty_like(q).copy_(dq.view(q.shape)), dk, dv


_attention: Callable[..., Tensor] = _Attention.apply


def context_attention(q: Tensor, k: Tensor, v: Tensor, sight: Sight, way: str = "p2p") -> Tensor:
    """softmax(q k^T / sqrt(d)) v with each query seeing what the sight says, wherever in the sequence it lies.

    Args:
        q: [b, heads/t, s/c, d], the tokens that the sight's stream has here.
        k, v: [b, groups/t, s/c, d], each group for heads/groups successive heads.
        way: p2p (a2a+p2p is the same here) or all_gather; without effect where c is 1.
    Returns: [b, heads/t, s/c, d]. Scores have q's type (float32 for fp16), softmax and sums over blocks are float32.
        Memory: some tensors of one block's scores, output and logarithms in float32, and the keys of two ranks (p2p)
        or of all.
    """
    way = way if sight.stream.cp.size > 1 else "p2p"
    return _attention(sight, way, torch.is_grad_enabled(), q, k, v)


def _ring(sight: Sight, cut: Cut, kv: Tensor, use: Use) -> None:
    """c - 1 messages. Ranks before this one come first."""
    cp = sight.stream.cp
    for step in range(cp.size):
        coming = cp.start_shift(kv) if step < cp.size - 1 else None
        use(kv, cut.spans(sight.length, (cp.rank - step) % cp.size))
        kv = kv if coming is None else coming.wait()


def _ring_back(sight: Sight, cut: Cut, kv: Tensor, use: Differentiate) -> Tensor:
    """2 (c - 1) messages: gradients follow their keys one step later, and come home with the last."""
    cp = sight.stream.cp
    own, sums = torch.empty(()), None
    for step in range(cp.size):
        coming = cp.start_shift(kv) if step < cp.size - 1 else None
        grads = use(kv, cut.spans(sight.length, (cp.rank - step) % cp.size))
        if step == 0:
            own = grads
        else:
            grads = grads if sums is None else grads.add_(sums.wait())
            sums = cp.start_shift(grads.to(kv.dtype), lane=1)
        kv = kv if coming is None else coming.wait()
    return own if sums is None else own.add_(sums.wait())


def _all_at_once(sight: Sight, cut: Cut, kv: Tensor, use: Use) -> None:
    """One all-gather."""
    cp = sight.stream.cp
    parts = cp.all_gather(kv).chunk(cp.size)
    use(cut.join(parts, 3) if cp.size > 1 else kv, replace(cut, rank=0, size=1).spans(sight.length))


def _all_back(sight: Sight, cut: Cut, kv: Tensor, use: Differentiate) -> Tensor:
    """One all-gather, one reduce-scatter."""
    cp = sight.stream.cp
    whole: list[Tensor] = []
    _all_at_once(sight, cut, kv, lambda kv, held: whole.append(use(kv, held)))
    mine = Cut(cut.rank, cut.size)
    return cp.reduce_scatter(torch.cat([mine.take(whole[0], 3, rank) for rank in range(cp.size)]).to(kv.dtype))


class _Trade(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, cp: Axis, to_heads: bool) -> Tensor:
        ctx.cp, ctx.to_heads = cp, to_heads
        return _trade(x, cp, to_heads)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return _trade(grad, ctx.cp, not ctx.to_heads), None, None


def _trade(x: Tensor, cp: Axis, to_heads: bool) -> Tensor:
    cut = Cut(cp.rank, cp.size)
    if to_heads:
        return cut.join(cp.all_to_all(torch.stack(x.chunk(cp.size, 2))).unbind(), 0)
    return torch.cat(cp.all_to_all(torch.stack([cut.take(x, 0, r) for r in range(cp.size)])).unbind(), 2)


def whole_sequences(core: Callable[[Tensor, Tensor, Tensor], Tensor], cp: Axis) -> Callable[..., Tensor]:
    """core of whole sequences and 1/c of the heads, q, k and v [s, b, heads, d] -> [s, b, heads x d], as a function of
    q [s/c, b, heads, d], k and v [s/c, b, groups, d] -> [s/c, b, heads x d]. Two exchanges: of q, k and v, and back."""
    trade: Callable[..., Tensor] = _Trade.apply

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if q.shape[2] % cp.size or k.shape[2] % cp.size:
            raise ConfigError(
                f"--cp-comm-type a2a deals heads to ranks, and {q.shape[2]} query and {k.shape[2]} key heads here do "
                f"not divide by {cp.size} context-parallel ranks. Use --cp-comm-type p2p."
            )
        # of each rank's heads q, k, v side by side: one exchange
        mixed = torch.cat([part for n in zip(*(x.chunk(cp.size, 2) for x in (q, k, v)), strict=True) for part in n], 2)
        sizes = [x.shape[2] // cp.size for x in (q, k, v)]
        out = core(*torch.split(trade(mixed, cp, True), sizes, 2))
        return trade(out, cp, False)

    return attend
