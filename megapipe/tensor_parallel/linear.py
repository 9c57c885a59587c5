"""Linear layers split over tensor-parallel ranks (Shoeybi et al. 2019, section 3).

Column-parallel: each rank computes its slice of the output. Row-parallel: each rank takes its
slice of the input, and the partial outputs are summed. Weight gradients are added directly into the
weight's `main_grad`, and can be deferred to a W pass.

Megatron-LM's `input_is_parallel` and `skip_bias_add` do not exist: a row-parallel layer's input is
always the slice that a column-parallel layer computed, and the product adds the bias. Shapes: s
tokens, t tensor-parallel ranks, `in` and `out` features of the layer before it is split.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from megapipe.distributed.axis import Axis, Pending
from megapipe.distributed.layout import Layout, parameter
from megapipe.tensor_parallel.collectives import INSIDE, Edge, closing, opening
from megapipe.tensor_parallel.eager import eager
from megapipe.tensor_parallel.fp8.products import FP8Recipe, products_of
from megapipe.tensor_parallel.products import Products
from megapipe.tensor_parallel.weight_grad import (
    InTwo,
    WeightGrads,
    accumulate_weight_grad,
    current_weight_grads,
)


class _Linear(torch.autograd.Function):
    """closes(opens(x) W^T + b), where opens and closes are the collectives at the region's edges.

    Under sequence parallelism, x and (until the W pass) the output's gradient are saved before
    their all-gathers, where they have 1/t of the size. Each is gathered again when it is used. The
    cost for each microbatch is one more all-gather of a column-parallel layer and, under a B/W
    split, one of a row-parallel layer.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        opens: Edge,
        closes: Edge,
        products: Products,
    ) -> Tensor:
        ctx.save_for_backward(x, weight)
        # Hooks on saved tensors may return the weight as a new object, without main_grad.
        ctx.weight = weight
        ctx.bias = bias
        ctx.opens = opens
        ctx.closes = closes
        ctx.products = products
        ctx.weight_grads = current_weight_grads()
        # The product adds the bias at no cost. Of the ranks' summands, one includes it.
        if not closes.first:
            bias = None
        multiply = partial(products.forward, weight=weight, bias=bias)
        width = len(weight)
        if opens.pieces is not None:
            return opens.pieces.gathered(x, multiply, width)[0]
        if closes.pieces is not None:
            return closes.pieces.summed(x, multiply, width)
        return closes.forward(multiply(opens.forward(x).wait())).wait()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        opens: Edge = ctx.opens
        closes: Edge = ctx.closes
        products: Products = ctx.products
        owner: WeightGrads | None = ctx.weight_grads
        needs_x, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        # In a B pass: the main_grad that the W pass will add to.
        owed: Tensor | None = None
        # Without a main_grad autograd expects the gradient as this call's result, so W cannot add
        # it.
        if needs_weight and owner is not None and owner.is_deferring:
            owed = getattr(ctx.weight, "main_grad", None)
        gathered = None
        if needs_weight and owed is None:
            gathered = opens.forward(x)  # arrives during the next product
        multiply = partial(products.input_grad, weight=weight)
        width = weight.shape[1]
        # 1. The gradient of x. Collectives overlap with products: in pieces, or with step 3.
        grad_x: Pending | None = None
        if needs_x and closes.pieces is not None:
            made, dy = closes.pieces.gathered(grad, multiply, width)
            grad_x = Pending(made)
        elif needs_x and owed is not None and opens.pieces is not None:
            # The W pass gathers dy itself, so this branch has no other use of it.
            dy = grad
            grad_x = Pending(opens.pieces.summed(grad, multiply, width))
        else:
            dy = closes.backward(grad).wait()
            # Waited for only at the end: the weight's product of step 3 runs meanwhile.
            if needs_x:
                grad_x = opens.backward(multiply(dy))
        # 2. The gradient of the bias.
        # Of `grad` as it arrived. After a row-parallel layer under sequence parallelism these are
        # this rank's tokens only; the bias's Layout has sum_over_tp.
        grad_bias = bias_grad(ctx.bias, grad) if needs_bias else None
        # 3. The gradient of the weight, now or in the W pass.
        grad_weight = None
        if owed is not None:
            assert owner is not None
            # Until W the lambda holds both tensors as they were before their collectives. Gathered,
            # they would be t times as large.
            into = owed
            owner.submit(
                InTwo(lambda: _weight_pass(products, into, closes.backward(grad), opens.forward(x)))
            )
        elif gathered is not None:
            grad_weight = accumulate_weight_grad(ctx.weight, dy, gathered.wait(), owner, products)
        reduced = None if grad_x is None else grad_x.wait()
        return reduced, grad_weight, grad_bias, None, None, None


# A compiler would lose the side effects of backward: main_grad and W passes.
_linear: Callable[..., Tensor] = eager(_Linear.apply)


