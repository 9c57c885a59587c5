"""Products of quantised operands, Q(a) Q(b)^T: the output and both gradients of a linear layer.

On a GPU, torch's scaled product multiplies FP8 values directly if each operand has one factor.
Everywhere else the values are multiplied in float32, or in bfloat16 where it holds them exactly.
The results differ only in the order of sums.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megapipe.tensor_parallel.fp8.quantise import Quantised, amax_of, in_blocks, of_whole
from megapipe.tensor_parallel.products import PLAIN, Products, linear

# The role of an operand; it decides type, block and history of an operand.
INPUT, WEIGHT, GRADIENT = range(3)
_STEP = 16
"""A GPU's FP8 product needs rows of a multiple of this many elements."""


class FP8Recipe(NamedTuple):
    """A way to quantise operands. `format`, `kind` and `algorithm` have Megatron-LM's values.

    `dtype` and `block` return an operand's FP8 type and the shape of its blocks.

    Attributes:
        format: e4m3 for all operands, or hybrid: e5m2 for gradients.
        kind: tensorwise: one factor by the tensor's largest absolute value. delayed: one factor by
            the largest values of earlier steps. blockwise, mxfp8: a factor for each block.
        weight_grads: also quantise the operands of the weight's gradient.
        margin: with one factor, room for values up to 2^margin times the largest one.
        history: for delayed, the number of steps that are remembered.
        algorithm: for delayed, use the largest value of the latest step, or of all in the history.
    """

    format: Literal["e4m3", "hybrid"]
    kind: Literal["delayed", "tensorwise", "blockwise", "mxfp8"]
    weight_grads: bool = True
    margin: int = 0
    history: int = 1
    algorithm: Literal["most_recent", "max"] = "most_recent"

    def dtype(self, role: int) -> torch.dtype:
        """Return the FP8 type of an operand. role: INPUT, WEIGHT or GRADIENT."""
        if role == GRADIENT and self.format == "hybrid":
            return torch.float8_e5m2
        return torch.float8_e4m3fn

    def block(self, role: int) -> tuple[int, int] | None:
        """Return the (rows, columns) of a block with one factor; None with a single factor for all.

        Columns run along the dimension that a product sums over. role: INPUT, WEIGHT or GRADIENT.
        """
        if self.kind == "mxfp8":
            return 1, 32
        if self.kind != "blockwise":
            return None
        # DeepSeek-V3, section 3.3: square blocks of weights, rows of 128 of everything else.
        return (128, 128) if role == WEIGHT else (1, 128)


def products_of(recipe: FP8Recipe | None) -> Products:
    """Return the products of a layer that quantises by this recipe; unquantised for None."""
    if recipe is None:
        return PLAIN
    if recipe.kind == "delayed":
        return Delayed(recipe)
    return Scaled(recipe)


