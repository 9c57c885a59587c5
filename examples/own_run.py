"""A run with a rate curve, parameter groups, callbacks and flags of its own: pretrain_gpt.py with four things more.

torchrun --nproc-per-node 2 examples/own_run.py --half-life 1000 --mark after ... (the flags of pretrain_gpt.py)
"""

import math
from dataclasses import dataclass, field

from torch import Size

from megapipe.config import Config
from megapipe.flags.parse import parse
from megapipe.models.provider import gpt_provider
from megapipe.optim.rule import Group, usual_groups
from megapipe.training.forward_step import forward_step
from megapipe.training.hooks import Callback, Hooks
from megapipe.training.pretrain import pretrain
from megapipe.training.run import Run
from megapipe.training.steps.step import StepResult


@dataclass(frozen=True)
class Mine:
    """Flags of this program; the docstring under a field is its help."""

    half_life: int = 1000
    """Samples after which the learning rate has halved."""
    mark: str = "step"
    """Word before what the callback prints."""


@dataclass(frozen=True)
class MyConfig(Config):
    mine: Mine = field(default_factory=Mine)


class Perplexity(Callback):
    def __init__(self, mark: str) -> None:
        self.mark = mark

    def after_step(self, run: Run, result: StepResult) -> None:
        if run.mesh.world.rank == 0:
            print(f"{self.mark} {run.progress.iteration}: perplexity {math.exp(result.losses['lm loss']):.3f}")


def hooks(config: MyConfig) -> Hooks:
    def groups(name: str, shape: Size) -> Group:
        return Group(lr=0.5) if "embedding" in name else usual_groups(name, shape)

    def rate(samples: int) -> float:
        return float((config.optimizer.lr or 0.0) * 0.5 ** (samples / config.mine.half_life))

    return Hooks(groups, rate, (Perplexity(config.mine.mark),))


if __name__ == "__main__":
    flags = parse(MyConfig)
    pretrain(flags, gpt_provider, forward_step, hooks=hooks(flags))
