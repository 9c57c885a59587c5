"""Cross entropy over a vocabulary split over tensor-parallel ranks; logits are never gathered."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from megapipe.distributed.axis import Axis


class _CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, target: Tensor, tp: Axis) -> Tensor:
        wide = torch.promote_types(logits.dtype, torch.float32)
        width = logits.shape[-1]
        # The maximum keeps exp from overflowing. It must be the same on all ranks, because their
        # sums of exponentials are added. In 16 bits it is exact, so it precedes the conversion.
        highest = tp.all_reduce(logits.amax(dim=-1).to(wide), "max")
        # The target's column in this rank's slice; column 0 stands in for a target elsewhere.
        local = target - tp.rank * width
        outside = (local < 0) | (local >= width)
        local = local.masked_fill(outside, 0).unsqueeze(-1)
        at_target = logits.gather(-1, local).squeeze(-1).to(wide) - highest
        # A target is on one rank; the other ranks add a zero.
        at_target = tp.all_reduce(at_target.masked_fill(outside, 0.0))

        # One copy of the logits in all: either the subtraction makes it, or the conversion.
        shift = highest.unsqueeze(-1)
        shifted = logits - shift if logits.dtype == wide else logits.to(wide).sub_(shift)
        exp = exp_(shifted)
        total = tp.all_reduce(exp.sum(dim=-1))
        ignored = without_loss(target, width * tp.size)
        # The softmax takes the memory of the exponentials, so no second tensor of this size exists.
        ctx.save_for_backward(exp.div_(total.unsqueeze(-1)), local, outside, ignored)
        ctx.dtype = logits.dtype
        return (total.log() - at_target).masked_fill_(ignored, 0.0)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        softmax, local, outside, ignored = ctx.saved_tensors
        grad = grad.masked_fill(ignored, 0.0)
        # In place, though the tensor is saved: autograd refuses a second backward.
        softmax.mul_(grad.unsqueeze(-1))
        # softmax - one_hot (Shoeybi et al. 2019). A label of another rank adds 0 to column 0.
        softmax.scatter_add_(-1, local, -grad.masked_fill(outside, 0.0).unsqueeze(-1))
        return softmax.to(ctx.dtype), None, None


_cross_entropy: Callable[..., Tensor] = _CrossEntropy.apply


def vocab_parallel_cross_entropy(logits: Tensor, target: Tensor, tp: Axis) -> Tensor:
    """Return each token's cross entropy, without gathering logits (Shoeybi et al. 2019, sec. 3).

    Costs three all-reduces of [s, b] over tp. Memory: 4 bytes for each logit, from forward to
    backward; backward adds a tensor as large as 16-bit logits. Backward can run only once.

    Args:
        logits: [s, b, v/t], this rank's slice of the vocabulary, any float type.
        target: [s, b], global token ids in 0..v-1. Any other number, such as -100, marks a token
            without loss.
    Returns: [s, b] in float32 (float64 for float64 logits); 0 for tokens without loss.
    """
    return _cross_entropy(logits, target, tp)


def without_loss(target: Tensor, vocab: int) -> Tensor:
    """Return a mask of target's shape: True for numbers outside of 0..vocab-1.

    Tokens with such a number have loss 0 and no gradient, as with torch's ignore_index.
    """
    return (target < 0) | (target >= vocab)


def exp_(x: Tensor) -> Tensor:
    """Compute e^x in place, and return x.

    A CPU uses torch's exp2, which is four times as fast there as torch's exp.
    """
    if x.device.type == "cpu":
        return x.mul_(math.log2(math.e)).exp2_()
    return x.exp_()