class Scaled(Products, nn.Module):
    """Products of quantised operands. Blocks run along the dimension that a product sums over.

    A weight is identified by its offset in its storage. The offset stays the same when sharded
    weights are freed and gathered again.

    While `keeping` is on, each weight is quantised only once. `quantised` quantises an operand.
    `seeing` records an operand's largest value, and `expected` returns the value that decides its
    factor.

    Attributes:
        weights: quantised weights, by (offset, whether transposed), while `keeping` is on. None
            while it is off: weights are then quantised in every pass.
        given: {offset: a weight that was gathered in FP8, with its largest value}. If not empty, it
            has all weights of the layer, and only the shape of a weight argument is used.
    """

    weights: dict[tuple[int, bool], Quantised] | None

    def __init__(self, recipe: FP8Recipe) -> None:
        super().__init__()
        self.recipe = recipe
        self.weights = None
        self.given: dict[int, tuple[Quantised, Tensor]] = {}

    def keeping(self, on: bool) -> None:
        """Quantise each weight once from now on (True), or in every pass again (False).

        Call keeping(True) again after weights have changed.
        """
        self.weights = {} if on else None

    @property
    def by_rows(self) -> bool:  # type: ignore[override]
        """Whether a row's factors depend on this row only, so that rows can be quantised alone."""
        return self.recipe.block(INPUT) is not None

    def forward(
        self,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None = None,
        *,
        out: Tensor | None = None,
    ) -> Tensor:
        """Return Q(x) Q(W)^T + b, written to `out` if it is given; Q quantises.

        Args:
            x: [..., in]. weight: [out, in]. bias: [out] or None.
        Returns: [..., out].
        """
        a = self.quantised(_rows(x), INPUT)
        b = self._weight(weight)
        # The forward may sum in fewer bits, as in Transformer Engine; gradients may not.
        y = multiply(a, b, x.dtype, bias, fast=True).view(*x.shape[:-1], -1)
        return y if out is None else out.copy_(y)

    def input_grad(self, dy: Tensor, weight: Tensor, *, out: Tensor | None = None) -> Tensor:
        """Return Q(dy) Q(W), written to `out` unless that is None; Q quantises.

        Args:
            dy: [..., out], the output's gradient. weight: W, [out, in].
        Returns: [..., in].
        """
        a = self.quantised(_rows(dy), GRADIENT)
        b = self._weight(weight, transposed=True)
        dx = multiply(a, b, dy.dtype).view(*dy.shape[:-1], -1)
        return dx if out is None else out.copy_(dx)

    def weight_grad(self, dy: Tensor, x: Tensor) -> Tensor:
        """Return Q(dy)^T Q(x) in float32: dy [n, out] and x [n, in] -> [out, in].

        If the recipe leaves weight gradients alone, the result is dy^T x in their own type.
        """
        if not self.recipe.weight_grads:
            return super().weight_grad(dy, x)
        # This product sums over tokens. So blocks must lie along tokens, and both operands are
        # quantised once more, from their own type.
        a = self.quantised(dy.t(), GRADIENT)
        b = self.quantised(x.t(), INPUT)
        return multiply(a, b, torch.float32)

    def add_weight_grad(self, main_grad: Tensor, dy: Tensor, x: Tensor) -> None:
        """Add the result of `weight_grad`, for dy and x, to main_grad [out, in], in place."""
        if self.recipe.weight_grads:
            main_grad.add_(self.weight_grad(dy, x))
        else:
            super().add_weight_grad(main_grad, dy, x)

    def _weight(self, weight: Tensor, *, transposed: bool = False) -> Quantised:
        place = (int(weight.storage_offset()), transposed)
        if self.weights is None:
            return self._quantised_weight(weight, *place)
        if place not in self.weights:
            found = self._quantised_weight(weight, *place)
            # A GPU's product reads rows, so a kept weight is stored row by row.
            self.weights[place] = found._replace(values=found.values.contiguous())
        return self.weights[place]

    def _quantised_weight(self, weight: Tensor, place: int, transposed: bool) -> Quantised:
        if not self.given:
            if transposed:
                weight = weight.t()
            return self.quantised(weight, WEIGHT)
        found, amax = self.given[place]
        self.seeing(amax, WEIGHT)
        return found.transposed(weight.shape[1]) if transposed else found

    def quantised(self, x: Tensor, role: int) -> Quantised:
        """Return an operand x [r, k] of a product that sums over k, quantised.

        role: INPUT, WEIGHT or GRADIENT; it decides type and block.
        """
        dtype = self.recipe.dtype(role)
        block = self.recipe.block(role)
        if block is not None:
            return in_blocks(x, dtype, block)
        amax = amax_of(x)
        self.seeing(amax, role)
        return of_whole(x, dtype, self.expected(amax, role), self.recipe.margin)

    def seeing(self, amax: Tensor, role: int) -> None:
        """Record the largest absolute value amax of an operand. Does nothing but in `Delayed`.

        role: INPUT, WEIGHT or GRADIENT.
        """

    def expected(self, amax: Tensor, role: int) -> Tensor:
        """Return the largest absolute value from which the operand's factor is computed.

        Args:
            amax: the operand's own largest absolute value.
            role: INPUT, WEIGHT or GRADIENT.
        """
        return amax


