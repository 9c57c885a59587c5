"""Tokens of its sequences that a rank has, and their documents: positions, labels and masks follow from them.

Plain numbers, documents read from the token ids on the host: no layer needs a mask of s x s, every stage can know them.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import accumulate, pairwise

import torch
import torch.nn.functional as F
from torch import Tensor

from megapipe.errors import ConfigError

Tokens = tuple[range, ...]
"""Positions in whole sequences, in the order in which their rows lie in a tensor."""


@dataclass(frozen=True)
class Cut:
    """A cut of sequences over c context-parallel ranks: of 2c equal pieces rank r has the r-th and the r-th from
    the end, so that causal attention is the same work on each (Dubey et al. 2024, section 3.3.2).

    Attributes:
        piece, length: the slice of sequences of this length that ranks share so; None: whole sequences.
    """

    rank: int = 0
    size: int = 1
    piece: range | None = None
    length: int = 0

    def whole(self, rows: int) -> int:
        """Length of the sequences of which so many tokens are here."""
        return rows * self.size if self.piece is None else self.length

    def spans(self, length: int, rank: int | None = None) -> Tokens:
        """The tokens here, or on another rank, of sequences of so many.

        Raises: ConfigError for a length, or a slice, that does not divide by 2c.
        """
        piece = range(length) if self.piece is None else self.piece
        if self.size == 1:
            return (piece,)
        if len(piece) % (2 * self.size):
            raise ConfigError(length_problem(len(piece), self.size))
        n, r = len(piece) // (2 * self.size), self.rank if rank is None else rank
        return tuple(piece[i * n : (i + 1) * n] for i in (r, 2 * self.size - 1 - r))

    def take(self, x: Tensor, dim: int, rank: int | None = None) -> Tensor:
        """The rank's tokens of an x that has whole sequences in dimension `dim`."""
        if self.size == 1 and self.piece is None:
            return x
        return torch.cat([x.narrow(dim, r.start, len(r)) for r in self.spans(x.shape[dim], rank)], dim)

    def join(self, parts: Sequence[Tensor], dim: int) -> Tensor:
        """Whole sequences of what every rank has, in rank order."""
        halves = [part.chunk(2, dim) for part in parts]
        return torch.cat([*(low for low, _ in halves), *(high for _, high in reversed(halves))], dim)


WHOLE = Cut()


def length_problem(length: int, ranks: int) -> str:
    """A sentence on why sequences cannot be cut so."""
    pieces, low = 2 * ranks, length - length % (2 * ranks)
    near = " or ".join(str(n) for n in (low, low + pieces) if n)
    return (
        f"--context-parallel-size {ranks} cuts sequences into {pieces} equal pieces, and {length} = "
        f"{pieces} x {length // pieces} + {length % pieces}. Use --seq-length {near}."
    )


def ahead(x: Tensor, depth: int) -> Tensor:
    """[b, s] -> what stands so many tokens further, zeros behind the end: how far multi-token prediction reads."""
    return F.pad(x[:, depth:], (0, min(depth, x.shape[1]))) if depth else x


def share_of(tokens: Tokens, n: int, of: int) -> Tokens:
    """The n-th of so many equal runs of these tokens."""
    rows = sum(map(len, tokens)) // of
    skip, found = n * rows, []
    for span in tokens:
        part = span[max(skip, 0) : max(skip + rows, 0)]
        skip -= len(span)
        if len(part):
            found.append(part)
    return tuple(found)


@dataclass(frozen=True)
class Documents:
    """Documents of each sequence of a microbatch.

    Attributes:
        lengths: for each of the b sequences the lengths of its documents in order; their sum is s.
        isolate: attention does not cross from one to another (--reset-attention-mask).
        restart: positions begin at 0 in each (--reset-position-ids).
    """

    lengths: tuple[tuple[int, ...], ...]
    isolate: bool
    restart: bool

    @cached_property
    def _begins(self) -> tuple[tuple[int, ...], ...]:
        return tuple(tuple(accumulate(lengths[:-1], initial=0)) for lengths in self.lengths)

    @cached_property
    def borders(self) -> tuple[int, ...]:
        """Tokens behind the first with which a document begins in every sequence."""
        return tuple(sorted(set.intersection(*map(set, self._begins)) - {0}))

    def first_seen(self, position: int) -> int:
        """The first token of the document that has this position, the earliest of all sequences'."""
        return min(begins[bisect_right(begins, position) - 1] for begins in self._begins)


def find_documents(tokens: Tensor, eod: int, *, isolate: bool, restart: bool) -> Documents:
    """Cut after each end-of-document token. tokens: [b, s] on the host."""
    lengths = []
    for row in tokens == eod:
        ends = [*(row[:-1].nonzero().flatten() + 1).tolist(), len(row)]
        lengths.append(tuple(end - begin for begin, end in pairwise([0, *ends])))
    return Documents(tuple(lengths), isolate, restart)


@lru_cache(maxsize=16)  # all layers of a pass ask for the same
def positions(length: int, cut: Cut, documents: Documents | None, device: torch.device) -> Tensor:
    """[b, s/c], or [1, s/c] where none restarts, int64: the positions of the tokens here; `length` is s."""
    if documents is None or not documents.restart:
        return cut.take(torch.arange(length)[None], 1).to(device)
    rows = [torch.cat([torch.arange(n) for n in lengths]) for lengths in documents.lengths]
    return cut.take(torch.stack(rows), 1).to(device)


@lru_cache(maxsize=4)
def numbers_of(documents: Documents, device: torch.device) -> Tensor:
    """[b, s] int64: the number of each token's document in its sequence."""
    rows = [torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths)) for lengths in documents.lengths]
    return torch.stack(rows).to(device, non_blocking=True)
