"""The experts of a layer, two stacks of matrices [E, ...].

Rows are laid out by expert, within one by token, so that each expert's are one product, and all together one grouped
product where the device has it. A token's k terms are added in the order of its experts: the sum does not depend on
their scores. Kept for backward are the layer's input, or the rows that came of it from other ranks, and fc1's output;
everything else is computed again from these.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megapipe.config import ModelConfig
from megapipe.distributed.axis import ALONE, Axis
from megapipe.distributed.layout import Layout, set_layout
from megapipe.kernels.region import is_fused
from megapipe.models.fused import weighted_swiglu
from megapipe.models.mlp import activate
from megapipe.models.moe.dispatch import Exchanged, Gathered, Way
from megapipe.models.moe.router import Routing
from megapipe.tensor_parallel.collectives import opening
from megapipe.tensor_parallel.fp8.products import Recipe, products_of
from megapipe.tensor_parallel.products import PLAIN, Products
from megapipe.tensor_parallel.saving import saves
from megapipe.tensor_parallel.weight_grad import WeightGrads, current_weight_grads


def _grouped(x: Tensor, width: int, how: Products) -> bool:
    """Does the device multiply all groups in one call, rows x [R, in] to ones of this width or with them?"""
    fits = how is PLAIN and x.is_cuda and x.dtype == torch.bfloat16 and hasattr(F, "grouped_mm")
    return fits and x.shape[1] % 8 == width % 8 == 0  # strides of 16 bytes


def products(rows: Tensor, weight: Tensor, ends: Tensor, how: Products = PLAIN) -> Tensor:
    """rows [R, in], those of each expert times its matrix of weight [E, out, in] -> [R, out]."""
    if _grouped(rows, weight.shape[1], how):
        return F.grouped_mm(rows, weight.mT, offs=ends.int())
    return _one_by_one(rows, weight, weight.shape[1], ends, how.forward)


def input_grads(grads: Tensor, weight: Tensor, ends: Tensor, how: Products = PLAIN) -> Tensor:
    """grads [R, out] of the output of `products` -> of its rows, [R, in]."""
    if _grouped(grads, weight.shape[2], how):
        return F.grouped_mm(grads, weight, offs=ends.int())
    return _one_by_one(grads, weight, weight.shape[2], ends, how.input_grad)


def _one_by_one(
    rows: Tensor, weight: Tensor, width: int, ends: Tensor, product: Callable[[Tensor, Tensor], Tensor]
) -> Tensor:
    out, start = rows.new_empty(len(rows), width), 0
    for number, end in enumerate(ends.tolist()):
        if end > start:
            out[start:end] = product(rows[start:end], weight[number])
        start = end
    return out


def add_products(main_grad: Tensor, dy: Tensor, x: Tensor, ends: Tensor, how: Products = PLAIN) -> None:
    """main_grad [E, out, in] += dy^T x of each expert's rows, dy [R, out] and x [R, in]; 0 for one without rows."""
    if _grouped(dy, x.shape[1], how):
        main_grad.add_(F.grouped_mm(dy.t(), x, offs=ends.int()))
        return
    start = 0
    for number, end in enumerate(ends.tolist()):
        if end > start:
            how.add_weight_grad(main_grad[number], dy[start:end], x[start:end])
        start = end


class _How(NamedTuple):
    """Attributes:
    swiglu: is that the activation?
    first: does this rank add fc2's bias, of those with slices of the same experts?
    activation: of fc1's output [R, 2f or f] -> [R, f].
    one, two: the products of fc1 and of fc2.
    """

    way: Way
    first: bool
    activation: Callable[[Tensor], Tensor]
    swiglu: bool
    one: Products
    two: Products

    def between(self, first: Tensor, weights: Tensor) -> Tensor:
        """The input of fc2: the activation of fc1's output times a choice's weight."""
        if self.swiglu and is_fused(first):
            return weighted_swiglu(first, weights)
        return (self.activation(first) * weights[:, None]).to(first.dtype)


class _Experts(torch.autograd.Function):
    """sum over a token's choices of weight x fc2(activation(fc1(x))), the weight applied before fc2."""

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
        way = how.way
        by_row = way.weights_there(weights)
        rows = way.there(x).wait()
        first = products(rows, fc1, way.ends, how.one)
        if bias1 is not None:
            first += bias1[way.experts]
        out = products(how.between(first, by_row), fc2, way.ends, how.two)
        if bias2 is not None and how.first:
            out += (bias2[way.experts] * by_row[:, None]).to(out.dtype)
        saves("moe_act", first, by_row)
        ctx.save_for_backward(rows if way.keeps_rows else x, first, by_row, fc1, fc2)
        ctx.how, ctx.biases, ctx.weight_grads = how, (bias1, bias2), current_weight_grads()
        ctx.weights = fc1, fc2
        return way.back(out).wait()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (kept, first, by_row, fc1, fc2), how, (bias1, bias2) = ctx.saved_tensors, ctx.how, ctx.biases
        way, grads = how.way, how.way.there(grad).wait()
        with torch.enable_grad():
            first, by_row = first.detach().requires_grad_(), by_row.detach().requires_grad_()
            second = how.between(first, by_row)
        d_second = input_grads(grads, fc2, way.ends, how.two)
        d_first, d_weights = torch.autograd.grad(second, (first, by_row), d_second)
        second = second.detach()
        d_bias1 = d_bias2 = d_x = None
        if bias1 is not None:
            d_bias1 = _bias_grad(bias1, d_first, way.experts)
        if bias2 is not None:
            d_bias2 = _bias_grad(bias2, grads * by_row.detach()[:, None], way.experts)
            if how.first:
                d_weights = d_weights + (grads * bias2.detach()[way.experts]).sum(-1)
        if ctx.needs_input_grad[0]:
            d_x = way.back(input_grads(d_first, fc1, way.ends, how.one)).wait()
        d_choices = way.weights_back(d_weights)
        owner = ctx.weight_grads
        deferring = owner is not None and owner.is_deferring
        # What is put off keeps rows, or the smaller side of an edge.
        inputs: Callable[[], Tensor] = (lambda: kept) if way.keeps_rows else (lambda: way.there(kept).wait())
        again = deferring and not way.keeps_rows
        of_second: Callable[[], Tensor] = (lambda: way.there(grad).wait()) if again else (lambda: grads)
        d_fc1 = d_fc2 = None
        if ctx.needs_input_grad[2]:
            d_fc1 = _weight_grad(
                ctx.weights[0], lambda into: add_products(into, d_first, inputs(), way.ends, how.one), owner
            )
        if ctx.needs_input_grad[4]:
            d_fc2 = _weight_grad(
                ctx.weights[1], lambda into: add_products(into, of_second(), second, way.ends, how.two), owner
            )
        return d_x, d_choices, d_fc1, d_bias1, d_fc2, d_bias2, None


