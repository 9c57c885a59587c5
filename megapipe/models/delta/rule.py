"""The gated delta rule in chunks, and the causal convolution before it.

The state S of a head is a matrix [dk, dv]. A token with query q, key k, value v, decay g and gate
beta (Yang et al. 2024, arXiv 2412.06464, equation 10) does

    S <- e^g S;    S <- S + k (beta (v - S^T k))^T;    output S^T q

Within a chunk these updates are one triangular system and a few products, and only chunks follow
each other (Yang et al. 2024, arXiv 2406.06484, section 3).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from megapipe.distributed.tokens import Documents

CHUNK = 64
"""Tokens of a chunk: the work within chunks grows with it, the number of steps falls."""
_EPSILON = 1e-6
"""Number that is added to the squared length of a query or key before its root."""


def numbers_of(documents: Documents, device: torch.device) -> Tensor:
    """Return the number of each token's document within its sequence, [b, s]."""
    rows = []
    for lengths in documents.lengths:
        counts = torch.tensor(lengths)
        rows.append(torch.repeat_interleave(torch.arange(len(lengths)), counts))
    return torch.stack(rows).to(device)


def convolved(x: Tensor, weight: Tensor, numbers: Tensor | None) -> Tensor:
    """Return a causal convolution of each channel with the tokens before it.

    Args:
        x: [s, b, heads, channels].
        weight: [heads, channels, taps], the token's own tap last.
        numbers: the document of each token [b, s]; tokens of other documents count as 0. None for a
            single document.
    Returns: the shape of x.
    """
    out = x * weight[..., -1]
    for back in range(1, min(weight.shape[-1], len(x))):
        earlier = x[:-back] * weight[..., -1 - back]
        if numbers is not None:
            same = numbers[:, back:] == numbers[:, :-back]
            earlier = earlier * same.t()[..., None, None]
        out[back:] += earlier
    return out


def unit(x: Tensor) -> Tensor:
    """Return the vectors of the last dimension divided by their lengths."""
    return x * (x.square().sum(-1, keepdim=True) + _EPSILON).rsqrt()


def gated_delta_rule(
    q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor, numbers: Tensor | None = None
) -> Tensor:
    """Return the output S^T q of each token, [b, heads, r, s, dv].

    S is the state of a value head, [dk, dv]. Successive r value heads share the query and the key
    of a key head.

    Args:
        q, k: [b, heads, s, dk], of length 1; q is scaled here by 1 / sqrt(dk).
        v: [b, heads, r, s, dv].
        decay: the logarithm of each token's factor on the state, at most 0: [b, heads, r, s].
        beta: the share of v - S^T k that a token writes: with 0 it writes nothing, with 1 its key
            then reads its value. [b, heads, r, s].
        numbers: [b, s], the index of each token's document in its sequence. The state starts at 0
            in each document. None for a single document.
    """
    s = q.shape[2]
    size = min(CHUNK, s)
    q = _chunks(q * q.shape[-1] ** -0.5, size, 2)[:, :, None]
    k = _chunks(k, size, 2)[:, :, None]
    v = _chunks(v, size, 3)
    beta = _chunks(beta, size, 3)[..., None]
    # The logarithm of all factors from the chunk's first token on.
    total = _chunks(decay, size, 3).cumsum(-1)
    reach = _reach(total, None if numbers is None else _chunks(numbers, size, 1))

    # What a token writes depends on what earlier tokens of the chunk have written: a triangular
    # system, with a right side for the values and one for the state before the chunk.
    keys = k @ k.mT
    right = torch.cat((v, (k * reach.from_start).expand(*v.shape[:-1], -1)), -1) * beta
    solved = torch.linalg.solve_triangular(
        beta * keys * reach.between, right, upper=False, unitriangular=True
    )
    written, corrections = solved.split((v.shape[-1], k.shape[-1]), -1)
    scores = (q @ k.mT) * reach.between
    reading = q * reach.from_start
    writing = (k * reach.to_end).mT

    state = v.new_zeros(*v.shape[:3], k.shape[-1], v.shape[-1])
    outs = []
    for chunk in range(v.shape[3]):
        values = written[:, :, :, chunk] - corrections[:, :, :, chunk] @ state
        outs.append(reading[:, :, :, chunk] @ state + scores[:, :, :, chunk] @ values)
        state = reach.across[:, :, :, chunk] * state + writing[:, :, :, chunk] @ values
    return torch.cat(outs, 3)[:, :, :, :s]


@dataclass(frozen=True)
class _Reach:
    """The factors by which a token's update has decayed at other tokens of the chunk.

    Factors between tokens of different documents are 0. n counts the chunks of a sequence, c the
    tokens of a chunk.

    Attributes:
        between: from the token of a column to the token of a row, [b, heads, r, n, c, c].
        from_start: from the state before the chunk to a token, [b, heads, r, n, c, 1].
        to_end: from a token to the state after the chunk, [b, heads, r, n, c, 1].
        across: from the state before the chunk to the one after it, [b, heads, r, n, 1, 1].
    """

    between: Tensor
    from_start: Tensor
    to_end: Tensor
    across: Tensor


def _reach(total: Tensor, numbers: Tensor | None) -> _Reach:
    """Return the factors of all n chunks of c tokens.

    Args:
        total: [b, heads, r, n, c], the sum of `decay` from the chunk's first token to each token.
        numbers: [b, n, c], the index of each token's document, or None for a single document.
    """
    size = total.shape[-1]
    seen = torch.ones(size, size, dtype=torch.bool, device=total.device).tril()
    if numbers is not None:
        seen = seen & (numbers[..., :, None] == numbers[..., None, :])[:, None, None]
    # Masked before the exponential, which overflows for pairs in the wrong order.
    between = (total[..., :, None] - total[..., None, :]).masked_fill(~seen, -torch.inf).exp()
    from_start = total.exp()
    to_end = (total[..., -1:] - total).exp()
    across = from_start[..., -1:]
    if numbers is not None:
        last = numbers[..., -1:]
        # The document of the state before a chunk is the one that the chunk before ends in. The
        # first chunk's state is 0 in any case.
        before = last.roll(1, 1)
        from_start = from_start * (numbers == before)[:, None, None]
        to_end = to_end * (numbers == last)[:, None, None]
        across = across * (last == before)[:, None, None]
    return _Reach(between, from_start[..., None], to_end[..., None], across[..., None])


def _chunks(x: Tensor, size: int, dim: int) -> Tensor:
    """Return x with its tokens in dimension `dim` cut in chunks [.., n, size, ..].

    The last chunk is filled up with zeros, which write nothing.
    """
    missing = -x.shape[dim] % size
    if missing:
        x = F.pad(x, (0, 0) * (x.ndim - 1 - dim) + (0, missing))
    return torch.unflatten(x, dim, (-1, size))
