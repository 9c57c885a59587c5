"""Update by AdamW (Loshchilov and Hutter 2019, algorithm 2) in one sweep over memory.

Gradients are scaled and clipped, moments and weights updated and rounded to 16 bits, while each
tensor is read and written once.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.optim.adamw import adamw

from megapipe.config import OptimizerConfig
from megapipe.kernels import cpu
from megapipe.kernels.region import region
from megapipe.optim.rule import Part, multiply


def sweep(part: Part, flags: OptimizerConfig, steps: int) -> None:
    """Update parameters by AdamW in place, in float32 or float64.

    Args:
        part: the parameters, with their gradients, moments, learning rate and weight decay.
        flags: Adam's flags.
        steps: number of updates before this one.
    """
    scale, shrink = part.factors
    first = part.state["exp_avg"]
    second = part.state["exp_avg_sq"]
    tensors = (part.value, part.grad, first, second)
    decay = 1 - part.lr * part.weight_decay
    # Both bias corrections of the moments, in the form that torch's fused kernel computes.
    step = -part.lr / (1 - flags.adam_beta1 ** (steps + 1))
    root = math.sqrt(1 - flags.adam_beta2 ** (steps + 1))
    betas = (1 - flags.adam_beta1, flags.adam_beta2, 1 - flags.adam_beta2, flags.adam_eps)
    # The loops of kernels/cpu.c read and write all of these at once.
    written = tensors if part.model is None else (*tensors, part.model)
    wide = {x.dtype for x in tensors}
    if wide == {torch.float32} and cpu.has_loops(*written):
        factor = _there(scale, part.value)
        cpu.adamw_(*tensors, part.model, factor, (shrink, decay, step, root, *betas))
    elif part.value.is_cuda:
        # As tensors, because a kernel compiled for one number would be compiled again for the next.
        numbers = [_there(x, part.value) for x in (scale, shrink, decay, step, root)]
        _adamw(*tensors, part.model, *numbers, *betas)
    # float64 weights, or a machine without a C compiler: torch's kernel, with a sweep before it and
    # one after it.
    else:
        multiply(part.grad, part.factors)
        adamw(
            [part.value],
            [part.grad],
            [first],
            [second],
            [],
            # torch adds this step itself.
            [torch.full((), float(steps))],
            fused=True,
            amsgrad=False,
            beta1=flags.adam_beta1,
            beta2=flags.adam_beta2,
            lr=part.lr,
            weight_decay=part.weight_decay,
            eps=flags.adam_eps,
            maximize=False,
        )
        part.round_value()


def _there(x: float | Tensor, like: Tensor) -> Tensor:
    """Return the number x as a tensor with the type and device of `like`.

    The host does not read a tensor from the device.
    """
    if isinstance(x, Tensor):
        return x.to(like)
    return torch.full((), x, dtype=like.dtype, device=like.device)


@region(
    "adamw(Tensor(a!) value, Tensor(b!) grad, Tensor(c!) exp_avg, Tensor(d!) exp_avg_sq, "
    "Tensor(e!)? model, "
    "Tensor scale, Tensor shrink, Tensor decay, Tensor step, Tensor root, float towards, "
    "float beta2, float rest2, float epsilon) -> ()"
)
def _adamw(
    value: Tensor,
    grad: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    model: Tensor | None,
    scale: Tensor,
    shrink: Tensor,
    decay: Tensor,
    step: Tensor,
    root: Tensor,
    towards: float,
    beta2: float,
    rest2: float,
    epsilon: float,
) -> None:
    """Apply an AdamW update in place on a GPU, as one kernel if torch compiles it.

    Args:
        value, grad: the parameters and their gradient.
        exp_avg, exp_avg_sq: the two moments.
        model: 16-bit weights to which the value is rounded, or None.
        scale: factor on the gradient.
        shrink: a second factor on the gradient, from clipping by the norm.
        decay: factor on the value, 1 - learning rate x weight decay.
        step: minus the learning rate, divided by the first moment's bias correction.
        root: square root of the second moment's bias correction.
        towards: 1 - beta1.
        rest2: 1 - beta2.
        epsilon: the term added to the denominator.
    """
    grad.mul_(scale).mul_(shrink)
    exp_avg.lerp_(grad, towards)
    exp_avg_sq.mul_(beta2).addcmul_(grad, grad, value=rest2)
    value.mul_(decay).add_(exp_avg * step / (exp_avg_sq.sqrt() / root + epsilon))
    if model is not None:
        model.copy_(value)
