"""When a run evaluates, and on which samples: each time where the last has ended, at the end on the test set too."""

from __future__ import annotations

from typing import TYPE_CHECKING

from megapipe.data.build import Datasets
from megapipe.data.sources import refuse_cut_off
from megapipe.training.reading import BatchesAt
from megapipe.training.steps.step import Pipeline, evaluate

if TYPE_CHECKING:
    from megapipe.training.pretrain import Run


class Evaluation:
    """The evaluations of a run. Collective. pipeline: under the batch of an evaluation."""

    def __init__(self, run: Run, pipeline: Pipeline, data: Datasets) -> None:
        self._run, self._pipeline = run, pipeline
        self._valid, self._test = run.reading.evaluation(data.valid), run.reading.evaluation(data.test)

    def look(self) -> None:
        """Evaluate, if that is due after this iteration."""
        data, n = self._run.config.data, self._run.progress.iteration
        if data.eval_interval and n % data.eval_interval == 0 and n >= (data.start_eval_at_iter or 0):
            self._evaluate(self._valid, f"iteration {n}")
            self._run.report.pause()

    def finish(self) -> None:
        """Evaluate at the end of the run."""
        data, n = self._run.config.data, self._run.progress.iteration
        if data.skip_train or data.eval_interval:
            self._evaluate(self._valid, f"iteration {n} on validation set", 0 if data.skip_train else None)
            self._evaluate(self._test, f"iteration {n} on test set", 0)

    def _evaluate(self, batches_at: BatchesAt | None, where: str, consumed: int | None = None) -> None:
        """consumed: where to begin; default: where the last evaluation has ended."""
        run, progress, iters = self._run, self._run.progress, self._run.config.data.eval_batches
        refuse_cut_off(run.files)
        if batches_at is None or not iters:
            return
        begin = progress.consumed_valid_samples if consumed is None else consumed
        run.optimizer.settle()
        losses = evaluate(self._pipeline, batches_at, begin, iters)
        end = begin + iters * run.config.evaluation.global_batch_size
        if consumed is None:
            progress.consumed_valid_samples = end
        run.report.validation(losses, where, range(begin, end), progress)
        run.seams.tell("on_evaluation", run, where, losses)
