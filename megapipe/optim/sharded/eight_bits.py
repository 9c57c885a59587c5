"""Flat buffers of weights that passes have in eight bits (--fp8-param-gather).

    shard    this rank's share in the weights' own type, which the update writes
    bytes    all of them quantised, between a gathering and the next update
    model    all of them in their own type, only while somebody beside the passes reads or writes them; between, a
             parameter is its shape alone

A share ends within a matrix, so its ranks first agree on every scale: each takes the largest values of its parts, one
all-reduce makes them those of whole tensors or blocks, and each rank quantises its own share. These are the bits of the
whole weight quantised, whatever the number of ranks.
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
from megapipe.optim.sharded.passing import Passing, apart, start_filling
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
    """A weight [r, k] of one product, r * k elements from `start` of a flat buffer on.

    Attributes:
        number: among those of its parameter.
        own: this rank's elements of it, counted from its first one; mine: the same in this rank's share.
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
        return self.products.recipe.dtype(WEIGHT)

    @property
    def block(self) -> tuple[int, int] | None:
        return self.products.recipe.block(WEIGHT)

    @property
    def scales(self) -> tuple[int, ...]:
        """The shape of its largest values."""
        return () if self.block is None else (-(-self.r // self.block[0]), -(-self.k // self.block[1]))

    def rows(self, shard: Tensor) -> tuple[int, Tensor]:
        """The first row and all rows of the blocks that this rank has a part of, zeros where the part ends."""
        assert self.block is not None
        high = self.block[0]
        first = self.own.start // self.k // high * high
        last = min(-(-self.own.stop // self.k // high) * high, self.r)
        rows = shard.new_zeros(last - first, self.k)
        rows.view(-1)[self.own.start - first * self.k : self.own.stop - first * self.k] = shard[self.mine]
        return first, rows

    def largest(self, shard: Tensor) -> Tensor:
        """The largest values of this rank's part, 0 where it has none."""
        found = shard.new_zeros(self.scales, dtype=torch.float32)
        if self.block is None:
            return amax_of(shard[self.mine]) if self.own.start < self.own.stop else found
        if self.own.start < self.own.stop:
            first, rows = self.rows(shard)
            amaxes = amaxes_of(filled(rows, self.block), self.block)
            found[first // self.block[0] :][: len(amaxes)] = amaxes
        return found

    def cast(self, shard: Tensor, amaxes: Tensor) -> tuple[Tensor, Tensor]:
        """This rank's part in eight bits, and the factors of all."""
        if self.block is None:
            expected = self.products.expected(amaxes, WEIGHT)
            whole = of_whole(shard[None, self.mine], self.dtype, expected, self.products.recipe.margin)
            return whole.values[0], whole.factors
        factors = factors_of(amaxes, self.dtype)
        if self.own.start == self.own.stop:
            return shard.new_empty(0, dtype=self.dtype), factors
        first, rows = self.rows(shard)
        whole_blocks = filled(rows, self.block)
        above = first // self.block[0]
        amaxes = amaxes[above : above + len(whole_blocks) // self.block[0]]
        cast = cast_blocks(whole_blocks, self.dtype, self.block, amaxes)[: len(rows), : self.k].reshape(-1)
        return cast[self.own.start - first * self.k : self.own.stop - first * self.k], factors

    def give(self, flat: Tensor, factors: Tensor, amaxes: Tensor) -> None:
        """The products have it in eight bits from now on. flat: the bytes of all shares."""
        values = flat[self.start : self.start + self.r * self.k].view(self.dtype).view(self.r, self.k)
        if self.block is not None:
            values = filled(values.view(torch.uint8), self.block).view(self.dtype)
        self.products.given[self.number] = Quantised(values, factors, self.r, self.block), amaxes


class InEightBits(FlatBuffers):
    """FlatBuffers under ZeRO-1 whose weights passes have in eight bits; other arguments as there.

    Args:
        products: of each weight.
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
        self._matrices = [matrix for name in self.own for matrix in self._matrices_of(name, products[name])]
        self._bytes = Passing(torch.empty_like(self.model, dtype=torch.uint8), live)
        self._bytes.go()
        # Parameters outside of `whole`: their shape, and a place for each matrix. Who reads them gets no number.
        numbers = {name: self.model.new_full(self._where[name][1][:-2], torch.nan) for name in self.own}
        self._shapes = {name: x[..., None, None].expand(self._where[name][1]) for name, x in numbers.items()}

    def _matrices_of(self, name: str, products: Scaled) -> Iterator[_Matrix]:
        first, shape = self._where[name]
        r, k = shape[-2:]
        for number, start in enumerate(range(first, first + shape.numel(), r * k)):
            mine = self.within(start, start + r * k)
            own = slice(mine.start + self.share.start - start, mine.stop + self.share.start - start)
            yield _Matrix(products, number, start, r, k, own, mine)

    def start_gather(self) -> Callable[[], None]:
        if not self._bytes.there:
            self._bytes.come()
        largest = torch.cat([matrix.largest(self.shard).view(-1) for matrix in self._matrices])
        parts = torch.split(self.shares.all_reduce(largest, "max"), [prod(matrix.scales) for matrix in self._matrices])
        mine = self._bytes.flat[self.share]
        given = list[tuple[Tensor, Tensor]]()
        for matrix, part in zip(self._matrices, parts, strict=True):
            amaxes = part.view(matrix.scales)
            cast, factors = matrix.cast(self.shard, amaxes)
            mine[matrix.mine] = cast.view(torch.uint8)
            given.append((factors, amaxes))
        fill = start_filling(self._bytes.flat, apart(mine), self.shares)

        def finish() -> None:
            fill()
            for matrix, found in zip(self._matrices, given, strict=True):
                matrix.give(self._bytes.flat, *found)

        return finish

    def drop(self) -> None:
        self._bytes.go()

    def start_whole(self) -> Callable[[], None]:
        fill = super().start_gather()

        def finish() -> None:
            fill()
            for name in self.own:
                self._params[name].data = self.view(self.model, name)

        return finish

    def end_whole(self) -> None:
        super().end_whole()
        super().drop()
        for name, shape in self._shapes.items():
            self._params[name].data = shape


class ShardedInEightBits(InEightBits, ShardedBuffers):
    """Such weights, whose gradients come and go."""
