"""Evaluate during a run and at its end.

Each evaluation during a run reads on where the last one stopped. The test set, and a run that only
evaluates, begin at the first sample.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from functools import reduce
from operator import add

from megapipe.data.build import Datasets
from megapipe.pipeline_parallel.passes.begin import Weights
from megapipe.training.hooks import Hooks
from megapipe.training.reading import BatchesAt, Reading
from megapipe.training.run import Run
from megapipe.training.steps.stages import Stages
from megapipe.training.steps.step import weights_of


def evaluate(
    stages: Stages,
    batches_at: BatchesAt,
    consumed: int,
    iters: int,
    weights: Sequence[Weights] | None = None,
) -> dict[str, float]:
    """Return {name: mean} of the values that loss_func reports.

    A mean is the sum of all values over the sum of all counts, as in Megatron-LM.

    Args:
        stages: this rank's stages, with the batch size of evaluations.
        batches_at: returns the microbatches of a step, given the number of samples before it.
        consumed: number of samples evaluated before.
        iters: number of global batches.
        weights: for each stage of this rank, the functions of passes that act on its weights; None
            if the table has no such pass.
    """
    size = stages.config.global_batch_size
    totals = []
    for start in range(consumed, consumed + iters * size, size):
        late = stages.run(batches_at(start), start, evaluate=True, weights=weights)
        totals.append(late())
    return reduce(add, totals).means


class Evaluation:
    """The evaluations of a run. All methods are collective over the world.

    `look` evaluates if an iteration asks for it, `finish` at the end of the run.

    Args:
        run: this rank's part of the run.
        hooks: changes that the user's program makes to the run.
        reading: reads this rank's samples.
        data: the datasets.
        check_files: raises if a data file was cut off, which would kill the process that reads it.
    """

    def __init__(
        self,
        run: Run,
        hooks: Hooks,
        reading: Reading,
        data: Datasets,
        check_files: Callable[[], None],
    ) -> None:
        self._run = run
        self._hooks = hooks
        self._check_files = check_files
        config = run.config.evaluation
        # The same modules with another batch size, which --rampup-batch-size does not change.
        self._stages = run.stages.under(config, run.schedule_of(config))
        self._valid = reading.evaluation(data.valid)
        self._test = reading.evaluation(data.test)

    def look(self) -> None:
        """Evaluate on the validation set, if --eval-interval asks for it after this iteration.

        No iteration before --start-eval-at-iter is evaluated.
        """
        data = self._run.config.data
        n = self._run.progress.iteration
        due = data.eval_interval and n % data.eval_interval == 0
        if due and n >= (data.start_eval_at_iter or 0):
            self._evaluate(self._valid, f"iteration {n}")
            self._run.report.pause()

    def finish(self) -> None:
        """Evaluate on the validation and the test set at the end of the run.

        Does nothing if neither --eval-interval nor --skip-train is given.
        """
        data = self._run.config.data
        n = self._run.progress.iteration
        if data.skip_train or data.eval_interval:
            # A run that only evaluates may load any checkpoint, and always sees the same samples.
            begin = 0 if data.skip_train else None
            self._evaluate(self._valid, f"iteration {n} on validation set", begin)
            self._evaluate(self._test, f"iteration {n} on test set", 0)

    def _evaluate(
        self, batches_at: BatchesAt | None, where: str, consumed: int | None = None
    ) -> None:
        """Run the evaluation batches once without training, and report the mean losses.

        Args:
            batches_at: returns the microbatches of a step, given the number of samples before it.
                None, without validation or test set: nothing is evaluated.
            where: the name of the evaluation in the report, such as "iteration 100".
            consumed: number of the first sample; by default where the last evaluation has stopped.
        """
        run = self._run
        progress = run.progress
        iters = run.config.data.eval_batches
        self._check_files()
        if batches_at is None or not iters:
            return
        # The test set, and a run that only evaluates, begin at the first sample.
        begin = progress.consumed_valid_samples if consumed is None else consumed
        guards = run.config.guards
        # With --manual-gc all ranks collect at the same places. A collection on one rank would make
        # all others wait for it.
        collects = guards.manual_gc and not guards.no_manual_gc_eval
        if collects:
            gc.collect()
        # The next training step would begin to gather updated weights; they are needed now.
        run.optimizer.gathers.settle()
        losses = evaluate(self._stages, batches_at, begin, iters, weights_of(run.optimizer))
        end = begin + iters * run.config.evaluation.global_batch_size
        if consumed is None:
            progress.consumed_valid_samples = end
        run.report.validation(losses, where, range(begin, end), progress)
        self._hooks.call("on_evaluation", run, where, losses)
        if collects:
            # Only young objects: the evaluation's.
            gc.collect(0)
