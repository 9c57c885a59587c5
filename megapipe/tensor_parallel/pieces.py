"""Products in pieces of their rows, while rows of other tensor-parallel ranks are on their way (--tp-comm-overlap).

Under sequence parallelism rows go around a ring (Wang et al. 2023, "Overlap Communication with Dependent Computation
via Decomposition"): a rank multiplies those that it has while the next come; what it has multiplied for another goes on
while it multiplies for the next. Without it the sum of a piece is under way while the next piece is multiplied. Weight
gradients are never in pieces.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from megapipe.distributed.axis import Axis

PIECES = 4
"""The pieces of a product whose sum each rank has whole: only the last one's sum is waited for."""


class Multiply(Protocol):
    """A product of rows [n, ..., k] -> [n, ..., width], into `out` if it is given."""

    def __call__(self, rows: Tensor, *, out: Tensor | None = None) -> Tensor: ...


class Pieces(NamedTuple):
    """Products of the ranks of an axis together.

    Attributes:
        shares: each has its share of the sequence, not all of it.
    """

    tp: Axis
    shares: bool

    def gathered(self, x: Tensor, multiply: Multiply, width: int) -> tuple[Tensor, Tensor]:
        """The product of everyone's rows, x [n, ...] on each rank, and these rows [t * n, ...]."""
        if not self.shares:
            return multiply(x), x
        t, n, rank = self.tp.size, len(x), self.tp.rank
        whole = x.new_empty(t * n, *x.shape[1:])
        out = x.new_empty(t * n, *x.shape[1:-1], width)
        rows, products = torch.split(whole, n), torch.split(out, n)
        rows[rank].copy_(x)
        for step in range(t):
            here, next_ = (rank - step) % t, (rank - step - 1) % t
            coming = self.tp.start_shift(rows[here], into=rows[next_]) if step < t - 1 else None
            multiply(rows[here], out=products[here])
            if coming is not None:
                coming.wait()
        return out, whole

    def summed(self, x: Tensor, multiply: Multiply, width: int) -> Tensor:
        """The product of x [s, ...] summed over the ranks: of all rows, or of this rank's [s / t, ...] of them."""
        if not self.shares:
            return self._summed_whole(x, multiply, width)
        t, rank = self.tp.size, self.tp.rank
        rows, passed = torch.split(x, len(x) // t), None
        for step in range(t):
            # Rows of the rank before: their sum begins behind their rank and ends there.
            part = multiply(rows[(rank - step - 1) % t])
            if passed is not None:
                part.add_(passed.wait())
            passed = self.tp.start_shift(part) if step < t - 1 else None
        return part

    def _summed_whole(self, x: Tensor, multiply: Multiply, width: int) -> Tensor:
        out = x.new_empty(*x.shape[:-1], width)
        size = -(-len(x) // PIECES)
        sums = []
        for rows, part in zip(torch.split(x, size), torch.split(out, size), strict=True):
            sums.append(self.tp.start_all_reduce(multiply(rows, out=part)))
        for pending in sums:
            pending.wait()
        return out
