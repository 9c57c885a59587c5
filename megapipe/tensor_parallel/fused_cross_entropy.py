"""Output head and loss in one operation that never holds the logits of the whole vocabulary.

Forward goes through the vocabulary block by block and keeps one number per token, the logarithm of the softmax
denominator; backward computes a block's logits again, unless all of them are few enough to keep, and turns them into
gradients at once. Blocks of the vocabulary, not of tokens: each row of the weight and of its gradient is then read and
written once. tp splits the vocabulary first.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
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
from megapipe.tensor_parallel.weight_grad import current_weight_grads

BLOCK_ELEMENTS = 1 << 20
"""Logits held at once in float32: more leave a CPU's cache."""
BLOCK_ELEMENTS_GPU = 1 << 28
"""Logits held at once on a GPU, 1 GiB of them: few large kernels in place of thousands of small ones."""
KEPT_ELEMENTS = 1 << 26
"""Logits of a microbatch up to which they are kept for backward anywhere, 128 MiB of them in bf16."""


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
    ) -> Tensor:
        ctx.opens = opening(tp, sequence_parallel)
        rows, labels = _rows(ctx.opens.forward(x).wait()), target.reshape(-1) - tp.rank * weight.shape[0]
        highest = rows.new_full((len(rows),), float("-inf"), dtype=wide_of(x))
        denominator, at_label = torch.zeros_like(highest), torch.zeros_like(highest)
        ctx.kept = [] if len(rows) * weight.shape[0] <= most_kept else None
        space = space_of(rows, weight.shape[0])
        for block in blocks_of(rows, weight.shape[0]):
            logits = linear(rows, weight[block])
            if ctx.kept is not None:
                ctx.kept.append(logits)
            inside, column = columns_of(labels, block)
            # A label lies in one block of one rank; all others add a zero.
            at_label += logits.gather(1, column).squeeze(1) * inside
            highest, denominator = with_block(logits, highest, denominator, space)
        if tp.size > 1:
            higher = tp.all_reduce(highest.clone(), "max")
            # Each rank has summed below its own maximum: brought to the highest of all, sums of ranks can be added.
            denominator.mul_((highest - higher).exp_())
            denominator, at_label = tp.all_reduce(torch.stack((denominator, at_label)))
            highest = higher
        lse = denominator.log_().add_(highest)
        losses = lse - at_label
        ignored = without_loss(target.reshape(-1), weight.shape[0] * tp.size)
        ctx.save_for_backward(x, weight, labels, lse, ignored)
        ctx.weight, ctx.weight_grads = weight, current_weight_grads()
        return losses.masked_fill_(ignored, 0.0).view(target.shape)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, labels, lse, ignored = ctx.saved_tensors
        opens = ctx.opens
        rows = _rows(opens.forward(x).wait())
        grad = grad.reshape(-1).to(lse.dtype).masked_fill(ignored, 0.0)
        kept, ctx.kept = ctx.kept, None

        @torch.no_grad()
        def weight_pass(into: Tensor) -> None:
            rows = _rows(opens.forward(x).wait())
            space = space_of(rows, weight.shape[0]) if kept is None else rows
            for n, block in enumerate(blocks_of(rows, weight.shape[0])):
                dy = kept[n] if kept is not None else linear(rows, weight[block])
                if kept is None:
                    to_gradient_(dy, lse, grad, labels - block.start, space)
                add_product(into[block], dy, rows)

        wants_x, wants_weight = ctx.needs_input_grad[:2]
        main_grad: Tensor | None = getattr(ctx.weight, "main_grad", None)
        into = torch.zeros_like(weight, dtype=lse.dtype) if main_grad is None else main_grad
        owner = ctx.weight_grads
        if main_grad is not None and owner is not None and owner.is_deferring and wants_weight:
            # The W pass computes the logits once more, unless they are kept: avoiding that is this operation's point.
            owner.submit(lambda: weight_pass(into))
            wants_weight = False
        grad_x = torch.zeros_like(rows, dtype=lse.dtype)
        space = space_of(rows, weight.shape[0])
        for n, block in enumerate(blocks_of(rows, weight.shape[0])):
            dy = linear(rows, weight[block]) if kept is None else kept[n]
            to_gradient_(dy, lse, grad, labels - block.start, space)
            if wants_x:
                grad_x += linear(dy, weight[block].t())
            if wants_weight:
                add_product(into[block], dy, rows)
        reduced = opens.backward(grad_x.to(x.dtype)).wait().view(x.shape) if wants_x else None
        grad_weight = into.to(weight.dtype) if wants_weight and main_grad is None else None
        return reduced, grad_weight, *(None,) * 4


