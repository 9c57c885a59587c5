"""A rank's part of a run as data, which steps, evaluations, saves and callbacks share."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import nn

from megapipe.config import Config
from megapipe.distributed.meeting.together import on_first
from megapipe.distributed.mesh import ProcessMesh
from megapipe.optim.lr import LRSchedule, decoupled_rate, learning_rate, weight_decay
from megapipe.optim.optimizer import Optimizer
from megapipe.optim.rule import Rates
from megapipe.plan import Plan, with_batch
from megapipe.plan.split import is_searched, schedule_name
from megapipe.schedule import Schedule, from_json, to_json
from megapipe.training.progress import Progress
from megapipe.training.report.reporter import Reporter
from megapipe.training.steps.stages import Stages


@dataclass(frozen=True)
class Run:
    """One rank's part of a run, which steps, evaluations, saves and callbacks share.

    `say` prints a line. `rate` and `rates` return the learning rates of the next step.
    `schedule_of` returns the table for another batch size.

    `mirrored` says whether each stage exists on two ranks, as under DualPipe.

    Attributes:
        config: the run's configuration.
        mesh: this rank's mesh.
        plan: the plan of the run.
        report: writes the log.
        modules: the stages of this rank in ascending order.
        stages: runs the passes over `modules`, with the table and batch size of the next step.
        optimizer: this rank's optimizer.
        progress: iterations and samples so far; every step changes it.
        curve: the learning-rate curve of the flags, or of the loaded checkpoint.
        own_rate: (samples) -> learning rate, which the user's program gives in place of `curve`;
            else None.
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

    @property
    def mirrored(self) -> bool:
        """Return whether each stage exists on two ranks, as under DualPipe."""
        return self.plan.schedule.placement.num_chains > 1

    def say(self, text: str) -> None:
        """Print a line, on the rank that writes the log."""
        self.report.say(text)

    def schedule_of(self, config: Config) -> Schedule:
        """Return the run's table, remade for the batch size of `config`.

        All ranks call it. Where the order is searched, rank 0 searches for all of them.
        """
        # A named order is a function of the configuration, so each rank makes the table itself.
        if not is_searched(schedule_name(config)):
            return with_batch(self.plan, config).schedule
        found = on_first(self.mesh, lambda: to_json(with_batch(self.plan, config).schedule))
        return from_json(found)

    def rate(self) -> float:
        """Return the learning rate of the next step."""
        samples = self.progress.scheduled_samples
        if self.own_rate is not None:
            return self.own_rate(samples)
        return learning_rate(self.curve, samples)

    def rates(self) -> Rates:
        """Return the learning rates and weight decay of all parameter groups for the next step."""
        samples = self.progress.scheduled_samples
        ends_lr = decoupled_rate(self.curve, samples, self.config.optimizer)
        return Rates(self.rate(), ends_lr, weight_decay(self.curve, samples))
