"""AdamW (Loshchilov and Hutter 2019, algorithm 2) in one sweep: gradients are scaled and clipped, moments, weights and
their 16-bit copy made in one reading and writing of each."""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.optim.adamw import adamw

from megapipe.config import TrainConfig
from megapipe.kernels import cpu
from megapipe.kernels.region import region
from megapipe.optim.rule import Part, multiply


def sweep(part: Part, train: TrainConfig, steps: int) -> None:
    """Update a part of float32 or float64. steps: updates made before this one."""
    scale, shrink = part.factors
    first, second = part.state["exp_avg"], part.state["exp_avg_sq"]
    tensors = (part.value, part.grad, first, second)
    decay = 1 - part.lr * part.weight_decay
    step = -part.lr / (1 - train.adam_beta1 ** (steps + 1))
    root = math.sqrt(1 - train.adam_beta2 ** (steps + 1))
    betas = 1 - train.adam_beta1, train.adam_beta2, 1 - train.adam_beta2, train.adam_eps
    wide = {x.dtype for x in tensors}
    if wide == {torch.float32} and cpu.has_loops(*tensors, *([] if part.model is None else [part.model])):
        cpu.adamw_(*tensors, part.model, _there(scale, part.value), (shrink, decay, step, root, *betas))
    elif part.value.is_cuda:
        # On the device, for a kernel that is compiled for a number would be compiled again for the next.
        numbers = (scale, shrink, decay, step, root)
        _adamw(*tensors, part.model, *(_there(x, part.value) for x in numbers), *betas)
    else:
        multiply(part.grad, part.factors)
        adamw(
            [part.value],
            [part.grad],
            [first],
            [second],
            [],
            [torch.full((), float(steps))],  # it adds the one of this step
            fused=True,
            amsgrad=False,
            beta1=train.adam_beta1,
            beta2=train.adam_beta2,
            lr=part.lr,
            weight_decay=part.weight_decay,
            eps=train.adam_eps,
            maximize=False,
        )
        part.round_value()


def _there(x: float | Tensor, like: Tensor) -> Tensor:
    """A number where the weights are; one that is there already is not read by the host."""
    return x.to(like) if isinstance(x, Tensor) else torch.full((), x, dtype=like.dtype, device=like.device)


@region(
    "adamw(Tensor(a!) value, Tensor(b!) grad, Tensor(c!) exp_avg, Tensor(d!) exp_avg_sq, Tensor(e!)? model, "
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
    grad.mul_(scale).mul_(shrink)
    exp_avg.lerp_(grad, towards)
    exp_avg_sq.mul_(beta2).addcmul_(grad, grad, value=rest2)
    value.mul_(decay).add_(exp_avg * step / (exp_avg_sq.sqrt() / root + epsilon))
    if model is not None:
        model.copy_(value)
