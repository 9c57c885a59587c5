"""A rank's part of a run as data, on which saving, evaluation, the steps and callbacks act."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import nn

from megapipe.config import Config
from megapipe.distributed.mesh import ProcessMesh
from megapipe.optim.lr import LRSchedule, decoupled_rate, learning_rate, weight_decay
from megapipe.optim.optimizer import Optimizer
from megapipe.optim.rule import Rates
from megapipe.plan import Plan
from megapipe.training.progress import Progress
from megapipe.training.report.reporter import Reporter
from megapipe.training.steps.stages import Stages


@dataclass(frozen=True)
class Run:
    """One rank's part of a run.

    Attributes:
        modules: the stages of this rank, in ascending order.
        stages: those with their data, under the table and batch of the next step.
        progress: where the run is; it moves with every step.
        curve: of the flags, or of the checkpoint that the run goes on from.
        own_rate: samples -> learning rate, in place of the curve's; the program's (Hooks.lr).
    """

    config: Config
    mesh: ProcessMesh
    plan: Plan
    report: Reporter
    modules: Sequence[nn.Module]
    stages: Stages
    optimizer: Optimizer
    progress: Progress
    curve: LRSchedule
    own_rate: Callable[[int], float] | None

    def say(self, text: str) -> None:
        """Print on the speaking rank."""
        self.report.say(text)

    def rate(self) -> float:
        """The learning rate of the next step."""
        samples = self.progress.scheduled_samples
        return learning_rate(self.curve, samples) if self.own_rate is None else self.own_rate(samples)

    def rates(self) -> Rates:
        """All rates of the next step."""
        samples, curve = self.progress.scheduled_samples, self.curve
        return Rates(self.rate(), decoupled_rate(curve, samples, self.config.optimizer), weight_decay(curve, samples))
