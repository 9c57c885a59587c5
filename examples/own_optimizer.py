"""An optimizer of your own: Lion (Chen et al. 2023), named on the command line.

    torchrun --nproc-per-node 2 pretrain_gpt.py --optimizer examples/own_optimizer.py:lion ...

It sees names and shapes; data parallel, ZeRO-1, clipping, checkpoints and every layout come with it.
"""

from __future__ import annotations

from collections.abc import Sequence

from megapipe.config import OptimizerConfig
from megapipe.optim.rule import Part


class Lion:
    """w -= lr (sign(b1 m + (1 - b1) g) + decay w); m = b2 m + (1 - b2) g."""

    elementwise = True  # each number depends on its own gradient and momentum alone: ZeRO-1 may split parameters
    state = ("momentum",)  # one tensor of zeros for every parameter, saved with the checkpoint

    def __init__(self, beta1: float, beta2: float) -> None:
        self.beta1, self.beta2 = beta1, beta2

    def update(self, parts: Sequence[Part], steps: int) -> None:
        for part in parts:
            momentum = part.state["momentum"]
            step = momentum.lerp(part.grad, 1 - self.beta1).sign_()
            part.value.mul_(1 - part.lr * part.weight_decay).sub_(step, alpha=part.lr)
            momentum.lerp_(part.grad, 1 - self.beta2)


def lion(flags: OptimizerConfig) -> Lion:
    return Lion(flags.adam_beta1, flags.adam_beta2)
