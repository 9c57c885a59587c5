"""The experts of a layer, two stacks of matrices [E, ...], and the way of rows to them and back.

Rows are laid out by expert, within one by token, so that each expert's are one product, and all together one grouped
product where the device has it. A token's k terms are added in the order of its experts: the sum does not depend on
their scores. Kept for backward are the layer's input and fc1's output; everything else is computed again from these.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megapipe.config import ModelConfig
from megapipe.distributed.axis import Axis
from megapipe.distributed.layout import Layout, set_layout
from megapipe.models.mlp import activate
from megapipe.models.moe.router import Routing
from megapipe.tensor_parallel.collectives import Edge, closing, opening
from megapipe.tensor_parallel.meanwhile import result_of
from megapipe.tensor_parallel.products import linear
from megapipe.tensor_parallel.weight_grad import WeightGrads, add_product, current_weight_grads


class Rows(NamedTuple):
    """The rows that experts compute, R of them, for T tokens of k choices each.

    Attributes:
        choices: [R], which choice a row is, counted token by token.
        tokens, experts: [R], whose.
        real: [R], 0 for a row that only fills an expert's share; None where all are real.
        ends: [E], where each expert's rows end.
        of_token: [T, k], the rows of each token in ascending order; R where there are fewer.
    """

    choices: Tensor
    tokens: Tensor
    experts: Tensor
    real: Tensor | None
    ends: Tensor
    of_token: Tensor


def rows_of(experts: Tensor, num_experts: int, kept: Tensor | None = None, each: int | None = None) -> Rows:
    """The rows of choices [T, k].

    Args:
        kept: [T, k], those that are not dropped.
        each: rows of each expert, at least as many as it has choices, where all are to have as many.
    """
    tokens, k = experts.shape
    flat = experts.flatten() if kept is None else experts.masked_fill(~kept, num_experts).flatten()
    order = torch.argsort(flat, stable=True)
    place = torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=order.device))
    counts = torch.zeros(num_experts + 1, dtype=torch.int64, device=flat.device)
    counts = counts.scatter_add_(0, flat, torch.ones_like(flat))[:num_experts]
    ends = counts.cumsum(0)
    if each is None:
        number = len(order) if kept is None else int(ends[-1])  # the host waits for the device where tokens are dropped
        choices = order[:number]
        of_token = place.view(tokens, k).sort(-1).values.clamp_(max=number)
        return Rows(choices, choices // k, flat[choices], None, ends, of_token)
    starts, column = ends - counts, torch.arange(each, device=flat.device)
    real = (column < counts[:, None]).flatten()
    choices = order[(starts[:, None] + column).flatten().clamp_(max=len(order) - 1)].masked_fill(~real, 0)
    shift = torch.arange(num_experts, device=flat.device) * each - starts
    moved = place + torch.cat((shift, shift.new_full((1,), num_experts * each)))[flat]  # dropped: behind all rows
    of_token = moved.view(tokens, k).sort(-1).values.clamp_(max=num_experts * each)
    owners = torch.arange(num_experts, device=flat.device).repeat_interleave(each)
    return Rows(choices, choices // k, owners, real, (owners.new_ones(num_experts) * each).cumsum(0), of_token)


def _grouped(x: Tensor, width: int) -> bool:
    """Does the device multiply all groups in one call, rows x [R, in] to ones of this width or with them?"""
    fits = x.is_cuda and x.dtype == torch.bfloat16 and hasattr(F, "grouped_mm")
    return fits and x.shape[1] % 8 == width % 8 == 0  # strides of 16 bytes


def products(rows: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    """rows [R, in], those of each expert times its matrix of weight [E, out, in] -> [R, out]."""
    if _grouped(rows, weight.shape[1]):
        return F.grouped_mm(rows, weight.mT, offs=ends.int())
    out, start = rows.new_empty(len(rows), weight.shape[1]), 0
    for number, end in enumerate(ends.tolist()):
        if end > start:
            out[start:end] = linear(rows[start:end], weight[number])
        start = end
    return out


def add_products(main_grad: Tensor, dy: Tensor, x: Tensor, ends: Tensor) -> None:
    """main_grad [E, out, in] += dy^T x of each expert's rows, dy [R, out] and x [R, in]; 0 for one without rows."""
    if _grouped(dy, x.shape[1]):
        main_grad.add_(F.grouped_mm(dy.t(), x, offs=ends.int()))
        return
    start = 0
    for number, end in enumerate(ends.tolist()):
        if end > start:
            add_product(main_grad[number], dy[start:end], x[start:end])
        start = end


