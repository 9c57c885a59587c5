"""Products of what is quantised: Q(a) Q(b)^T in float32, once for the output, the input's and the weight's gradient.

On a GPU torch's scaled product multiplies the eight bits themselves where a tensor has one scale. Everywhere else the
values are multiplied as float32, or in bfloat16 where that holds them exactly: the same numbers, to the order of sums.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megapipe.tensor_parallel.fp8.quantise import Quantised, amax_of, in_blocks, of_whole
from megapipe.tensor_parallel.products import PLAIN, Products, linear

INPUT, WEIGHT, GRADIENT = range(3)
_STEP = 16
"""Elements of a row that a GPU's product takes at once."""


class Recipe(NamedTuple):
    """A way to quantise operands, by Megatron-LM's names.

    Attributes:
        format: e4m3 for all, or hybrid: e5m2 for gradients.
        kind: one scale for a tensor, by its own amax (tensorwise) or by those of earlier steps (delayed); or blocks.
        weight_grads: quantise for the weight's gradient too.
        margin, history, algorithm: of delayed.
    """

    format: Literal["e4m3", "hybrid"]
    kind: Literal["delayed", "tensorwise", "blockwise", "mxfp8"]
    weight_grads: bool = True
    margin: int = 0
    history: int = 1
    algorithm: Literal["most_recent", "max"] = "most_recent"

    def dtype(self, role: int) -> torch.dtype:
        return torch.float8_e5m2 if role == GRADIENT and self.format == "hybrid" else torch.float8_e4m3fn

    def block(self, role: int) -> tuple[int, int] | None:
        """Rows and columns, the latter along the sum of a product."""
        if self.kind == "mxfp8":
            return 1, 32
        return ((128 if role == WEIGHT else 1), 128) if self.kind == "blockwise" else None


def products_of(recipe: Recipe | None) -> Products:
    """The products of a layer: of the operands themselves without a recipe."""
    if recipe is None:
        return PLAIN
    return Delayed(recipe) if recipe.kind == "delayed" else Scaled(recipe)


class Scaled(Products, nn.Module):
    """Products of quantised operands, each quantised along the sum that it is in.

    Attributes:
        weights: what is quantised of weights, while they stay as they are: see `keeping`. Else it is made each time.
            By a weight's place in its storage, which stays while the memory goes and comes, and: transposed?
        given: weights that came in eight bits, with their largest values, by place. Then all do, and what is given as a
            weight has its shape alone: see optim.sharded.eight_bits.
    """

    weights: dict[tuple[int, bool], Quantised] | None

    def __init__(self, recipe: Recipe) -> None:
        super().__init__()
        self.recipe, self.weights = recipe, None
        self.given: dict[int, tuple[Quantised, Tensor]] = {}

    def keeping(self, on: bool) -> None:
        """Quantise each weight once from now on: none may change before this is said again. Or each time again."""
        self.weights = {} if on else None

    @property
    def by_rows(self) -> bool:  # type: ignore[override]
        """Is a scale of a row's own?"""
        return self.recipe.block(INPUT) is not None

    def forward(self, x: Tensor, weight: Tensor, bias: Tensor | None = None, *, out: Tensor | None = None) -> Tensor:
        a, b = self.quantised(_rows(x), INPUT), self._weight(weight)
        # Its sums are of one product: fewer bits of them do, as in Transformer Engine.
        y = multiply(a, b, x.dtype, bias, fast=True).view(*x.shape[:-1], -1)
        return y if out is None else out.copy_(y)

    def input_grad(self, dy: Tensor, weight: Tensor, *, out: Tensor | None = None) -> Tensor:
        a, b = self.quantised(_rows(dy), GRADIENT), self._weight(weight, transposed=True)
        dx = multiply(a, b, dy.dtype).view(*dy.shape[:-1], -1)
        return dx if out is None else out.copy_(dx)

    def weight_grad(self, dy: Tensor, x: Tensor) -> Tensor:
        """The product in float32."""
        if not self.recipe.weight_grads:
            return super().weight_grad(dy, x)
        return multiply(self.quantised(dy.t(), GRADIENT), self.quantised(x.t(), INPUT), torch.float32)

    def add_weight_grad(self, main_grad: Tensor, dy: Tensor, x: Tensor) -> None:
        if self.recipe.weight_grads:
            main_grad.add_(self.weight_grad(dy, x))
        else:
            super().add_weight_grad(main_grad, dy, x)

    def _weight(self, weight: Tensor, *, transposed: bool = False) -> Quantised:
        place = int(weight.storage_offset()), transposed
        if self.weights is None:
            return self._quantised_weight(weight, *place)
        if place not in self.weights:
            found = self._quantised_weight(weight, *place)
            # As a product reads it on a GPU, row by row.
            self.weights[place] = found._replace(values=found.values.contiguous())
        return self.weights[place]

    def _quantised_weight(self, weight: Tensor, place: int, transposed: bool) -> Quantised:
        if not self.given:
            return self.quantised(weight.t() if transposed else weight, WEIGHT)
        found, amax = self.given[place]
        self.seeing(amax, WEIGHT)
        return found.transposed(weight.shape[1]) if transposed else found

    def quantised(self, x: Tensor, role: int) -> Quantised:
        """x [r, k] for a sum over k."""
        recipe, block = self.recipe, self.recipe.block(role)
        if block is not None:
            return in_blocks(x, recipe.dtype(role), block)
        self.seeing(now := amax_of(x), role)
        return of_whole(x, recipe.dtype(role), self.expected(now, role), recipe.margin)

    def seeing(self, amax: Tensor, role: int) -> None:
        """A tensor with this largest value is multiplied."""

    def expected(self, amax: Tensor, role: int) -> Tensor:
        """The value that the scale of a tensor with this largest one follows from."""
        return amax


