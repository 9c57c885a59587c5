"""Where a run is, and what happened since its last log line."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from megapipe.checkpoint.save_load import LoadedState
from megapipe.config import Config, TrainConfig
from megapipe.optim.loss_scale import LossScale
from megapipe.training.steps.step import StepResult


@dataclass
class Progress:
    """Where a run is; saved with every checkpoint.

    Attributes:
        skipped_samples: those of iterations that updated nothing, which the learning rate does not count.
    """

    iteration: int = 0
    consumed_train_samples: int = 0
    consumed_valid_samples: int = 0
    skipped_samples: int = 0
    loss_scale: LossScale = field(default_factory=LossScale)

    @staticmethod
    def after(loaded: LoadedState, train: TrainConfig) -> Progress:
        """Where a checkpoint was; a dynamic loss scale goes on from its own only."""
        scale = LossScale(**loaded.state.get("loss_scale", {}))
        return Progress(
            loaded.iteration,
            loaded.consumed_train_samples,
            loaded.consumed_valid_samples,
            loaded.state.get("skipped_samples", 0),
            scale if scale.dynamic and train.dynamic_loss_scale else LossScale.start(train),
        )

    def advance(self, result: StepResult, train: TrainConfig) -> None:
        """An iteration has ended."""
        self.iteration += 1
        self.consumed_train_samples += result.batch
        self.skipped_samples += result.batch * result.skipped
        self.loss_scale = self.loss_scale.after(result.skipped, train)

    def last_iteration(self, config: Config) -> int:
        """Where the run ends. --train-samples counts samples, also those read in batches of another size before."""
        if (samples := config.train.train_samples) is None:
            return config.train_iters
        return self.iteration + config.batch_sizes.iterations(self.consumed_train_samples, samples)

    @property
    def scheduled_samples(self) -> int:
        """Where the learning rate is on its curve."""
        return self.consumed_train_samples - self.skipped_samples


class Window:
    """What happened since the last log line."""

    def __init__(self) -> None:
        self.first = True
        self.last_seconds = 0.0
        self._last: dict[str, float] = {}
        self.clear()

    def told(self, *, regular: bool) -> None:
        """A line was printed. That of the first iteration comes beside the regular ones, as in Megatron-LM, and takes
        nothing out of them."""
        self.first = False
        if regular:
            self.clear()

    def clear(self) -> None:
        """Start after a line."""
        self.skipped = self.nan = self.late = self.undone = self.samples = self._iterations = 0
        self._sums: dict[str, tuple[float, int]] = {}
        self.seconds = 0.0
        self._since = time.monotonic()

    def add(self, result: StepResult) -> None:
        """Count an iteration; one that was skipped does not enter the mean loss unless it is the only one."""
        self.last_seconds = time.monotonic() - self._since
        self.seconds += self.last_seconds
        self._since = time.monotonic()
        self._iterations += 1
        self.samples += result.batch
        self.skipped += result.skipped
        self.nan += not result.finite
        self.late += result.late
        self.undone += result.undone
        for name, loss in result.shown.items() if not result.skipped else ():
            total, count = self._sums.get(name, (0.0, 0))
            self._sums[name] = total + loss, count + 1
        self._last = result.shown

    def restart(self) -> None:
        """Leave the time of an evaluation or a save out of the iterations' time."""
        self._since = time.monotonic()

    def seconds_per_iteration(self) -> float:
        """Mean time of an iteration."""
        return self.seconds / self._iterations

    def mean_losses(self) -> dict[str, float]:
        """Means over the iterations that advanced and reported the name; the last losses as they are if none did."""
        return {name: total / count for name, (total, count) in self._sums.items()} or self._last