def summed(rows: Tensor, of_token: Tensor) -> Tensor:
    """rows [R, n] -> [T, n], for each token the sum of its rows in their order."""
    if of_token.shape[1] > 1 or len(rows) < of_token.numel():
        rows = torch.cat((rows, rows.new_zeros(1, rows.shape[1])))
    out = rows[of_token[:, 0]]
    for column in of_token[:, 1:].unbind(1):
        out += rows[column]
    return out


class _How(NamedTuple):
    """Attributes:
    activation: of fc1's output [R, 2f or f] -> [R, f].
    """

    rows: Rows
    opens: Edge
    closes: Edge
    activation: Callable[[Tensor], Tensor]

    def inputs(self, x: Tensor) -> Tensor:
        """What comes into the region, by row."""
        return self.opens.forward(x).wait().reshape(-1, x.shape[-1])[self.rows.tokens]

    def grads(self, grad: Tensor) -> Tensor:
        """What comes back into it, by row."""
        return self.closes.backward(grad).wait().reshape(-1, grad.shape[-1])[self.rows.tokens]

    def between(self, first: Tensor, weights: Tensor) -> Tensor:
        """What fc2 takes: the activation of fc1's output times a choice's weight."""
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
        rows, whole = how.rows, how.opens.forward(x).wait()
        by_row = how.opens.forward(weights).wait().flatten()[rows.choices]
        if rows.real is not None:
            by_row = by_row * rows.real
        first = products(whole.reshape(-1, x.shape[-1])[rows.tokens], fc1, rows.ends)
        if bias1 is not None:
            first += bias1[rows.experts]
        out = products(how.between(first, by_row), fc2, rows.ends)
        if bias2 is not None and how.closes.first:
            out += (bias2[rows.experts] * by_row[:, None]).to(out.dtype)
        ctx.save_for_backward(x, first, by_row, fc1, fc2)
        ctx.how, ctx.biases, ctx.shape, ctx.weight_grads = how, (bias1, bias2), weights.shape, current_weight_grads()
        return result_of(how.closes.forward(summed(out, rows.of_token).view_as(whole)))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (x, first, by_row, fc1, fc2), how, (bias1, bias2) = ctx.saved_tensors, ctx.how, ctx.biases
        rows, grads = how.rows, how.grads(grad)
        with torch.enable_grad():
            first, by_row = first.detach().requires_grad_(), by_row.detach().requires_grad_()
            second = how.between(first, by_row)
        d_first, d_weights = torch.autograd.grad(second, (first, by_row), products(grads, fc2.mT, rows.ends))
        second = second.detach()
        d_bias1 = d_bias2 = d_x = None
        if bias1 is not None:
            d_bias1 = _bias_grad(bias1, d_first, rows)
        if bias2 is not None:
            d_bias2 = _bias_grad(bias2, grads * by_row.detach()[:, None], rows)
            if how.closes.first:
                d_weights = d_weights + (grads * bias2.detach()[rows.experts]).sum(-1)
        if ctx.needs_input_grad[0]:
            d_x = summed(products(d_first, fc1.mT, rows.ends), rows.of_token)
            d_x = how.opens.backward(d_x.view(-1, *x.shape[1:])).wait()
        if rows.real is not None:
            d_weights = d_weights * rows.real
        d_choices = d_weights.new_zeros(rows.of_token.numel()).index_add_(0, rows.choices, d_weights)
        d_choices = how.opens.backward(d_choices.view(-1, *ctx.shape[1:])).wait()
        owner = ctx.weight_grads
        deferring = owner is not None and owner.is_deferring
        d_fc1 = d_fc2 = None
        if ctx.needs_input_grad[2]:
            d_fc1 = _weight_grad(fc1, lambda into: add_products(into, d_first, how.inputs(x), rows.ends), owner)
        if ctx.needs_input_grad[4]:
            # What is put off keeps the smaller side of the edge.
            of_second: Callable[[], Tensor] = (lambda: how.grads(grad)) if deferring else (lambda: grads)
            d_fc2 = _weight_grad(fc2, lambda into: add_products(into, of_second(), second, rows.ends), owner)
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


