"""Count a run's iterations and samples."""

from __future__ import annotations

from dataclasses import dataclass, field

from megapipe.checkpoint.save_load import LoadedState
from megapipe.config import Config, PrecisionConfig
from megapipe.optim.loss_scale import LossScale
from megapipe.training.steps.step import StepResult


@dataclass
class Progress:
    """The iterations and samples of a run so far, saved with every checkpoint.

    `after` restores the progress from a checkpoint. `advance` counts a step. `last_iteration`
    returns the end of the run, and `scheduled_samples` the place on the learning-rate curve.

    Attributes:
        iteration: iterations so far, skipped ones included.
        consumed_train_samples: training samples so far.
        consumed_valid_samples: samples of evaluations during training.
        skipped_samples: samples of skipped iterations, which the learning rate does not count.
        loss_scale: the loss scale of the next step.
    """

    iteration: int = 0
    consumed_train_samples: int = 0
    consumed_valid_samples: int = 0
    skipped_samples: int = 0
    loss_scale: LossScale = field(default_factory=LossScale)

    @staticmethod
    def after(loaded: LoadedState, precision: PrecisionConfig) -> Progress:
        """Return the progress of a run that continues from a checkpoint.

        A dynamic loss scale continues only from a dynamic one.

        Args:
            loaded: the state in the checkpoint.
            precision: this run's flags of the loss scale.
        """
        # An old or a foreign checkpoint may have no loss scale, which is then a constant one.
        scale = LossScale(**loaded.state.get("loss_scale", {}))
        if not (scale.dynamic and precision.dynamic_loss_scale):
            scale = LossScale.start(precision)
        return Progress(
            loaded.iteration,
            loaded.consumed_train_samples,
            loaded.consumed_valid_samples,
            loaded.state.get("skipped_samples", 0),
            scale,
        )

    def advance(self, result: StepResult, precision: PrecisionConfig) -> None:
        """Count a step that has ended.

        Args:
            result: the outcome of the step.
            precision: the flags of the loss scale.
        """
        self.iteration += 1
        # Also of a skipped step: its samples are not read again.
        self.consumed_train_samples += result.batch
        if result.skipped:
            self.skipped_samples += result.batch
        self.loss_scale = self.loss_scale.after(result.skipped, precision)

    def pass_over(self, batch: int) -> None:
        """Count an iteration whose samples are passed over without a step.

        batch: number of samples of the iteration.
        """
        self.iteration += 1
        self.consumed_train_samples += batch
        self.skipped_samples += batch

    def last_iteration(self, config: Config) -> int:
        """Return the iteration at which the run ends.

        With --train-samples this depends on the batch sizes of the steps so far.
        """
        samples = config.batch.train_samples
        if samples is None:
            return config.train_iters
        return self.iteration + config.batch_sizes.iterations(self.consumed_train_samples, samples)

    @property
    def scheduled_samples(self) -> int:
        """Return the number of samples by which the learning rate has advanced on its curve.

        Samples of skipped iterations do not count.
        """
        return self.consumed_train_samples - self.skipped_samples
