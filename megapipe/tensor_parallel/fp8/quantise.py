"""Quantise a matrix to FP8: eight-bit values times one factor, or times a factor for each block.

The formulas are Transformer Engine's, so that a run has the same meaning there. Let amax be the
largest absolute value, and max the largest number of the FP8 type.

1. One factor: values are multiplied by max / amax / 2^margin (Micikevicius et al. 2022, sec. 3.1).
2. Blocks: values are multiplied by the largest power of two not above max / amax. The inverse fits
   into eight bits, as MX blocks of 32 require (Rouhani et al. 2023). Blocks of 128 and 128 x 128
   (DeepSeek-V3, section 3.3) use the same factors.

If a number is NaN or infinite, all values with the same factor become NaN: the clamp must not hide
it.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from megapipe.kernels.region import region

_NAN = float("nan")


class Quantised(NamedTuple):
    """A quantised matrix [r, k], equal to values times factors.

    `transposed` returns the transposed matrix, `plain` the product of values and factors.

    Attributes:
        values: [r', k'] in FP8; r and k padded with zeros to multiples of the block's sizes.
        factors: float32, [] for one factor, or [r' / rows, k' / columns] for blocks.
        rows: r.
        block: (rows, columns) of a block; None with a single factor.
    """

    values: Tensor
    factors: Tensor
    rows: int
    block: tuple[int, int] | None = None

    def transposed(self, columns: int) -> Quantised:
        """Return the transposed matrix; with square blocks, as if the transpose had been quantised.

        Args:
            columns: k, which the padded values do not show.
        """
        if self.block is None:
            return Quantised(self.values.t(), self.factors, columns, None)
        block = (self.block[1], self.block[0])
        return Quantised(self.values.t(), self.factors.t(), columns, block)

    def plain(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """Return values times factors, [r, k'].

        With blocks the result is exact in bfloat16, too, because the factors are powers of two.
        """
        if self.block is None:
            return (self.values.float() * self.factors).to(dtype)
        scaled = _blocks(self.values, *self.block) * self.factors[:, None, :, None]
        return scaled.view(self.values.shape)[: self.rows].to(dtype)


def amax_of(x: Tensor) -> Tensor:
    """Return the largest absolute value, [] in float32; NaN if any value is NaN."""
    amax: Tensor = torch.linalg.vector_norm(x, float("inf"))
    return amax.float()


def of_whole(x: Tensor, dtype: torch.dtype, amax: Tensor, margin: int = 0) -> Quantised:
    """Quantise a matrix with one factor.

    Args:
        x: [r, k]. dtype: an FP8 type.
        amax: [] in float32, the largest absolute value expected; larger values are clamped.
        margin: the factor leaves room for values up to 2^margin amax.
    """
    values, factors = _of_whole(x, dtype, amax, margin)
    return Quantised(values, factors, len(x))


def in_blocks(x: Tensor, dtype: torch.dtype, block: tuple[int, int]) -> Quantised:
    """Quantise a matrix [r, k] with a factor for each block of (rows, columns)."""
    values, factors = _in_blocks(filled(x, block), dtype, *block)
    return Quantised(values, factors, len(x), block)


def filled(x: Tensor, block: tuple[int, int]) -> Tensor:
    """Pad a matrix [r, k] with zeros to multiples of the block's (rows, columns), as a copy.

    If nothing is missing, x itself is returned.
    """
    rows, columns = block
    r, k = x.shape
    if r % rows == 0 and k % columns == 0:
        return x
    # F.pad lists the last dimension first.
    return F.pad(x, (0, -k % columns, 0, -r % rows))


def amaxes_of(x: Tensor, block: tuple[int, int]) -> Tensor:
    """Return the largest absolute value of each block, [r' / rows, k' / columns] in float32.

    x: [r', k'], padded by `filled`.
    """
    return _blocks(x, *block).abs().amax((1, 3))


def cast_blocks(x: Tensor, dtype: torch.dtype, block: tuple[int, int], amaxes: Tensor) -> Tensor:
    """Return the FP8 values of a padded matrix, given the largest value of each block.

    Args:
        x: [r', k'], padded by `filled`. block: (rows, columns) of a block.
        amaxes: [r' / rows, k' / columns], from `amaxes_of`.
    Returns: [r', k'].
    """
    blocks = _blocks(x, *block)
    return _cast(blocks * _scales(amaxes, dtype)[:, None, :, None], dtype).view(x.shape)


def factors_of(amaxes: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the factor of each block, which multiplies its FP8 values: float32, like amaxes.

    Args:
        amaxes: the largest absolute value of each block. dtype: the FP8 type.
    """
    return _or_nan(1 / _scales(amaxes, dtype), amaxes)


@region("quantised(Tensor x, ScalarType dtype, Tensor amax, int margin) -> (Tensor, Tensor)")
def _of_whole(x: Tensor, dtype: torch.dtype, amax: Tensor, margin: int) -> tuple[Tensor, Tensor]:
    scale = _limited(torch.finfo(dtype).max / amax) / 2.0**margin
    # max / 0 is infinite. Zeros are stored with the factor 1.
    scale = torch.where(amax > 0, scale, 1.0)
    return _cast(x.float() * scale, dtype), _or_nan(1 / scale, amax)


@region("quantised_blocks(Tensor x, ScalarType dtype, int rows, int columns) -> (Tensor, Tensor)")
def _in_blocks(x: Tensor, dtype: torch.dtype, rows: int, columns: int) -> tuple[Tensor, Tensor]:
    amaxes = amaxes_of(x, (rows, columns))
    return cast_blocks(x, dtype, (rows, columns), amaxes), factors_of(amaxes, dtype)


def _blocks(x: Tensor, rows: int, columns: int) -> Tensor:
    return x.float().reshape(x.shape[0] // rows, rows, x.shape[1] // columns, columns)


def _scales(amaxes: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the number that each block is multiplied by before it is rounded to FP8.

    The number is the largest power of two not above max / amax; 1 if amax is 0.

    Args:
        amaxes: the largest absolute value of each block.
        dtype: the FP8 type, whose largest number is max.
    """
    # frexp returns a mantissa in [1/2, 1), so the power is one below the exponent.
    _, exponent = torch.frexp(_limited(torch.finfo(dtype).max / amaxes))
    return torch.ldexp(torch.ones_like(amaxes), torch.where(amaxes > 0, exponent - 1, 0))


def _cast(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Round x to an FP8 type, with larger numbers clamped to its largest."""
    most = torch.finfo(dtype).max
    return x.clamp(-most, most).to(dtype)


def _limited(scale: Tensor) -> Tensor:
    """Return `scale`, at most 2^126; without the limit it is infinite for small values."""
    return scale.clamp(max=2.0**126)


def _or_nan(factors: Tensor, amax: Tensor) -> Tensor:
    return torch.where(amax.isfinite(), factors, _NAN)
