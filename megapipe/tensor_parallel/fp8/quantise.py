"""Numbers of eight bits with scales: a matrix becomes values times factors, one for all of it or one for each block.

Formulas are Transformer Engine's, so that a run means the same there. Of a whole tensor a value is multiplied by
max / amax / 2^margin (Micikevicius et al. 2022, section 3.1); of a block by the largest power of two that is no more
than max / amax, whose inverse fits into the eight bits of mx (Rouhani et al. 2023), blocks of 32, and loses nothing in
those of 128 and 128 x 128 (DeepSeek-V3, section 3.3). Where a number is none, all that shares its factor becomes NaN:
the clamp must not hide it.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from megapipe.kernels.region import region

_NAN = float("nan")


class Quantised(NamedTuple):
    """A matrix [r, k].

    Attributes:
        values: [r', k'] in eight bits, filled up with zeros to whole blocks.
        factors: in float32; value times factor is what is meant. One, [], or of each block, [r' / rows, k' / columns].
        rows: r, of what was quantised.
        block: (rows, columns) of a block; None where all have one factor.
    """

    values: Tensor
    factors: Tensor
    rows: int
    block: tuple[int, int] | None = None

    def transposed(self, columns: int) -> Quantised:
        """The transposed matrix, of the same bits as if it were quantised itself: a block is square.

        columns: of this one, to whole blocks of which there may be more.
        """
        block = None if self.block is None else (self.block[1], self.block[0])
        return Quantised(self.values.t(), self.factors.t() if block else self.factors, columns, block)

    def plain(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """The matrix that is meant, [r, k']. Of blocks exact in bfloat16 too: their factors are powers of two."""
        if self.block is None:
            return (self.values.float() * self.factors).to(dtype)
        (rows, columns), shape = self.block, self.values.shape
        blocks = self.values.float().view(shape[0] // rows, rows, shape[1] // columns, columns)
        return (blocks * self.factors[:, None, :, None]).view(shape)[: self.rows].to(dtype)


def amax_of(x: Tensor) -> Tensor:
    """The largest absolute value, [] in float32; NaN if there is one."""
    amax: Tensor = torch.linalg.vector_norm(x, float("inf"))
    return amax.float()


def of_whole(x: Tensor, dtype: torch.dtype, amax: Tensor, margin: int = 0) -> Quantised:
    """A matrix with one factor.

    amax: [] in float32, the largest absolute value that is expected; what is above is cut off.
    """
    values, factors = _of_whole(x, dtype, amax, margin)
    return Quantised(values, factors, len(x))


def in_blocks(x: Tensor, dtype: torch.dtype, block: tuple[int, int]) -> Quantised:
    """A matrix [r, k] with a factor for each block of so many (rows, columns)."""
    values, factors = _in_blocks(filled(x, block), dtype, *block)
    return Quantised(values, factors, len(x), block)


def filled(x: Tensor, block: tuple[int, int]) -> Tensor:
    """A matrix [r, k] filled up with zeros to whole blocks."""
    (rows, columns), (r, k) = block, x.shape
    return F.pad(x, (0, -k % columns, 0, -r % rows)) if r % rows or k % columns else x


def amaxes_of(x: Tensor, block: tuple[int, int]) -> Tensor:
    """The largest absolute value of each block of a filled matrix, in float32."""
    return _blocks(x, *block).abs().amax((1, 3))


def cast_blocks(x: Tensor, dtype: torch.dtype, block: tuple[int, int], amaxes: Tensor) -> Tensor:
    """A filled matrix in eight bits, its blocks scaled by these largest values."""
    blocks = _blocks(x, *block)
    return _cast(blocks * _scales(amaxes, dtype)[:, None, :, None], dtype).view(x.shape)


def factors_of(amaxes: Tensor, dtype: torch.dtype) -> Tensor:
    """The factors of blocks with these largest values."""
    return _or_nan(1 / _scales(amaxes, dtype), amaxes)


@region("quantised(Tensor x, ScalarType dtype, Tensor amax, int margin) -> (Tensor, Tensor)")
def _of_whole(x: Tensor, dtype: torch.dtype, amax: Tensor, margin: int) -> tuple[Tensor, Tensor]:
    scale = _limited(torch.finfo(dtype).max / amax) / 2.0**margin
    scale = torch.where(amax > 0, scale, 1.0)
    return _cast(x.float() * scale, dtype), _or_nan(1 / scale, amax)


@region("quantised_blocks(Tensor x, ScalarType dtype, int rows, int columns) -> (Tensor, Tensor)")
def _in_blocks(x: Tensor, dtype: torch.dtype, rows: int, columns: int) -> tuple[Tensor, Tensor]:
    amaxes = amaxes_of(x, (rows, columns))
    return cast_blocks(x, dtype, (rows, columns), amaxes), factors_of(amaxes, dtype)


def _blocks(x: Tensor, rows: int, columns: int) -> Tensor:
    return x.float().reshape(x.shape[0] // rows, rows, x.shape[1] // columns, columns)


def _scales(amaxes: Tensor, dtype: torch.dtype) -> Tensor:
    """The largest power of two that is no more than the quotient."""
    _, exponent = torch.frexp(_limited(torch.finfo(dtype).max / amaxes))
    return torch.ldexp(torch.ones_like(amaxes), torch.where(amaxes > 0, exponent - 1, 0))


def _cast(x: Tensor, dtype: torch.dtype) -> Tensor:
    """The nearest numbers of that type, the largest for what is above."""
    most = torch.finfo(dtype).max
    return x.clamp(-most, most).to(dtype)


def _limited(scale: Tensor) -> Tensor:
    """Scales of amaxes so small that the quotient is infinite."""
    return scale.clamp(max=2.0**126)


def _or_nan(factors: Tensor, amax: Tensor) -> Tensor:
    return torch.where(amax.isfinite(), factors, _NAN)
