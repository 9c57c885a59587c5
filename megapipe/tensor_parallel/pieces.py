"""Overlap matrix products with tensor-parallel communication (--tp-comm-overlap).

A product is computed in pieces of its rows. Under sequence parallelism the rows go around a ring
(Wang et al. 2023, "Overlap Communication with Dependent Computation via Decomposition"). A rank
multiplies the rows at hand while the next rows arrive, or while the last partial sum is sent on.
Without sequence parallelism the all-reduce of one piece runs during the product of the next.
Weight gradients are never computed in pieces.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from megapipe.distributed.axis import Axis

PIECES = 4
"""Pieces of a product that is all-reduced; only the last piece's all-reduce is not overlapped."""


class Multiply(Protocol):
    """A function multiply(rows, *, out=None) -> product of the rows with a weight."""

    def __call__(self, rows: Tensor, *, out: Tensor | None = None) -> Tensor:
        """Return rows [n, ..., k] -> [n, ..., width], written to `out` if it is given."""


class CollectiveMatmul(NamedTuple):
    """Products at the edges of a tensor-parallel region, computed in pieces.

    `gathered` multiplies rows that an all-gather brings, `summed` returns a product that is summed
    over the ranks.

    Attributes:
        tp: the ranks that compute the product together.
        shares: True under sequence parallelism, when a rank has only its tokens at the edge.
    """

    tp: Axis
    shares: bool

    def gathered(self, x: Tensor, multiply: Multiply, width: int) -> tuple[Tensor, Tensor]:
        """Gather the rows of all ranks, and multiply each rank's rows while the next ones arrive.

        Args:
            x: [n, ..., k], this rank's rows.
            multiply: multiplies some rows with the weight; called once for each rank's rows.
            width: last dimension of the product.
        Returns: (product [t n, ..., width], gathered rows [t n, ..., k]); n rows instead of t n if
            not `shares`.
        """
        if not self.shares:
            return multiply(x), x
        t = self.tp.size
        n = len(x)
        rank = self.tp.rank
        gathered = x.new_empty(t * n, *x.shape[1:])
        out = x.new_empty(t * n, *x.shape[1:-1], width)
        rows = torch.split(gathered, n)
        products = torch.split(out, n)
        rows[rank].copy_(x)
        # Rank r multiplies the rows of r, r - 1, r - 2, ... in the order in which they arrive.
        for step in range(t):
            here = (rank - step) % t
            coming = None
            if step < t - 1:
                coming = self.tp.start_shift(rows[here], into=rows[(here - 1) % t])
            # The shift is under way during this product. Its send reads the same rows, which is
            # safe.
            multiply(rows[here], out=products[here])
            if coming is not None:
                coming.wait()
        return out, gathered

    def summed(self, x: Tensor, multiply: Multiply, width: int) -> Tensor:
        """Return the product of x, summed over the ranks.

        The product is computed in pieces. While one piece is summed over the ranks, the next piece
        is multiplied.

        Args:
            x: [s, ..., k], this rank's slice of the features.
            multiply: the product, called once for each piece.
            width: last dimension of the product.
        Returns: [s, ..., width]; with `shares` this rank's tokens [s/t, ..., width].
        """
        if not self.shares:
            return self._all_reduced(x, multiply, width)
        t = self.tp.size
        rank = self.tp.rank
        rows = torch.split(x, len(x) // t)
        passed = None
        for step in range(t):
            # The sum of a rank's rows starts at the rank after it, goes around, and ends there.
            part = multiply(rows[(rank - step - 1) % t])
            if passed is not None:
                # Summed from the next rank around to this one, so with three ranks or more the
                # rounding differs from a reduce-scatter's.
                part.add_(passed.wait())
            if step < t - 1:
                passed = self.tp.start_shift(part)
        return part

    def _all_reduced(self, x: Tensor, multiply: Multiply, width: int) -> Tensor:
        out = x.new_empty(*x.shape[:-1], width)
        size = -(-len(x) // PIECES)
        sums = []
        for rows, part in zip(torch.split(x, size), torch.split(out, size), strict=True):
            sums.append(self.tp.start_all_reduce(multiply(rows, out=part)))
        # Each wait makes all work that follows it wait too, so no product may follow one.
        for pending in sums:
            pending.wait()
        return out
