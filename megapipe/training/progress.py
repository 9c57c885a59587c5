"""A run's place in its iterations and samples."""

from __future__ import annotations

from dataclasses import dataclass, field

from megapipe.checkpoint.save_load import LoadedState
from megapipe.config import Config, PrecisionConfig
from megapipe.optim.loss_scale import LossScale
from megapipe.training.steps.step import StepResult


@dataclass
class Progress:
    """The place of a run; saved with every checkpoint.

    Attributes:
        skipped_samples: those of iterations that updated nothing, which the learning rate does not count.
    """

    iteration: int = 0
    consumed_train_samples: int = 0
    consumed_valid_samples: int = 0
    skipped_samples: int = 0
    loss_scale: LossScale = field(default_factory=LossScale)

    @staticmethod
    def after(loaded: LoadedState, precision: PrecisionConfig) -> Progress:
        """The place of a checkpoint; a dynamic loss scale goes on from its own only."""
        scale = LossScale(**loaded.state.get("loss_scale", {}))
        return Progress(
            loaded.iteration,
            loaded.consumed_train_samples,
            loaded.consumed_valid_samples,
            loaded.state.get("skipped_samples", 0),
            scale if scale.dynamic and precision.dynamic_loss_scale else LossScale.start(precision),
        )

    def advance(self, result: StepResult, precision: PrecisionConfig) -> None:
        """An iteration has ended."""
        self.iteration += 1
        self.consumed_train_samples += result.batch
        self.skipped_samples += result.batch * result.skipped
        self.loss_scale = self.loss_scale.after(result.skipped, precision)

    def last_iteration(self, config: Config) -> int:
        """The iteration where the run ends. --train-samples counts samples, also those of batches of another size."""
        if (samples := config.batch.train_samples) is None:
            return config.train_iters
        return self.iteration + config.batch_sizes.iterations(self.consumed_train_samples, samples)

    @property
    def scheduled_samples(self) -> int:
        """The samples by which the learning rate has moved on its curve."""
        return self.consumed_train_samples - self.skipped_samples
