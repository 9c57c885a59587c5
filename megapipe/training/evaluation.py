"""The evaluations of a run: each goes on where the last has ended; at the end of the run on the test set too."""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from functools import reduce
from operator import add

from megapipe.data.build import Datasets
from megapipe.pipeline_parallel.passes.begin import Weights
from megapipe.plan import with_batch
from megapipe.training.hooks import Hooks
from megapipe.training.reading import BatchesAt, Reading
from megapipe.training.run import Run
from megapipe.training.steps.stages import Stages
from megapipe.training.steps.step import weights_of


def evaluate(
    stages: Stages, batches_at: BatchesAt, consumed: int, iters: int, weights: Sequence[Weights] | None = None
) -> dict[str, float]:
    """Means of what loss_func reports in `iters` global batches: all sums over all counts, as in Megatron-LM.

    weights: as of `Stages.run`.
    """
    size = stages.config.global_batch_size
    starts = range(consumed, consumed + iters * size, size)
    totals = (stages.run(batches_at(start), start, evaluate=True, weights=weights)() for start in starts)
    return reduce(add, totals).means


class Evaluation:
    """The evaluations of a run. Collective. check_files: raises if a file was cut off, which would kill the reader."""

    def __init__(
        self, run: Run, hooks: Hooks, reading: Reading, data: Datasets, check_files: Callable[[], None]
    ) -> None:
        self._run, self._hooks, self._check_files, config = run, hooks, check_files, run.config.evaluation
        self._stages = run.stages.under(config, with_batch(run.plan, config).schedule)
        self._valid, self._test = reading.evaluation(data.valid), reading.evaluation(data.test)

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
        self._check_files()
        if batches_at is None or not iters:
            return
        begin = progress.consumed_valid_samples if consumed is None else consumed
        by_hand = run.config.guards.manual_gc and not run.config.guards.no_manual_gc_eval
        if by_hand:
            gc.collect()
        # Weights whose gathering the next step would begin are needed now.
        run.optimizer.gathers.settle()
        losses = evaluate(self._stages, batches_at, begin, iters, weights_of(run.optimizer))
        end = begin + iters * run.config.evaluation.global_batch_size
        if consumed is None:
            progress.consumed_valid_samples = end
        run.report.validation(losses, where, range(begin, end), progress)
        self._hooks.call("on_evaluation", run, where, losses)
        if by_hand:
            gc.collect(0)  # what the evaluation left