_head_loss: Callable[..., Tensor] = _HeadLoss.apply


def _rows(x: Tensor) -> Tensor:
    return x.reshape(-1, x.shape[-1])


def wide_of(x: Tensor) -> torch.dtype:
    return torch.promote_types(x.dtype, torch.float32)


def exp_of(logits: Tensor, shift: Tensor, space: Tensor) -> Tensor:
    """exp(logits - shift) of logits [n, block] and shift [n], in space and its type; in room of its own on a GPU."""
    if not len(space):
        return (logits.to(space.dtype) - shift[:, None]).exp_()
    wide = space[: logits.numel()].view(logits.shape).copy_(logits)
    return exp_(wide.sub_(shift[:, None]))


def with_block(logits: Tensor, highest: Tensor, total: Tensor, space: Tensor) -> tuple[Tensor, Tensor]:
    """Maximum and sum of exponentials below it, each [n], with the logits [n, block] of one block more."""
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


def to_gradient_(logits: Tensor, log_sum: Tensor, scale: Tensor, labels: Tensor, space: Tensor) -> None:
    """Turn the logits [n, block] of a block into their gradients, where they lie.

    Args:
        log_sum: logarithm of the softmax's denominator [n]. scale: gradient of each token's loss [n].
        labels: [n], counted from the block's first row; any other number is a label in another block.
    """
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
    """Room for any block in float32. One for all: a system clears the memory that it hands out.

    A GPU's regions need none of it.
    """
    return rows.new_empty(0 if is_fused(rows) else len(rows) * min(_step(rows), width), dtype=wide_of(rows))


def _step(rows: Tensor) -> int:
    """Rows of the vocabulary in a block; whole 64s, as products of odd widths take slower kernels."""
    elements = BLOCK_ELEMENTS if rows.device.type == "cpu" else BLOCK_ELEMENTS_GPU
    return max(elements // max(len(rows), 1) // 64 * 64, 64)


def blocks_of(rows: Tensor, width: int) -> Iterator[slice]:
    step = _step(rows)
    return (slice(begin, min(begin + step, width)) for begin in range(0, width, step))


def columns_of(labels: Tensor, block: slice) -> tuple[Tensor, Tensor]:
    """A mask of the labels [n] that lie in a block, and their column [n, 1] there (0 for the others)."""
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
) -> Tensor:
    """Cross entropy of each token straight from the hidden states, `vocab_parallel_cross_entropy(x W^T, target)`.

    Args:
        x: [..., h], the same on all tp ranks; its gradient is summed over tp.
        weight: [v/t, h], this rank's rows of the output head; the gradient is added into its `main_grad`, in a W pass
            if the stage is in a B pass.
        target: [...], ids in 0..v-1; any other number, such as -100, is a token without loss.
        sequence_parallel: x is this rank's share of the sequence, its first dimension; target is whole.
        most_kept: logits that may be kept for backward, in x's type; by default 64M.
    Returns: [...] in float32 (float64 for float64 x). Logits are rounded to x's type, all else is float32.
        Of logits that are not kept 1M (256M on a GPU) are held at a time, for one matrix product more, two under a B/W
        split.
    """
    most = (KEPT_ELEMENTS if most_kept is None else most_kept) if torch.is_grad_enabled() else -1
    return _head_loss(x, weight, target, tp, sequence_parallel, most)
