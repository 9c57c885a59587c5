"""Linear layers split over tensor-parallel ranks (Shoeybi et al. 2019, section 3).

Column: each rank computes its slice of the output. Row: each rank takes its slice of the input and the partial outputs
are summed. Weight gradients go straight into the weight's `main_grad` and can be put off to a W pass.

A row layer's input is always the slice that a column layer made, and its bias is added in its product, so there is no
`input_is_parallel` and no `skip_bias_add`.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from megapipe.distributed.axis import Axis, Pending
from megapipe.distributed.layout import Layout, set_layout
from megapipe.tensor_parallel.collectives import INSIDE, Edge, closing, opening
from megapipe.tensor_parallel.eager import eager
from megapipe.tensor_parallel.fp8.products import Recipe, products_of
from megapipe.tensor_parallel.products import Products
from megapipe.tensor_parallel.weight_grad import InTwo, accumulate_weight_grad, current_weight_grads


class _Linear(torch.autograd.Function):
    """closes(opens(x) W^T + b), b in one of the summands.

    Kept for backward is what lies outside of the edges, the smaller side: under sequence parallelism x before its
    all-gather and, until the W pass, the output's gradient before its own. Each is gathered again when it is used: one
    all-gather more per layer and microbatch, two under a B/W split, for 1/t of the memory.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, opens: Edge, closes: Edge, products: Products
    ) -> Tensor:
        ctx.save_for_backward(x, weight)
        # A saved weight that went through autograd's hooks is another object, without main_grad.
        ctx.weight, ctx.bias, ctx.opens, ctx.closes, ctx.products = weight, bias, opens, closes, products
        ctx.weight_grads = current_weight_grads()
        # A product adds a bias at no cost, which one of the summands then brings along.
        multiply, width = partial(products.forward, weight=weight, bias=bias if closes.first else None), len(weight)
        if opens.pieces is not None:
            return opens.pieces.gathered(x, multiply, width)[0]
        if closes.pieces is not None:
            return closes.pieces.summed(x, multiply, width)
        return closes.forward(multiply(opens.forward(x).wait())).wait()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (x, weight), opens, closes, owner = ctx.saved_tensors, ctx.opens, ctx.closes, ctx.weight_grads
        products: Products = ctx.products
        needs_x, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        deferring = owner is not None and owner.is_deferring
        owed: Tensor | None = getattr(ctx.weight, "main_grad", None) if needs_weight and deferring else None
        whole = opens.forward(x) if needs_weight and owed is None else None  # arrives during the next product
        multiply, width = partial(products.input_grad, weight=weight), weight.shape[1]
        if needs_x and closes.pieces is not None:
            made, dy = closes.pieces.gathered(grad, multiply, width)
            grad_x: Pending | None = Pending(made)
        elif needs_x and owed is not None and opens.pieces is not None:
            dy, grad_x = grad, Pending(opens.pieces.summed(grad, multiply, width))
        else:
            dy = closes.backward(grad).wait()
            # It is summed during the products below.
            grad_x = opens.backward(multiply(dy)) if needs_x else None
        grad_weight = grad_bias = None
        if needs_bias:
            grad_bias = bias_grad(ctx.bias, grad)
        if owed is not None:
            owner.submit(InTwo(lambda: _weight_pass(products, owed, closes.backward(grad), opens.forward(x))))
        elif whole is not None:
            grad_weight = accumulate_weight_grad(ctx.weight, dy, whole.wait(), owner, products)
        return None if grad_x is None else grad_x.wait(), grad_weight, grad_bias, None, None, None


# A compiler would lose what backward does beside its result: main_grad, W passes.
_linear: Callable[..., Tensor] = eager(_Linear.apply)


def _weight_pass(products: Products, main_grad: Tensor, grad: Pending, x: Pending) -> Callable[[], None]:
    def multiply() -> None:
        dy, whole = grad.wait(), x.wait()
        products.add_weight_grad(main_grad, dy.reshape(-1, dy.shape[-1]), whole.reshape(-1, whole.shape[-1]))

    return multiply


def bias_grad(bias: Tensor, grad: Tensor) -> Tensor | None:
    """The gradient of a bias [n] from that of what it was added to, [..., n]: into `main_grad` if it has one.

    Returns: the gradient for autograd if it has none, else None.
    """
    rows = grad.reshape(-1, grad.shape[-1])
    main_grad: Tensor | None = getattr(bias, "main_grad", None)
    if main_grad is None:
        return rows.sum(0)
    # A CPU would make a float32 copy first; its sum in bf16 is float32 inside and rounded once, as in add_product.
    main_grad.add_(rows.sum(0, dtype=main_grad.dtype) if rows.is_cuda else rows.sum(0))
    return None


class ColumnParallelLinear(nn.Module):
    """Output split over tp: weight [out/t, in], bias [out/t].

    Args:
        input_size, output_size: of the whole layer; output_size must divide by tp.
        sequence_parallel: the input is this rank's share of the sequence.
        blocks: the output is this many equal parts, each split over tp on its own (2 for gate and up of SwiGLU).
        init_std: standard deviation of the initial weight, as in Layout.
        fp8: how its products are quantised; None for those in the type of its operands.
        in_pieces: multiply while rows of other ranks travel, if the products allow it.
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
        fp8: Recipe | None = None,
        in_pieces: bool = False,
    ) -> None:
        super().__init__()
        self.products = products_of(fp8)
        assert output_size % (blocks * tp.size) == 0, f"{output_size} outputs do not divide over {tp.size} ranks"
        self._opens = opening(tp, sequence_parallel, in_pieces and self.products.by_rows)
        rows = output_size // tp.size
        shape = (output_size,) if blocks == 1 else (blocks, output_size // blocks)
        dim = len(shape) - 1
        self.weight = set_layout(
            nn.Parameter(torch.empty(rows, input_size)), Layout((*shape, input_size), dim, tied_to, std=init_std)
        )
        self.bias = set_layout(nn.Parameter(torch.empty(rows)), Layout(shape, dim)) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        """x [s, ..., in], the same on all tp ranks, or [s/t, ..., in] -> [s, ..., out/t]."""
        return _linear(x, self.weight, self.bias, self._opens, INSIDE, self.products)


class RowParallelLinear(nn.Module):
    """Input split over tp: weight [out, in/t], bias [out], added once after the sum.

    Args:
        input_size, output_size: of the whole layer; input_size must divide by tp.
        sequence_parallel: the output is this rank's share of the sequence.
        init_std: standard deviation of the initial weight, as in Layout.
        fp8: how its products are quantised; None for those in the type of its operands.
        in_pieces: multiply while rows of other ranks travel, if the products allow it.
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
        fp8: Recipe | None = None,
        in_pieces: bool = False,
    ) -> None:
        super().__init__()
        self.products = products_of(fp8)
        assert input_size % tp.size == 0, f"{input_size} inputs do not divide over {tp.size} ranks"
        self._closes = closing(tp, sequence_parallel, in_pieces and self.products.by_rows)
        self.weight = set_layout(
            nn.Parameter(torch.empty(output_size, input_size // tp.size)),
            Layout((output_size, input_size), 1, std=init_std),
        )
        self.bias = None
        if bias:
            layout = Layout((output_size,), sum_over_tp=sequence_parallel)
            self.bias = set_layout(nn.Parameter(torch.empty(output_size)), layout)

    def forward(self, x: Tensor) -> Tensor:
        """x [s, ..., in/t] -> [s, ..., out], the same on all tp ranks, or [s/t, ..., out]."""
        return _linear(x, self.weight, self.bias, INSIDE, self._closes, self.products)