def _weight_pass(
    products: Products, main_grad: Tensor, grad: Pending, x: Pending
) -> Callable[[], None]:
    """Return a function that waits for both tensors, and adds grad^T x into main_grad.

    Args:
        products: multiplies, quantised or not. main_grad: [out, in].
        grad: the output's gradient [..., out], pending. x: the input [..., in], pending.
    """

    def multiply() -> None:
        dy = grad.wait()
        rows = x.wait()
        products.add_weight_grad(
            main_grad, dy.reshape(-1, dy.shape[-1]), rows.reshape(-1, rows.shape[-1])
        )

    return multiply


def bias_grad(bias: Tensor, grad: Tensor) -> Tensor | None:
    """Add a bias's gradient into its main_grad.

    Args:
        bias: [n].
        grad: [..., n], the gradient of the layer's output.
    Returns: None; if the bias has no main_grad, the gradient for autograd.
    """
    rows = grad.reshape(-1, grad.shape[-1])
    main_grad: Tensor | None = getattr(bias, "main_grad", None)
    if main_grad is None:
        return rows.sum(0)
    if rows.is_cuda:
        main_grad.add_(rows.sum(0, dtype=main_grad.dtype))
        return None
    # A CPU would copy the rows to float32 first. Its bf16 sum is float32 inside and rounded once,
    # as in add_product.
    main_grad.add_(rows.sum(0))
    return None


class ColumnParallelLinear(nn.Module):
    """A linear layer whose output is split over tp: weight [out/t, in], bias [out/t].

    Args:
        input_size, output_size: channels of the layer before it is split; output_size must be a
            multiple of blocks x tp.
        sequence_parallel: the input has this rank's tokens only.
        blocks: number of equal parts of the output, each split over tp separately (2 for the gate
            and up projections of SwiGLU).
        init_std: standard deviation of the initial weight; None for a uniform distribution.
        tied_to: global name of the parameter that this weight repeats, or None.
        fp8: how operands are quantised; None for no quantisation.
        in_pieces: compute the product in pieces of its rows, which overlap with communication. No
            effect with one tp rank, or if FP8 has one factor for all rows.
    """

    def __init__(
        self,
        input_size: int,
        output_size: int,
        *,
        tp: Axis,
        bias: bool,
        sequence_parallel: bool = False,
        blocks: int = 1,
        init_std: float | None = 0.02,
        tied_to: str | None = None,
        fp8: FP8Recipe | None = None,
        in_pieces: bool = False,
    ) -> None:
        super().__init__()
        self.products = products_of(fp8)
        assert output_size % (blocks * tp.size) == 0, (
            f"{output_size} outputs are not divisible by {blocks} blocks x {tp.size} ranks"
        )
        self._opens = opening(tp, sequence_parallel, in_pieces and self.products.by_rows)
        rows = output_size // tp.size
        # Checkpoints have this shape: with blocks, tp splits the dimension within a block.
        shape: tuple[int, ...] = (output_size,)
        if blocks > 1:
            # Cut as one dimension, the first of two ranks would get the gate alone, and the second
            # one the up projection.
            shape = (blocks, output_size // blocks)
        dim = len(shape) - 1
        layout = Layout((*shape, input_size), dim, tied_to, std=init_std)
        self.weight = parameter(layout, rows, input_size)
        self.bias = None
        if bias:
            self.bias = parameter(Layout(shape, dim), rows)

    def forward(self, x: Tensor) -> Tensor:
        """Apply the layer.

        Args:
            x: [s, ..., in], the same on all tp ranks; under sequence parallelism [s/t, ..., in].
        Returns: [s, ..., out/t].
        """
        return _linear(x, self.weight, self.bias, self._opens, INSIDE, self.products)


class RowParallelLinear(nn.Module):
    """A linear layer whose input is split over tp: weight [out, in/t], bias [out].

    Args:
        input_size, output_size: channels of the layer before it is split; input_size must be a
            multiple of tp.
        sequence_parallel: the output has this rank's tokens only.
        init_std: standard deviation of the initial weight; None for a uniform distribution.
        fp8: how operands are quantised; None for no quantisation.
        in_pieces: as in ColumnParallelLinear.
    """

    def __init__(
        self,
        input_size: int,
        output_size: int,
        *,
        tp: Axis,
        bias: bool,
        sequence_parallel: bool = False,
        init_std: float | None = 0.02,
        fp8: FP8Recipe | None = None,
        in_pieces: bool = False,
    ) -> None:
        super().__init__()
        self.products = products_of(fp8)
        assert input_size % tp.size == 0, f"{input_size} inputs not divisible by {tp.size} ranks"
        self._closes = closing(tp, sequence_parallel, in_pieces and self.products.by_rows)
        layout = Layout((output_size, input_size), 1, std=init_std)
        self.weight = parameter(layout, output_size, input_size // tp.size)
        self.bias = None
        if bias:
            # Under sequence parallelism each rank sees the gradient of its own tokens only.
            self.bias = parameter(Layout((output_size,), sum_over_tp=sequence_parallel))

    def forward(self, x: Tensor) -> Tensor:
        """Apply the layer, and sum the outputs of the tp ranks.

        Args:
            x: [s, ..., in/t].
        Returns: [s, ..., out], equal on all tp ranks; [s/t, ..., out] under sequence parallelism.
        """
        return _linear(x, self.weight, self.bias, INSIDE, self._closes, self.products)