class Delayed(Scaled):
    """Products whose factors follow from the largest values of earlier steps (delayed scaling).

    Factors do not change during a step. So every microbatch has the same factors, in any schedule
    and in recomputations. All ranks with this layer have the same factors, in every layout. Before
    the first step has ended, an operand is scaled by the largest value in it.

    `keeping(True)` starts a step, and `after` returns the history at its end.

    Attributes:
        amax_history: [3, steps], largest values of input, weight and gradient, latest step first.
        seen: [3], the largest values of the running step.
    """

    amax_history: Tensor

    def __init__(self, recipe: FP8Recipe) -> None:
        super().__init__(recipe)
        self.register_buffer("amax_history", torch.zeros(3, recipe.history))
        # Not a buffer: it differs between ranks until the step ends, so it is not saved.
        self.seen = torch.zeros(3)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Delayed:
        kept = self.amax_history
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        # Moved to another device, but never cast to another type.
        device = self.amax_history.device
        self.amax_history = kept.to(device)
        self.seen = self.seen.to(device)
        return self

    def seeing(self, amax: Tensor, role: int) -> None:
        """Record an operand's largest absolute value amax for the running step.

        role: INPUT, WEIGHT or GRADIENT.
        """
        # On the device: a Python number would make the CPU wait for the GPU at each operand.
        torch.maximum(self.seen[role], amax, out=self.seen[role])

    def expected(self, amax: Tensor, role: int) -> Tensor:
        """Return the largest value of earlier steps; amax itself if there is none yet.

        A NaN or infinite amax is returned as well, so that it reaches the result.

        Args:
            amax: the operand's own largest absolute value.
            role: INPUT, WEIGHT or GRADIENT.
        """
        history = self.amax_history[role]
        known = history.amax() if self.recipe.algorithm == "max" else history[0]
        return torch.where((known > 0) & amax.isfinite(), known, amax)

    def keeping(self, on: bool) -> None:
        """Quantise each weight once from now on (True), or in every pass again (False).

        True also starts a step: largest values are recorded anew.
        """
        super().keeping(on)
        if on:
            self.seen.zero_()

    def after(self, seen: Tensor) -> Tensor:
        """Return the history after a step, [3, steps].

        Args:
            seen: [3], the step's largest values over all ranks.
        """
        return torch.cat((seen[:, None], self.amax_history[:, :-1]), 1)


def multiply(
    a: Quantised,
    b: Quantised,
    dtype: torch.dtype,
    bias: Tensor | None = None,
    *,
    fast: bool = False,
) -> Tensor:
    """Return the product of two quantised matrices, a b^T + bias.

    Args:
        a: [r, k]. b: [c, k]. bias: [c] or None.
        dtype: the type of the result.
        fast: allow a GPU to sum in fewer bits.
    Returns: [r, c].
    """
    if a.values.is_cuda and a.block is None:
        return _on_gpu(a, b, dtype, bias, fast)
    if a.block is None:
        product = linear(a.values.float(), b.values.float()) * (a.factors * b.factors)
    elif a.values.is_cuda and dtype == torch.bfloat16:
        # Factors change along the sum, so they cannot be applied after it. bfloat16 holds an FP8
        # value times a power of two exactly.
        product = linear(a.plain(dtype), b.plain(dtype))
    else:
        product = linear(a.plain(), b.plain())
    if bias is not None:
        product = product + bias
    return product.to(dtype)


def _on_gpu(
    a: Quantised, b: Quantised, dtype: torch.dtype, bias: Tensor | None, fast: bool
) -> Tensor:
    """Return a b^T + bias by torch's scaled product, for the arguments of `multiply`.

    torch takes the left operand row by row and the right one column by column. `fast` allows sums
    in fewer bits. No GPU has run this yet.
    """
    left = _whole_steps(a.values)
    right = _whole_steps(b.values)
    # The kernel adds a bias of its own 16-bit result type only.
    within = None
    if bias is not None and bias.dtype == dtype != torch.float32:
        within = bias
    product = torch._scaled_mm(
        left,
        right.t(),
        scale_a=a.factors,
        scale_b=b.factors,
        bias=within,
        out_dtype=dtype,
        use_fast_accum=fast,
    )
    if bias is None or within is not None:
        return product
    return (product + bias).to(dtype)


def _whole_steps(values: Tensor) -> Tensor:
    """Return values [r, k] as contiguous rows, padded with zeros to multiples of _STEP columns."""
    missing = -values.shape[1] % _STEP
    if not missing:
        return values.contiguous()
    return F.pad(values.view(torch.uint8), (0, missing)).view(values.dtype).contiguous()


def _rows(x: Tensor) -> Tensor:
    return x.reshape(-1, x.shape[-1])
