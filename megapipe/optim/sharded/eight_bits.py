"""Flat buffers of weights that passes read in 8 bits (--fp8-param-gather).

    shard    this rank's share in the weights' own type, which the update writes.

    bytes    all weights quantised, from a gathering until the next update.

    model    all weights in their own type, only while code between passes reads or writes them.

Without `model` a parameter has a shape but no values.

A share may end within a matrix, so the ranks must agree on the scales first. Each rank takes the
largest values of its part, and an all-reduce makes them the largest values of tensors or blocks.
Then each rank quantises its share. The result is bitwise equal to quantising the full weight, for
any number of ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import Tensor, nn

from megapipe.distributed.device import Gauge
from megapipe.optim.buffers import FlatBuffers
from megapipe.optim.sharded.buffers import ShardedBuffers
from megapipe.optim.sharded.passing import Passing, separate, start_filling
from megapipe.tensor_parallel.fp8.products import WEIGHT, Scaled
from megapipe.tensor_parallel.fp8.quantise import (
    Quantised,
    amax_of,
    amaxes_of,
    cast_blocks,
    factors_of,
    filled,
    of_whole,
)


@dataclass(frozen=True)
class _Matrix:
    """The weight [r, k] of one matrix product, in a flat buffer that ranks share.

    Each rank has a part of the matrix, finds the largest values of this part (`largest`), and
    quantises it (`cast`). Then `give` passes the gathered matrix on to the product.

    Attributes:
        products: the module that multiplies by the matrix in FP8.
        number: the matrix's index in a parameter with several, such as one for each expert; else 0.
        start: index of the matrix's first element in the flat buffer.
        r: number of rows.
        k: number of columns.
        own: this rank's elements, counted from the beginning of the matrix.
        mine: the same elements, counted from the beginning of this rank's share of the buffer.
    """

    products: Scaled
    number: int
    start: int
    r: int
    k: int
    own: slice
    mine: slice

    @property
    def dtype(self) -> torch.dtype:
        """The 8-bit type."""
        return self.products.recipe.dtype(WEIGHT)

    @property
    def block(self) -> tuple[int, int] | None:
        """Rows and columns of a block with one scale; None for one scale per tensor."""
        return self.products.recipe.block(WEIGHT)

    @property
    def scales(self) -> tuple[int, ...]:
        """The shape of the tensor of the matrix's scales: [] or [row blocks, column blocks].

        [] stands for one scale per tensor.
        """
        if self.block is None:
            return ()
        rows, columns = self.block
        return (-(-self.r // rows), -(-self.k // columns))

    def rows(self, shard: Tensor) -> tuple[int, Tensor]:
        """Return (index of the first row, rows [n, k]) of the blocks with elements of this rank.

        Elements of other ranks are zeros.

        Args:
            shard: this rank's share of the flat buffer.
        """
        assert self.block is not None
        high = self.block[0]
        # Whole blocks, because a block has one scale: from the first block's first row to the last
        # block's last row.
        first = self.own.start // self.k // high * high
        last = min(-(-self.own.stop // self.k // high) * high, self.r)
        rows = shard.new_zeros(last - first, self.k)
        before = first * self.k
        rows.view(-1)[self.own.start - before : self.own.stop - before] = shard[self.mine]
        return first, rows

    def largest(self, shard: Tensor) -> Tensor:
        """Return the largest absolute value under each scale, a tensor of shape `scales`.

        Only elements on this rank count. The value is 0 for a scale under which the rank has no
        element.

        Args:
            shard: this rank's share of the flat buffer.
        """
        found = shard.new_zeros(self.scales, dtype=torch.float32)
        is_empty = self.own.start >= self.own.stop
        if is_empty:
            return found
        if self.block is None:
            return amax_of(shard[self.mine])
        first, rows = self.rows(shard)
        amaxes = amaxes_of(filled(rows, self.block), self.block)
        found[first // self.block[0] :][: len(amaxes)] = amaxes
        return found

    def cast(self, shard: Tensor, amaxes: Tensor) -> tuple[Tensor, Tensor]:
        """Return (this rank's part in 8 bits, the scaling factors of the full matrix).

        Args:
            shard: this rank's share of the flat buffer.
            amaxes: the largest absolute values of the full matrix, a tensor of shape `scales`.
        """
        if self.block is None:
            expected = self.products.expected(amaxes, WEIGHT)
            margin = self.products.recipe.margin
            # As one row: with one scale for all elements their shape does not matter.
            quantised = of_whole(shard[None, self.mine], self.dtype, expected, margin)
            return quantised.values[0], quantised.factors
        factors = factors_of(amaxes, self.dtype)
        if self.own.start == self.own.stop:
            return shard.new_empty(0, dtype=self.dtype), factors
        first, rows = self.rows(shard)
        blocks = filled(rows, self.block)
        high = self.block[0]
        # Only the scales of the blocks that this rank has a part of.
        above = first // high
        amaxes = amaxes[above : above + len(blocks) // high]
        cast = cast_blocks(blocks, self.dtype, self.block, amaxes)
        # Without the padding to full blocks.
        flat = cast[: len(rows), : self.k].reshape(-1)
        before = first * self.k
        return flat[self.own.start - before : self.own.stop - before], factors

    def give(self, flat: Tensor, factors: Tensor, amaxes: Tensor) -> None:
        """Give the quantised matrix to the products, which then use it instead of the weight.

        Args:
            flat: the whole flat buffer in 8 bits, gathered from all shares, as bytes.
            factors: the matrix's scaling factors.
            amaxes: the matrix's largest absolute values, from which the factors follow.
        """
        end = self.start + self.r * self.k
        values = flat[self.start : end].view(self.dtype).view(self.r, self.k)
        if self.block is not None:
            # Padding is copied as bytes: torch has few operations on 8-bit floats.
            values = filled(values.view(torch.uint8), self.block).view(self.dtype)
        quantised = Quantised(values, factors, self.r, self.block)
        self.products.given[self.number] = quantised, amaxes


class InEightBits(FlatBuffers):
    """FlatBuffers under ZeRO-1 whose weights are gathered in 8 bits for use in passes.

    Args:
        products: {name of a weight: the module that multiplies by it in FP8}.
        params: {name: parameter}.
        borrowed: names of parameters that use another parameter's memory.
        live: counts the bytes that are allocated and released within a step.
        given: the other arguments of FlatBuffers.
    """

    def __init__(
        self,
        params: Mapping[str, nn.Parameter],
        borrowed: Collection[str] = (),
        *,
        products: Mapping[str, Scaled],
        live: Gauge,
        **given: Any,
    ) -> None:
        super().__init__(params, borrowed, drops=True, live=live, **given)
        self._params = params
        self._matrices: list[_Matrix] = []
        for name in self.own:
            self._matrices += self._matrices_of(name, products[name])
        self._bytes = Passing(torch.empty_like(self.model, dtype=torch.uint8), live)
        self._bytes.release()
        # What a parameter is without `model`: a NaN for each matrix, expanded to the parameter's
        # shape. Code that reads it by mistake sees NaN.
        self._shapes = {}
        for name in self.own:
            _, shape = self._where[name]
            numbers = self.model.new_full(shape[:-2], torch.nan)
            self._shapes[name] = numbers[..., None, None].expand(shape)

    def _matrices_of(self, name: str, products: Scaled) -> Iterator[_Matrix]:
        """Yield the matrices of a parameter [..., r, k], such as one for each expert.

        Args:
            name: name of the parameter.
            products: the module that multiplies by the parameter in FP8.
        """
        first, shape = self._where[name]
        r, k = shape[-2:]
        for number, start in enumerate(range(first, first + shape.numel(), r * k)):
            mine = self.within(start, start + r * k)
            offset = self.share.start - start
            own = slice(mine.start + offset, mine.stop + offset)
            yield _Matrix(products, number, start, r, k, own, mine)

    def start_gather(self) -> Callable[[], None]:
        """Quantise this rank's share and start to gather the 8-bit weights for passes.

        Returns: a function that waits for the weights.
        """
        if not self._bytes.there:
            self._bytes.allocate()
        largest = torch.cat([matrix.largest(self.shard).view(-1) for matrix in self._matrices])
        sizes = [prod(matrix.scales) for matrix in self._matrices]
        # One all-reduce for all matrices, whose scales are small tensors.
        parts = torch.split(self.shares.all_reduce(largest, "max"), sizes)
        # Quantised in place, where the gathering reads this rank's part.
        own = self._bytes.flat[self.share]
        given = list[tuple[Tensor, Tensor]]()
        for matrix, part in zip(self._matrices, parts, strict=True):
            amaxes = part.view(matrix.scales)
            cast, factors = matrix.cast(self.shard, amaxes)
            own[matrix.mine] = cast.view(torch.uint8)
            given.append((factors, amaxes))
        fill = start_filling(self._bytes.flat, separate(own), self.shares)

        def finish() -> None:
            fill()
            for matrix, (factors, amaxes) in zip(self._matrices, given, strict=True):
                matrix.give(self._bytes.flat, factors, amaxes)

        return finish

    def drop(self) -> None:
        """Release the 8-bit weights."""
        self._bytes.release()

    def start_whole(self) -> Callable[[], None]:
        """Start to gather the weights in their own type, for code that reads or writes them.

        Returns: a function that waits for the weights.
        """
        fill = super().start_gather()

        def finish() -> None:
            fill()
            for name in self.own:
                self._params[name].data = self.view(self.model, name)

        return finish

    def end_whole(self) -> None:
        """Keep this rank's share of the weights' new values, and release the gathered weights."""
        super().end_whole()
        super().drop()
        for name, shape in self._shapes.items():
            self._params[name].data = shape


class ShardedInEightBits(InEightBits, ShardedBuffers):
    """Buffers with weights gathered in 8 bits, whose full gradients exist only within a step."""