_experts: Callable[..., Tensor] = _Experts.apply


def _weight_grad(weight: Tensor, add: Callable[[Tensor], None], owner: WeightGrads | None) -> Tensor | None:
    """Into main_grad, now or in the W pass, or for autograd where there is none."""
    into: Tensor | None = getattr(weight, "main_grad", None)
    if into is None:
        add(into := torch.zeros_like(weight))
        return into
    if owner is None:
        add(into)
    else:
        owner.submit(lambda: add(into))
    return None


def _bias_grad(bias: Tensor, by_row: Tensor, experts: Tensor) -> Tensor | None:
    """The gradient of a bias [E, n], from rows [R, n]: into main_grad, or for autograd where there is none."""
    main_grad: Tensor | None = getattr(bias, "main_grad", None)
    into = torch.zeros_like(bias) if main_grad is None else main_grad
    into.index_add_(0, experts, by_row.to(into.dtype))
    return into if main_grad is None else None


class Experts(nn.Module):
    """Experts of h -> f -> h, this rank's e of all E, and of each its slice. linear_fc1.weight [e, 2f/t, h] of gated
    ones holds [gate; up] of each, as in MLP.

    fp8: how their products are quantised, each expert's by itself.
    """

    def __init__(self, config: ModelConfig, tp: Axis, fp8: Recipe | None = None) -> None:
        super().__init__()
        self.config, self.tp, self.axis, self.etp = config, tp, tp.named("experts"), tp.named("etp")
        e, h, f, blocks = config.experts, config.hidden, config.expert_ffn, 2 if config.gated else 1
        ep, t = tp.named("ep"), self.etp.size
        assert e % ep.size == f % t == 0, f"{e} experts of width {f} do not divide over {ep.size} x {t} ranks"
        own = e // ep.size
        self.own = range(ep.rank * own, (ep.rank + 1) * own)
        full = (blocks, f) if blocks > 1 else (f,)
        fc1 = Layout((e, *full, h), len(full), std=config.linear_std, experts=True), (own, blocks * f // t, h)
        fc2 = Layout((e, h, f), 2, std=config.residual_std, experts=True), (own, h, f // t)
        bias1 = Layout((e, *full), len(full), experts=True), (own, blocks * f // t)
        bias2 = Layout((e, h), experts=True), (own, h)
        self.linear_fc1 = _Stack(*fc1, bias1 if config.bias else None, fp8=fp8)
        self.linear_fc2 = _Stack(*fc2, bias2 if config.bias else None, fp8=fp8)

    def forward(self, x: Tensor, routing: Routing) -> Tensor:
        """[s, b, h] -> [s, b, h]; under sequence parallelism [s/t, b, h], where each rank has routed its own tokens."""
        one, two = self.linear_fc1, self.linear_fc2
        first, activation = self.etp.rank == 0, lambda y: activate(y, self.config)
        how = _How(self._way(routing), first, activation, self.config.swiglu, one.products, two.products)
        return _experts(x, routing.weights, one.weight, one.bias, two.weight, two.bias, how)

    def _way(self, routing: Routing) -> Way:
        config, tp, axis = self.config, self.tp, self.axis
        each = routing.capacity if config.moe_pad_expert_input_to_capacity else None
        if tp.size > 1 and not config.sequence_parallel:
            assert axis.ranks == tp.ranks, "ranks with the same tokens have all experts, a slice of each"
            return Gathered(routing, opening(tp, False), ALONE, self.own, config.experts, each)
        if axis.size == 1 or config.moe_token_dispatcher_type == "allgather":
            return Gathered(routing, opening(axis, True), axis, self.own, config.experts, each)
        return Exchanged(routing, axis, self.etp.size, config.experts, each)


class _Stack(nn.Module):
    """The weights of one layer of every expert: (how they lie, their shape here), and of biases if there are any."""

    def __init__(
        self,
        layout: Layout,
        shape: tuple[int, ...],
        bias: tuple[Layout, tuple[int, ...]] | None = None,
        *,
        fp8: Recipe | None = None,
    ) -> None:
        super().__init__()
        self.products = products_of(fp8)
        self.weight = set_layout(nn.Parameter(torch.empty(shape)), layout)
        self.bias = None if bias is None else set_layout(nn.Parameter(torch.empty(bias[1])), bias[0])
