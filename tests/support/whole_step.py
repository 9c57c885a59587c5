"""One whole step of an optimizer on gradients that are given, as training takes it."""

import math
from dataclasses import dataclass

from torch import Tensor

from megapipe.optim.optimizer import Optimizer
from megapipe.optim.reduction import Reduction
from megapipe.optim.rule import Rates


@dataclass(frozen=True)
class StepInfo:
    """What a step found: the norm before clipping, and the gradient elements that are zero, if asked for."""

    grad_norm: float
    skipped: bool = False
    num_zeros: int | None = None


def take_step(
    optimizer: Optimizer,
    lr: float,
    grad_scale: float | Tensor = 1.0,
    count_zeros: bool = False,
    ends_lr: float | None = None,
    sums: Reduction | None = None,
) -> StepInfo:
    """Reduce, scale, clip and update, unless the norm is not finite. Collective over the mesh.

    sums: of this step, some of which have begun.
    """
    gradients = optimizer.reduce(grad_scale, sums)
    norm = gradients.norm()
    if not math.isfinite(norm):
        return StepInfo(norm, skipped=True)
    zeros = optimizer.count_zeros() if count_zeros else None
    optimizer.update(gradients, Rates(lr, ends_lr), optimizer.shrink(norm))
    return StepInfo(norm, num_zeros=zeros)
