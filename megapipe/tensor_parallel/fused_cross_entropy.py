"""Output head and cross entropy in one operation that never holds all logits.

Forward computes the logits of one block of the vocabulary after another. For each token it keeps
one number, the logarithm of the softmax denominator. Backward computes a block's logits again,
unless they were few enough to keep, and turns them into gradients at once. Blocks are cut from the
vocabulary and not from the tokens: so each row of the weight, and of its gradient, is read and
written once. Tensor parallelism splits the vocabulary first. Shapes: n tokens on this rank.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from megapipe.distributed.axis import Axis
from megapipe.kernels import cpu as kernels
from megapipe.kernels.cpu import has_loops
from megapipe.kernels.region import is_fused, region
from megapipe.tensor_parallel.collectives import opening
from megapipe.tensor_parallel.cross_entropy import exp_, without_loss
from megapipe.tensor_parallel.products import add_product, linear
from megapipe.tensor_parallel.softcap import cap_, slope_of
from megapipe.tensor_parallel.weight_grad import current_weight_grads

BLOCK_ELEMENTS = 1 << 20
"""Logits of a block on a CPU; more, in float32, would leave its cache."""
BLOCK_ELEMENTS_GPU = 1 << 28
"""Logits of a block on a GPU, 1 GiB in float32: few large kernels, not thousands of small ones."""
KEPT_ELEMENTS = 1 << 26
"""The most logits of a microbatch that are kept for backward by default: 128 MiB in bf16."""


class _HeadLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        target: Tensor,
        tp: Axis,
        sequence_parallel: bool,
        most_kept: int,
        cap: float | None,
    ) -> Tensor:
        ctx.cap = cap
        ctx.opens = opening(tp, sequence_parallel)
        rows = _rows(ctx.opens.forward(x).wait())
        # Counted from this rank's first row. A label of another rank is then in none of its blocks.
        labels = target.reshape(-1) - tp.rank * weight.shape[0]
        highest = rows.new_full((len(rows),), float("-inf"), dtype=wide_of(x))
        denominator = torch.zeros_like(highest)
        at_label = torch.zeros_like(highest)
        ctx.kept = [] if len(rows) * weight.shape[0] <= most_kept else None
        space = space_of(rows, weight.shape[0])
        for block in blocks_of(rows, weight.shape[0]):
            logits = cap_(linear(rows, weight[block]), cap)
            if ctx.kept is not None:
                ctx.kept.append(logits)
            inside, column = columns_of(labels, block)
            # A label is in one block of one rank; all others add a zero.
            at_label += logits.gather(1, column).squeeze(1) * inside
            highest, denominator = with_block(logits, highest, denominator, space)
        if tp.size > 1:
            higher = tp.all_reduce(highest.clone(), "max")
            # Each rank's sum is relative to its own maximum. The sums can be added once they are
            # relative to the maximum over all ranks.
            denominator.mul_((highest - higher).exp_())
            # Two sums in one message: its latency counts, not its n numbers.
            denominator, at_label = tp.all_reduce(torch.stack((denominator, at_label)))
            highest = higher
        lse = denominator.log_().add_(highest)
        losses = lse - at_label
        ignored = without_loss(target.reshape(-1), weight.shape[0] * tp.size)
        # x as it was before its all-gather, 1/t of the rows. Each pass gathers them again.
        ctx.save_for_backward(x, weight, labels, lse, ignored)
        # Hooks on saved tensors may return the weight as a new object, without main_grad.
        ctx.weight = weight
        ctx.weight_grads = current_weight_grads()
        return losses.masked_fill_(ignored, 0.0).view(target.shape)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, labels, lse, ignored = ctx.saved_tensors
        opens = ctx.opens
        cap = ctx.cap
        rows = _rows(opens.forward(x).wait())
        grad = grad.reshape(-1).to(lse.dtype).masked_fill(ignored, 0.0)
        kept = ctx.kept
        # The kept logits become gradients in place below. A second backward through a retained
        # graph then finds none, and computes them again.
        ctx.kept = None

        # Autograd switches itself off during backward only. W runs afterwards.
        @torch.no_grad()
        def weight_pass(into: Tensor) -> None:
            rows = _rows(opens.forward(x).wait())
            space = space_of(rows, weight.shape[0]) if kept is None else rows
            for n, block in enumerate(blocks_of(rows, weight.shape[0])):
                if kept is not None:
                    dy = kept[n]  # B has turned the kept logits into gradients
                else:
                    dy = cap_(linear(rows, weight[block]), cap)
                    to_gradient_(dy, lse, grad, labels - block.start, space, cap)
                add_product(into[block], dy, rows)

        wants_x, wants_weight = ctx.needs_input_grad[:2]
        main_grad: Tensor | None = getattr(ctx.weight, "main_grad", None)
        into = main_grad
        if into is None:
            into = torch.zeros_like(weight, dtype=lse.dtype)
        owner = ctx.weight_grads
        defers = main_grad is not None and owner is not None and owner.is_deferring
        # Unless the logits are kept, the W pass computes them once more. Holding them until then
        # would lose the memory that this operation saves. Sharded weights are released before W, so
        # their gradient is computed here, with the logits of this pass.
        is_dropped = getattr(ctx.weight, "is_dropped", False)
        if defers and wants_weight and (kept is not None or not is_dropped):
            assert owner is not None
            assert main_grad is not None
            owner.submit(partial(weight_pass, main_grad))
            wants_weight = False
        # Summed over the blocks in float32: a 16-bit sum would be rounded once for each block.
        grad_x = torch.zeros_like(rows, dtype=lse.dtype)
        space = space_of(rows, weight.shape[0])
        for n, block in enumerate(blocks_of(rows, weight.shape[0])):
            dy = cap_(linear(rows, weight[block]), cap) if kept is None else kept[n]
            to_gradient_(dy, lse, grad, labels - block.start, space, cap)
            if wants_x:
                grad_x += linear(dy, weight[block].t())
            if wants_weight:
                add_product(into[block], dy, rows)
        reduced = None
        if wants_x:
            reduced = opens.backward(grad_x.to(x.dtype)).wait().view(x.shape)
        grad_weight = None
        if wants_weight and main_grad is None:
            grad_weight = into.to(weight.dtype)
        return reduced, grad_weight, *(None,) * 5


_head_loss: Callable[..., Tensor] = _HeadLoss.apply


def _rows(x: Tensor) -> Tensor:
    return x.reshape(-1, x.shape[-1])


def wide_of(x: Tensor) -> torch.dtype:
    """Return the type of sums: float32, or float64 for float64."""
    return torch.promote_types(x.dtype, torch.float32)


def exp_of(logits: Tensor, shift: Tensor, space: Tensor) -> Tensor:
    """Return exp(logits - shift), with the dtype of `space`.

    Args:
        logits: [n, block]. shift: [n].
        space: memory for the result, from `space_of`. If it has no elements, new memory is used.
    """
    if not len(space):
        return (logits.to(space.dtype) - shift[:, None]).exp_()
    wide = space[: logits.numel()].view(logits.shape).copy_(logits)
    return exp_(wide.sub_(shift[:, None]))


def with_block(
    logits: Tensor, highest: Tensor, total: Tensor, space: Tensor
) -> tuple[Tensor, Tensor]:
    """Add one block of logits to the running softmax denominators of n tokens.

    Args:
        logits: [n, block].
        highest: [n], the maximum of the logits so far; may be overwritten.
        total: [n], the sum of exp(logit - highest) so far; may be overwritten.
        space: memory for a block, from `space_of`.
    Returns: (highest, total) with this block, [n] each.
    """
    if is_fused(logits):
        return _with_block(logits, highest, total)  # type: ignore[no-any-return]
    if has_loops(logits, highest, total):
        kernels.with_block_(logits, highest, total)
        return highest, total
    higher = torch.maximum(highest, logits.amax(1))
    return higher, total * (highest - higher).exp_() + exp_of(logits, higher, space).sum(1)


@region("with_block(Tensor logits, Tensor highest, Tensor total) -> (Tensor, Tensor)")
def _with_block(logits: Tensor, highest: Tensor, total: Tensor) -> tuple[Tensor, Tensor]:
    higher = torch.maximum(highest, logits.amax(1))
    wide = logits.to(higher.dtype) - higher[:, None]
    return higher, total * (highest - higher).exp() + wide.exp().sum(1)


def to_gradient_(
    logits: Tensor,
    log_sum: Tensor,
    scale: Tensor,
    labels: Tensor,
    space: Tensor,
    cap: float | None = None,
) -> None:
    """Replace the logits of a vocabulary block by their gradients, (softmax - one_hot) x scale.

    Args:
        logits: [n, block], overwritten.
        log_sum: [n], logarithm of the softmax denominator.
        scale: [n], gradient of each token's loss.
        labels: [n], counted from the block's first token id; a number outside of 0..block-1 is a
            label in another block.
        space: memory for a block, from `space_of`.
        cap: c, if the logits are cap(x) = c tanh(x / c). Then the result is the gradient of x. None
            if the logits have no cap.
    """
    if cap is not None:
        slope = slope_of(logits, cap)
        to_gradient_(logits, log_sum, scale, labels, space)
        logits.mul_(slope)
        return
    if is_fused(logits):
        _to_gradient_(logits, log_sum, scale, labels)
        return
    if has_loops(logits, log_sum, scale):
        kernels.to_gradient_(logits, log_sum, scale, labels)
        return
    inside, column = columns_of(labels, slice(0, logits.shape[1]))
    dy = exp_of(logits, log_sum, space).mul_(scale[:, None])
    logits.copy_(dy.scatter_add_(1, column, -(scale * inside)[:, None]))


@region("to_gradient_(Tensor(a!) logits, Tensor log_sum, Tensor scale, Tensor labels) -> ()")
def _to_gradient_(logits: Tensor, log_sum: Tensor, scale: Tensor, labels: Tensor) -> None:
    softmax = (logits.to(log_sum.dtype) - log_sum[:, None]).exp()
    is_label = torch.arange(logits.shape[1], device=logits.device) == labels[:, None]
    logits.copy_((softmax - is_label.to(softmax.dtype)) * scale[:, None])


def space_of(rows: Tensor, width: int) -> Tensor:
    """Return memory that fits the float32 logits of one block of vocabulary; 0 elements on a GPU.

    A block has the logits of all rows for a part of the vocabulary. The memory is allocated once
    for all blocks: the operating system clears what it hands out, which takes time.

    Args:
        rows: hidden states [n, h].
        width: rows of the vocabulary on this rank.
    """
    size = 0
    if not is_fused(rows):
        size = len(rows) * min(_step(rows), width)
    return rows.new_empty(size, dtype=wide_of(rows))


def _step(rows: Tensor) -> int:
    """Return the number of vocabulary rows in a block, for hidden states `rows` [n, h].

    The number is a multiple of 64, because products of odd widths use slower kernels.
    """
    elements = BLOCK_ELEMENTS if rows.device.type == "cpu" else BLOCK_ELEMENTS_GPU
    return max(elements // max(len(rows), 1) // 64 * 64, 64)


def blocks_of(rows: Tensor, width: int) -> Iterator[slice]:
    """Yield the blocks into which `width` rows of the vocabulary are cut, as slices of these rows.

    rows: hidden states [n, h], whose number decides the size of a block.
    """
    step = _step(rows)
    return (slice(begin, min(begin + step, width)) for begin in range(0, width, step))


def columns_of(labels: Tensor, block: slice) -> tuple[Tensor, Tensor]:
    """Return (inside, columns) for a block of the vocabulary.

    Args:
        labels: [n], counted from this rank's first row.
        block: the block, a slice of this rank's rows.
    Returns: inside [n], True for labels in the block; and their columns there, [n, 1], 0 for other
        labels.
    """
    inside = (labels >= block.start) & (labels < block.stop)
    return inside, (labels - block.start).where(inside, 0)[:, None]


def vocab_parallel_linear_cross_entropy(
    x: Tensor,
    weight: Tensor,
    target: Tensor,
    tp: Axis,
    *,
    sequence_parallel: bool = False,
    most_kept: int | None = None,
    cap: float | None = None,
) -> Tensor:
    """Return each token's cross entropy directly from the hidden states.

    Equals `vocab_parallel_cross_entropy(x W^T, target)`. Logits are rounded to x's type; everything
    else is float32. They are computed in parts of 1M (256M on a GPU). If there are more than
    `most_kept`, they are computed again in backward. This costs one more matrix product, two under
    a B/W split.

    Args:
        x: [..., h], the same on all tp ranks; its gradient is summed over tp.
        weight: [v/t, h], this rank's rows of the output head. Its gradient is added into its
            `main_grad`, and without one given to autograd. In a B pass the addition is deferred to
            W, unless the weight is sharded, so released before W, and logits are not kept.
        target: [...], ids in 0..v-1. Any other number, such as -100, marks a token without loss.
        sequence_parallel: x has this rank's tokens only, in its first dimension; target has all.
        most_kept: the most logits on this rank to keep for backward, in x's type; None for 64M.
            None are kept while gradients are off.
        cap: the number c of capped logits, c tanh(x W^T / c); None for plain ones.
    Returns: [...] in float32 (float64 for float64 x).
    """
    if not torch.is_grad_enabled():
        most_kept = -1
    elif most_kept is None:
        most_kept = KEPT_ELEMENTS
    return _head_loss(x, weight, target, tp, sequence_parallel, most_kept, cap)
