"""Say which tokens of a sequence a rank has, and where its documents begin.

Positions, labels and masks follow from both. Both are plain numbers, read from the token ids on the
host. Every stage can therefore know them, and no layer needs a mask of s x s.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from itertools import accumulate, pairwise

import torch
import torch.nn.functional as F
from torch import Tensor

from megapipe.errors import ConfigError

Tokens = tuple[range, ...]
"""Positions in full sequences, in the order of the rows of a tensor."""


@dataclass(frozen=True)
class Cut:
    """The way in which context parallelism divides the tokens of a sequence, as one rank sees it.

    For c ranks a sequence is cut into 2c equal pieces. Rank r has piece r and piece 2c - 1 - r.
    Causal attention is then equal work on all ranks (Dubey et al. 2024, section 3.3.2). `take` cuts
    a tensor, `join` joins the parts, and `spans` returns positions. `whole` returns the length of
    the full sequence.

    Attributes:
        rank: r, this rank's position.
        size: c, the number of ranks.
        piece: the token positions of a slice, if only this slice of each sequence is divided over
            the ranks; None if the full sequence is.
        length: number of tokens of the full sequence, only used with `piece`.
    """

    rank: int = 0
    size: int = 1
    piece: range | None = None
    length: int = 0

    def whole(self, rows: int) -> int:
        """Return the length of a full sequence, if this rank has `rows` of its tokens."""
        return rows * self.size if self.piece is None else self.length

    def spans(self, length: int, rank: int | None = None) -> Tokens:
        """Return the positions of this or another rank's tokens, as ranges.

        Args:
            length: length of the full sequence.
            rank: the other rank; None for this one.
        Raises: ConfigError if c > 1 ranks divide a number of tokens that is not a multiple of 2c.
            This number is `length`, or the length of the slice in the field `piece`.
        """
        # A slice of a sequence is divided in the same way as a full one.
        piece = range(length) if self.piece is None else self.piece
        if self.size == 1:
            return (piece,)
        num_pieces = 2 * self.size
        if len(piece) % num_pieces:
            raise ConfigError(length_problem(len(piece), self.size))
        n = len(piece) // num_pieces
        r = self.rank if rank is None else rank
        return tuple(piece[i * n : (i + 1) * n] for i in (r, num_pieces - 1 - r))

    def take(self, x: Tensor, dim: int, rank: int | None = None) -> Tensor:
        """Return the tokens of this rank, or of another one, from a tensor of full sequences.

        The result is a copy, or x itself if this rank has all tokens.

        Args:
            x: a tensor with the full sequence in dimension `dim`.
            rank: the other rank; None for this one.
        Raises: ConfigError as `spans`.
        """
        # Most runs come here: no copy of the batch.
        if self.size == 1 and self.piece is None:
            return x
        spans = self.spans(x.shape[dim], rank)
        return torch.cat([x.narrow(dim, span.start, len(span)) for span in spans], dim)

    def join(self, parts: Sequence[Tensor], dim: int) -> Tensor:
        """Return full sequences (with `piece`, the slice of each) from the tokens of every rank.

        Args:
            parts: each rank's tokens, in rank order.
            dim: the dimension of the sequence.
        """
        # Rank r's second piece is the r-th from the end, so the second pieces follow in reverse.
        halves = [part.chunk(2, dim) for part in parts]
        low = [first for first, _ in halves]
        high = [second for _, second in reversed(halves)]
        return torch.cat([*low, *high], dim)


WHOLE = Cut()


def length_problem(length: int, ranks: int) -> str:
    """Return an error text for a length that cannot be cut for `ranks` context-parallel ranks."""
    pieces = 2 * ranks
    low = length - length % pieces
    near = " or ".join(str(n) for n in (low, low + pieces) if n)
    return (
        f"--context-parallel-size {ranks} cuts sequences into {pieces} equal pieces, and {length} ="
        f" {pieces} x {length // pieces} + {length % pieces}. Use --seq-length {near}."
    )


def ahead(x: Tensor, depth: int) -> Tensor:
    """Shift x [b, s] left by `depth` tokens and fill up with zeros, for multi-token prediction."""
    # A depth may be longer than a sequence, which is then all zeros.
    return F.pad(x[:, depth:], (0, min(depth, x.shape[1]))) if depth else x


def share_of(tokens: Tokens, n: int, of: int) -> Tokens:
    """Cut tokens, in order, into `of` equal parts, and return part n, counted from 0.

    Tokens that do not fill `of` equal parts are in none.

    Sequence parallelism gives this part to rank n of `of` tensor-parallel ranks.

    Args:
        tokens: positions as ranges, as `Cut.spans` returns them.
    """
    # A part may begin or end within a span, and include several spans.
    rows = sum(map(len, tokens)) // of
    # The number of tokens before the part, counted from the beginning of the current span.
    skip = n * rows
    found = []
    for span in tokens:
        part = span[max(skip, 0) : max(skip + rows, 0)]
        skip -= len(span)
        if len(part):
            found.append(part)
    return tuple(found)


@dataclass(frozen=True)
class Documents:
    """The documents in the sequences of a microbatch.

    `borders` and `first_seen` return positions at which documents begin.

    Attributes:
        lengths: for each of the b sequences, the lengths of its documents in order; their sum is s.
        isolate: whether attention stays within documents (--reset-attention-mask).
        restart: whether positions begin at 0 in each document (--reset-position-ids).
    """

    lengths: tuple[tuple[int, ...], ...]
    isolate: bool
    restart: bool

    @cached_property
    def _begins(self) -> tuple[tuple[int, ...], ...]:
        """The positions at which documents begin, in order, for each sequence."""
        return tuple(tuple(accumulate(lengths[:-1], initial=0)) for lengths in self.lengths)

    @cached_property
    def borders(self) -> tuple[int, ...]:
        """The positions, except 0, at which all sequences of the microbatch begin a document."""
        # All sequences of a microbatch are cut at one place, so all must have a border there.
        return tuple(sorted(set.intersection(*map(set, self._begins)) - {0}))

    def chunks(self, size: int) -> Documents:
        """Return documents of at most `size` tokens: each is cut from its beginning on."""
        lengths = []
        for row in self.lengths:
            cut = [range(begin, n)[:size] for n in row for begin in range(0, n, size)]
            lengths.append(tuple(map(len, cut)))
        return replace(self, lengths=tuple(lengths))

    def first_seen(self, position: int) -> int:
        """Return the position at which the document with the token at `position` begins.

        If the sequences have different documents there, the smallest such position is returned.
        """
        return min(begins[bisect_right(begins, position) - 1] for begins in self._begins)


def find_documents(tokens: Tensor, eod: int, *, isolate: bool, restart: bool) -> Documents:
    """Return the documents of each sequence. A document ends with an end-of-document token.

    Args:
        tokens: [b, s] on the host.
        eod: the end-of-document id.
        isolate: whether attention stays within documents (--reset-attention-mask).
        restart: whether positions begin at 0 in each document (--reset-position-ids).
    """
    lengths = []
    for is_end in tokens == eod:
        # An end-of-document token in the last place begins no document.
        ends = (is_end[:-1].nonzero().flatten() + 1).tolist()
        bounds = [0, *ends, len(is_end)]
        lengths.append(tuple(end - begin for begin, end in pairwise(bounds)))
    return Documents(tuple(lengths), isolate, restart)


# Cached, because all layers of a pass ask for the same positions.
@lru_cache(maxsize=16)
def positions(length: int, cut: Cut, documents: Documents | None, device: torch.device) -> Tensor:
    """Return the position ids of this rank's tokens, int64. Do not change the tensor: it is cached.

    Args:
        length: s, the length of the full sequence.
        cut: says which s/c tokens this rank has.
        documents: documents of the microbatch, or None.
    Returns: [b, s/c], or [1, s/c] if positions do not restart in documents.
    """
    if documents is None or not documents.restart:
        return cut.take(torch.arange(length)[None], 1).to(device)
    rows = []
    for lengths in documents.lengths:
        rows.append(torch.cat([torch.arange(n) for n in lengths]))
    return cut.take(torch.stack(rows), 1).to(device)


# Cached like `positions`; only few microbatches are in use at a time.
@lru_cache(maxsize=4)
def numbers_of(documents: Documents, device: torch.device) -> Tensor:
    """Return, for each token, the number of its document in its sequence, from 0: [b, s] int64.

    Do not change the tensor: it is cached.
    """
    rows = []
    for lengths in documents.lengths:
        rows.append(torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths)))
    return torch.stack(rows).to(device, non_blocking=True)