def _bias_grad(bias: Tensor, by_row: Tensor, rows: Rows) -> Tensor | None:
    """Of [E, n], from rows [R, n]: into main_grad, or for autograd where there is none."""
    main_grad: Tensor | None = getattr(bias, "main_grad", None)
    into = torch.zeros_like(bias) if main_grad is None else main_grad
    into.index_add_(0, rows.experts, by_row.to(into.dtype))
    return into if main_grad is None else None


class Experts(nn.Module):
    """E experts of h -> f -> h. linear_fc1.weight [E, 2f/t, h] of gated ones holds [gate; up] of each, as in MLP."""

    def __init__(self, config: ModelConfig, tp: Axis) -> None:
        super().__init__()
        self.config, self.tp = config, tp
        e, h, f, blocks = config.experts, config.hidden, config.expert_ffn, 2 if config.gated else 1
        assert f % tp.size == 0, f"experts of width {f} do not divide over {tp.size} ranks"
        width, full = f // tp.size, (blocks, f) if blocks > 1 else (f,)
        std, out = config.linear_std, config.residual_std
        fc1 = Layout((e, *full, h), len(full), std=std, stacked=e), (e, blocks * width, h)
        fc2 = Layout((e, h, f), 2, std=out, stacked=e), (e, h, width)
        bias1 = Layout((e, *full), len(full)), (e, blocks * width)
        self.linear_fc1 = _Stack(*fc1, bias1 if config.bias else None)
        self.linear_fc2 = _Stack(*fc2, (Layout((e, h)), (e, h)) if config.bias else None)
        self._opens = opening(tp, config.sequence_parallel)
        self._closes = closing(tp, config.sequence_parallel)

    def forward(self, x: Tensor, routing: Routing) -> Tensor:
        """[s, b, h] -> [s, b, h]; under sequence parallelism [s/t, b, h], where each rank has routed its own tokens."""
        config, experts, kept, each = self.config, routing.experts, routing.kept, routing.capacity
        if config.sequence_parallel:
            experts, kept = (
                self.tp.all_gather(experts),
                kept if kept is None else self.tp.all_gather(kept.byte()).bool(),
            )
            each = each if each is None else each * self.tp.size
        rows = rows_of(experts, config.experts, kept, each if config.moe_pad_expert_input_to_capacity else None)
        how = _How(rows, self._opens, self._closes, lambda y: activate(y, config))
        one, two = self.linear_fc1, self.linear_fc2
        return _experts(x, routing.weights, one.weight, one.bias, two.weight, two.bias, how)


class _Stack(nn.Module):
    """The weights of one layer of every expert: (how they lie, their shape here), and of biases if there are any."""

    def __init__(
        self, layout: Layout, shape: tuple[int, ...], bias: tuple[Layout, tuple[int, ...]] | None = None
    ) -> None:
        super().__init__()
        self.weight = set_layout(nn.Parameter(torch.empty(shape)), layout)
        self.bias = None if bias is None else set_layout(nn.Parameter(torch.empty(bias[1])), bias[0])
