"""The experts of a layer: two linear layers, whose weights are stacked over the experts.

Rows are sorted by expert, then by token. So each expert's rows are one matrix product, or all are
one grouped product where the device has it. A token's k outputs are added in the order of the
experts' numbers, so that the sum does not depend on the scores. Saved for backward are fc1's
output, and the layer's input or the rows received from other ranks. The rest is computed again.
Shapes: R rows, e experts on this rank.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megapipe.config import ModelConfig
from megapipe.distributed.axis import ALONE, Axis
from megapipe.distributed.layout import Layout, parameter
from megapipe.kernels.region import is_fused
from megapipe.models.activations import function_of
from megapipe.models.fused import swiglu
from megapipe.models.moe.dispatch import AllGatherDispatcher, AllToAllDispatcher, Dispatcher
from megapipe.models.moe.router import Routing
from megapipe.tensor_parallel.collectives import opening
from megapipe.tensor_parallel.fp8.products import FP8Recipe, products_of
from megapipe.tensor_parallel.products import PLAIN, Products
from megapipe.tensor_parallel.saving import saves
from megapipe.tensor_parallel.weight_grad import current_weight_grads, submit_weight_grad


def _grouped(x: Tensor, width: int, how: Products) -> bool:
    """Return whether torch's grouped product can multiply the rows of all experts in one call.

    Args:
        x: rows [R, in].
        width: number of columns of the result.
        how: computes the product of one expert, quantised or not.
    """
    fits = how is PLAIN and x.is_cuda and x.dtype == torch.bfloat16 and hasattr(F, "grouped_mm")
    return fits and x.shape[1] % 8 == width % 8 == 0  # strides of 16 bytes


def products(rows: Tensor, weight: Tensor, ends: Tensor, how: Products = PLAIN) -> Tensor:
    """Multiply each expert's rows with its matrix.

    Args:
        rows: [R, in], sorted by expert. weight: [e, out, in].
        ends: [e], one past the last row of each expert.
        how: computes the product of one expert, quantised or not.
    Returns: [R, out].
    """
    if _grouped(rows, weight.shape[1], how):
        return F.grouped_mm(rows, weight.mT, offs=ends.int())
    return _one_by_one(rows, weight, weight.shape[1], ends, how.forward)


def input_grads(grads: Tensor, weight: Tensor, ends: Tensor, how: Products) -> Tensor:
    """Return the gradient of the argument `rows` of `products`.

    Args:
        grads: [R, out], the gradient of the result of `products`.
        weight: [e, out, in]. ends: [e], one past the last row of each expert.
        how: computes the product of one expert, quantised or not.
    Returns: [R, in].
    """
    if _grouped(grads, weight.shape[2], how):
        return F.grouped_mm(grads, weight, offs=ends.int())
    return _one_by_one(grads, weight, weight.shape[2], ends, how.input_grad)


def _one_by_one(
    rows: Tensor,
    weight: Tensor,
    width: int,
    ends: Tensor,
    product: Callable[[Tensor, Tensor], Tensor],
) -> Tensor:
    """Multiply the rows of one expert after another, and return all results [R, width].

    Args:
        rows: [R, n], sorted by expert. weight: [e, ...], a matrix for each expert.
        ends: [e], one past the last row of each expert. An expert without rows is skipped.
        product: (an expert's rows, its matrix) -> its results.
    """
    # .tolist() waits for the device. A grouped product reads the ends there, and never waits.
    out = rows.new_empty(len(rows), width)
    start = 0
    for number, end in enumerate(ends.tolist()):
        if end > start:
            out[start:end] = product(rows[start:end], weight[number])
        start = end
    return out


def add_products(main_grad: Tensor, dy: Tensor, x: Tensor, ends: Tensor, how: Products) -> None:
    """Add each expert's weight gradient dy^T x into main_grad, in place.

    Args:
        main_grad: [e, out, in]. dy: [R, out]. x: [R, in].
        ends: [e], one past the last row of each expert.
        how: computes the product of one expert, quantised or not.
    """
    if _grouped(dy, x.shape[1], how):
        # The product is bf16: rounded once for each microbatch, as add_product does on a CPU.
        main_grad.add_(F.grouped_mm(dy.t(), x, offs=ends.int()))
        return
    start = 0
    for number, end in enumerate(ends.tolist()):
        if end > start:
            how.add_weight_grad(main_grad[number], dy[start:end], x[start:end])
        start = end


class _How(NamedTuple):
    """The settings of `_Experts`, in addition to its tensors.

    Attributes:
        dispatcher: brings tokens to the experts' ranks and outputs back.
        first: True on one of the ranks that split each expert. Only this rank adds fc2's bias.
        activation: fc1's output [R, 2f or f] -> [R, f].
        swiglu: True if the activation is SwiGLU without a clamp, which has a fused kernel.
        on_input: True if a row's weight multiplies fc1's input, False if fc2's input and bias.
        one, two: the products of fc1 and of fc2.
    """

    dispatcher: Dispatcher
    first: bool
    activation: Callable[[Tensor], Tensor]
    swiglu: bool
    on_input: bool
    one: Products
    two: Products

    def between(self, first: Tensor, weights: Tensor) -> Tensor:
        """Return the input of fc2 [R, f]: activation(first), times `weights` unless `on_input`.

        Args:
            first: fc1's output, [R, 2f or f]. weights: [R], of the rows' choices.
        """
        if self.on_input:
            return self.activation(first)
        if self.swiglu and is_fused(first):
            return swiglu(first, weights)
        return (self.activation(first) * weights[:, None]).to(first.dtype)

    def entering(self, rows: Tensor, weights: Tensor) -> Tensor:
        """Return fc1's input [R, h]: rows [R, h], times the router's weights [R] if `on_input`."""
        return (rows * weights[:, None]).to(rows.dtype) if self.on_input else rows

    def of_bias(self, rows: Tensor, weights: Tensor) -> Tensor:
        """Return rows [R, h] of fc2's bias or its gradient, times `weights` unless `on_input`."""
        return rows if self.on_input else rows * weights[:, None]


class _Experts(torch.autograd.Function):
    """Autograd of the experts: a token's output is the sum of weight x fc2(activation(fc1(x))).

    The sum is over the token's choices. The weight multiplies fc2's input in the activation's
    kernel, or fc1's input with `_How.on_input`.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weights: Tensor,
        fc1: Tensor,
        bias1: Tensor | None,
        fc2: Tensor,
        bias2: Tensor | None,
        how: _How,
    ) -> Tensor:
        dispatcher = how.dispatcher
        by_row = dispatcher.dispatch_weights(weights)
        rows = dispatcher.dispatch(x).wait()
        first = products(how.entering(rows, by_row), fc1, dispatcher.ends, how.one)
        if bias1 is not None:
            first += bias1[dispatcher.experts]
        out = products(how.between(first, by_row), fc2, dispatcher.ends, how.two)
        if bias2 is not None and how.first:
            # By the weight as well: fc2's input has it, and its bias does not.
            out += how.of_bias(bias2[dispatcher.experts], by_row).to(out.dtype)
        # Megatron-LM's module moe_act keeps these two; hooks would count them for expert_fc1.
        saves("moe_act", first, by_row)
        kept = rows if dispatcher.keeps_rows else x
        ctx.save_for_backward(kept, first, by_row, fc1, fc2)
        ctx.how = how
        ctx.biases = (bias1, bias2)
        ctx.weight_grads = current_weight_grads()
        # Saved tensors that hooks have moved come back as new objects, without main_grad.
        ctx.weights = (fc1, fc2)
        return dispatcher.combine(out).wait()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        kept, first, by_row, fc1, fc2 = ctx.saved_tensors
        how: _How = ctx.how
        bias1, bias2 = ctx.biases
        dispatcher = how.dispatcher
        ends = dispatcher.ends
        grads = dispatcher.dispatch(grad).wait()
        # A small graph of its own differentiates the activation, whichever it is.
        with torch.enable_grad():
            first = first.detach().requires_grad_()
            by_row = by_row.detach().requires_grad_()
            second = how.between(first, by_row)
        d_second = input_grads(grads, fc2, ends, how.two)
        d_weights = torch.zeros_like(by_row)
        if how.on_input:
            (d_first,) = torch.autograd.grad(second, (first,), d_second)
        else:
            d_first, d_weights = torch.autograd.grad(second, (first, by_row), d_second)
        by_row = by_row.detach()
        second = second.detach()
        d_bias1 = d_bias2 = d_x = None
        if bias1 is not None:
            d_bias1 = _bias_grad(bias1, d_first, dispatcher.experts)
        if bias2 is not None:
            d_bias2 = _bias_grad(bias2, how.of_bias(grads, by_row), dispatcher.experts)
            if how.first and not how.on_input:
                d_weights = d_weights + (grads * bias2.detach()[dispatcher.experts]).sum(-1)
        if ctx.needs_input_grad[0] or how.on_input:
            d_rows = input_grads(d_first, fc1, ends, how.one)
            if how.on_input:
                rows = kept if dispatcher.keeps_rows else dispatcher.dispatch(kept).wait()
                d_weights = (d_rows * rows).sum(-1, dtype=d_weights.dtype)
            d_x = dispatcher.combine(how.entering(d_rows, by_row)).wait()
        d_choices = dispatcher.combine_weights(d_weights)
        owner = ctx.weight_grads
        deferring = owner is not None and owner.is_deferring
        # A deferred product holds rows that came by all-to-all. Gathered rows are many: it holds
        # the tokens of this rank instead, and gathers them again in the W pass.
        gathers = deferring and not dispatcher.keeps_rows

        def add_fc1(into: Tensor) -> None:
            rows = kept if dispatcher.keeps_rows else dispatcher.dispatch(kept).wait()
            add_products(into, d_first, how.entering(rows, by_row), ends, how.one)

        if gathers:

            def add_fc2(into: Tensor) -> None:
                add_products(into, dispatcher.dispatch(grad).wait(), second, ends, how.two)
        else:

            def add_fc2(into: Tensor) -> None:
                add_products(into, grads, second, ends, how.two)

        d_fc1 = d_fc2 = None
        if ctx.needs_input_grad[2]:
            d_fc1 = submit_weight_grad(ctx.weights[0], add_fc1, owner)
        if ctx.needs_input_grad[4]:
            d_fc2 = submit_weight_grad(ctx.weights[1], add_fc2, owner)
        return d_x, d_choices, d_fc1, d_bias1, d_fc2, d_bias2, None


_experts: Callable[..., Tensor] = _Experts.apply


def _bias_grad(bias: Tensor, by_row: Tensor, experts: Tensor) -> Tensor | None:
    """Add a bias's gradient into its main_grad.

    Args:
        bias: [e, n]. by_row: [R, n], the gradient of each row. experts: [R], the row's expert.
    Returns: None; if the bias has no main_grad, the gradient for autograd.
    """

    def add(into: Tensor) -> None:
        into.index_add_(0, experts, by_row.to(into.dtype))

    return submit_weight_grad(bias, add, None)


class Experts(nn.Module):
    """The experts on this rank, each an MLP h -> f -> h.

    Expert parallelism gives a rank e of the E experts. Expert tensor parallelism splits each over t
    ranks. linear_fc1.weight is [e, f/t, h]; of gated experts [e, 2f/t, h], gate above up.

    Args:
        tp: tensor parallelism; it names the axes of the experts.
        fp8: how the operands of each expert's products are quantised; None for no quantisation.
    """

    def __init__(self, config: ModelConfig, tp: Axis, fp8: FP8Recipe | None = None) -> None:
        super().__init__()
        self.config = config
        self.tp = tp
        self.axis = tp.named("experts")
        self.etp = tp.named("etp")
        e = config.experts
        h = config.hidden
        f = config.expert_ffn
        blocks = 2 if config.gated else 1
        ep = tp.named("ep")
        t = self.etp.size
        assert e % ep.size == f % t == 0, (
            f"{e} experts of width {f} are not divisible by {ep.size} x {t} ranks"
        )
        own = e // ep.size
        self.own = range(ep.rank * own, (ep.rank + 1) * own)
        full = (blocks, f) if blocks > 1 else (f,)
        # Gate and up are a dimension of their own, so that a checkpoint's slice is the same for
        # every t.
        layout = Layout((e, *full, h), len(full), std=config.linear_std, experts=True)
        bias = Layout((e, *full), len(full), experts=True) if config.has_bias("fc1") else None
        self.linear_fc1 = _Stack(layout, (own, blocks * f // t, h), bias, fp8=fp8)
        layout = Layout((e, h, f), 2, std=config.residual_std, experts=True)
        bias = Layout((e, h), experts=True) if config.has_bias("fc2") else None
        self.linear_fc2 = _Stack(layout, (own, h, f // t), bias, fp8=fp8)

    def forward(self, x: Tensor, routing: Routing) -> Tensor:
        """Apply each token's experts, and sum their weighted outputs.

        Args:
            x: [s, b, h]; under sequence parallelism [s/t, b, h], and each rank routes its tokens.
            routing: the router's choices for these tokens.
        Returns: the shape of x.
        """
        one = self.linear_fc1
        two = self.linear_fc2
        how = _How(
            self._dispatcher(routing),
            self.etp.rank == 0,
            function_of(self.config),
            self.config.plain_swiglu,
            self.config.moe_apply_probs_on_input,
            one.products,
            two.products,
        )
        return _experts(x, routing.weights, one.weight, one.bias, two.weight, two.bias, how)

    def _dispatcher(self, routing: Routing) -> Dispatcher:
        config = self.config
        tp = self.tp
        axis = self.axis
        experts = config.experts
        each = routing.capacity if config.moe_pad_expert_input_to_capacity else None
        # Without sequence parallelism all tensor-parallel ranks have the same tokens.
        if tp.size > 1 and not config.sequence_parallel:
            assert axis.ranks == tp.ranks, (
                "ranks with the same tokens have all experts, a slice of each"
            )
            return AllGatherDispatcher(routing, opening(tp, False), ALONE, self.own, experts, each)
        if axis.size == 1 or config.moe_token_dispatcher_type == "allgather":
            return AllGatherDispatcher(routing, opening(axis, True), axis, self.own, experts, each)
        return AllToAllDispatcher(routing, axis, self.etp.size, experts, each)


class _Stack(nn.Module):
    """The weights of one linear layer of all experts on this rank, and their biases if any.

    Args:
        layout: the layout of the weights.
        shape: the shape of this rank's weights, (e, out, in). The biases are [e, out].
        bias: layout of the biases, or None for no biases.
        fp8: how operands are quantised; None for no quantisation.
    """

    def __init__(
        self,
        layout: Layout,
        shape: tuple[int, ...],
        bias: Layout | None = None,
        *,
        fp8: FP8Recipe | None = None,
    ) -> None:
        super().__init__()
        self.products = products_of(fp8)
        self.weight = parameter(layout, *shape)
        self.bias = None
        if bias is not None:
            self.bias = parameter(bias, *shape[:2])