class Delayed(Scaled):
    """Scales by the largest values of earlier steps.

    They stay what they are during a step: every microbatch, under every schedule and in every recomputation, sees the
    same; and as all ranks with this layer share them, so does every layout. A tensor of which no step has told yet is
    scaled by its own.

    Attributes:
        amax_history: [3, steps], of input, weight and gradient, the latest step first.
        seen: [3], of the step that runs.
    """

    amax_history: Tensor

    def __init__(self, recipe: Recipe) -> None:
        super().__init__(recipe)
        self.register_buffer("amax_history", torch.zeros(3, recipe.history))
        self.seen = torch.zeros(3)  # no buffer: until the step is over it differs from rank to rank

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Delayed:
        kept = self.amax_history
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        device = self.amax_history.device
        self.amax_history, self.seen = kept.to(device), self.seen.to(device)  # never to another type
        return self

    def seeing(self, amax: Tensor, role: int) -> None:
        torch.maximum(self.seen[role], amax, out=self.seen[role])

    def expected(self, amax: Tensor, role: int) -> Tensor:
        of_steps = self.amax_history[role]
        known = of_steps.amax() if self.recipe.algorithm == "max" else of_steps[0]
        return torch.where((known > 0) & amax.isfinite(), known, amax)

    def keeping(self, on: bool) -> None:
        """Also the largest values of a step are those from now on."""
        super().keeping(on)
        if on:
            self.seen.zero_()

    def after(self, seen: Tensor) -> Tensor:
        """The history after a step. seen: [3], of all ranks."""
        return torch.cat((seen[:, None], self.amax_history[:, :-1]), 1)


def multiply(
    a: Quantised, b: Quantised, dtype: torch.dtype, bias: Tensor | None = None, *, fast: bool = False
) -> Tensor:
    """a b^T + bias, with a [r, k] and b [c, k] -> [r, c] of dtype.

    fast: a GPU may add up in fewer bits.
    """
    if a.values.is_cuda and a.block is None:
        return _on_gpu(a, b, dtype, bias, fast)
    if a.block is None:
        product = linear(a.values.float(), b.values.float()) * (a.factors * b.factors)
    elif a.values.is_cuda and dtype == torch.bfloat16:
        product = linear(a.plain(dtype), b.plain(dtype))
    else:
        product = linear(a.plain(), b.plain())
    return (product if bias is None else product + bias).to(dtype)


def _on_gpu(a: Quantised, b: Quantised, dtype: torch.dtype, bias: Tensor | None, fast: bool) -> Tensor:
    """The first row by row and the second's rows as columns; no GPU has run this yet."""
    left, right = (_whole_steps(x.values) for x in (a, b))
    within = bias if bias is None or bias.dtype == dtype != torch.float32 else None
    product = torch._scaled_mm(
        left,
        right.t(),
        scale_a=a.factors,
        scale_b=b.factors,
        bias=within,
        out_dtype=dtype,
        use_fast_accum=fast,
    )
    return product if bias is None or within is not None else (product + bias).to(dtype)


def _whole_steps(values: Tensor) -> Tensor:
    """Row by row, of as many columns as a GPU takes: those that are missing are zeros, which add nothing."""
    missing = -values.shape[1] % _STEP
    if not missing:
        return values.contiguous()
    return F.pad(values.view(torch.uint8), (0, missing)).view(values.dtype).contiguous()


def _rows(x: Tensor) -> Tensor:
    return x.reshape(-1, x.shape[-1])
