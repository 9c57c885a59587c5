"""The steps of a run, one after the other; each ends at once or, without a barrier at the update, within the next.

Without a barrier losses and norm are summed while the next step's first forwards run; V, before the first pass that
writes a gradient, reads them. After a wrong guess (see step.py) those forwards run again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch

from megapipe.data.loader import Microbatch
from megapipe.distributed.late import Late, read_together
from megapipe.plan import with_batch
from megapipe.training.guards.numbers import Guard
from megapipe.training.hooks import Hooks
from megapipe.training.reading import Awaited, BatchesAt
from megapipe.training.run import Run
from megapipe.training.saving import Saving
from megapipe.training.steps.step import StepResult, Update, train_step, weights_of
from megapipe.training.steps.totals import Totals


@dataclass(frozen=True)
class Open:
    """A step whose passes are over and whose update was a guess.

    Attributes:
        leaving: is any rank to stop?
    """

    update: Update
    totals: Late[Totals]
    leaving: Late[bool]


@dataclass(frozen=True)
class Course:
    """What a step leaves for the next.

    Attributes:
        result: of the step that ended last and was not reported yet.
        open: the step that the next one ends.
        good: steps in a row that were neither clipped nor skipped.
        leaving: is any rank to stop?
    """

    result: StepResult | None = None
    open: Open | None = None
    good: int = 0
    leaving: bool = False


class Driver:
    """Runs the steps of a run. With --enable-optimizer-post-validation a step stays open until the next one's V.

    It ends at once if what follows needs its weights or may end the run, and where guessing does not pay: after a step
    that was clipped or skipped, until --post-validation-after steps in a row were neither.
    """

    def __init__(self, run: Run, hooks: Hooks, saving: Saving, batches_at: BatchesAt) -> None:
        self.run, self.hooks, self.guard = run, hooks, Guard(run.config, run.say)
        self._saving, self._batches_at = saving, batches_at
        self._barrier = not run.config.parallel.enable_optimizer_post_validation
        if hooks.callbacks and not self._barrier:
            run.say(
                "WARNING: --enable-optimizer-post-validation waits in every step, for the callbacks before the next"
            )

    def step(self, before: Course, leaving: Callable[[], bool]) -> Course:
        """Run the next step. leaving: is this rank to stop?"""
        return Course(self.whole()) if self._barrier else self._step(before, leaving)

    def whole(self) -> StepResult:
        """One step from its passes to its end."""
        run, progress = self.run, self.run.progress
        consumed, n, scale = progress.consumed_train_samples, progress.iteration + 1, progress.loss_scale.scale
        given = run.stages, run.optimizer, self._batches(consumed), consumed, run.rates()
        step = partial(train_step, *given, loss_scale=scale, iteration=n)
        result = self.guard.step(lambda refuses: step(refuses=refuses), n, scale, self._saving.last)
        progress.advance(result, run.config.precision)
        return result

    def ended(self, result: StepResult) -> None:
        """Report an iteration."""
        self.hooks.call("after_step", self.run, result)
        self.run.report.iteration(result, self.run.progress, self.run.rate(), self.run.optimizer)

    def _batches(self, consumed: int) -> Sequence[Microbatch]:
        """The microbatches of the step after `consumed` samples. The stages have its batch size from then on."""
        run = self.run
        if (size := run.config.batch_sizes.at(consumed)) != run.stages.config.global_batch_size:
            config = run.config.with_batch(size)
            run.stages.take(config, with_batch(run.plan, config).schedule)
        with run.report.reading():
            step = self._batches_at(consumed)
        return Awaited(step, run.report.reading)

    def _step(self, course: Course, leaving: Callable[[], bool]) -> Course:
        """All passes of a step, this rank's update among them; the step before ends within them, if it is open."""
        run, updates, progress = self.run, list[Update](), self.run.progress
        ahead = course.open is not None
        n = progress.iteration + ahead + 1
        consumed = progress.consumed_train_samples + ahead * run.stages.config.global_batch_size
        batches = self._batches(consumed)
        sums = run.optimizer.reduction()

        def scale() -> float:
            """The loss scale of this step; a guess while the step before is open."""
            now = progress.loss_scale
            return (now.after(False, run.config.precision) if course.open else now).scale

        def update() -> None:
            if not updates:  # at the first of this rank's stages: all of them are reduced
                factor, waits = 1 / run.mesh.dp.size / scale(), self._waits(n, course)
                updates.append(Update.begin(run.stages, run.optimizer, sums, run.rates(), factor, guess=not waits))

        def validate(chunk: int) -> bool:
            # V stands before the first pass that writes a gradient: until here the gradients of the step before are
            # whole, and a wrong update can be done again from them.
            nonlocal course
            undone = False
            if course.open is not None:
                course = self.end(course.open, course.good)
                assert course.result is not None
                self.ended(course.result)
                undone = course.result.undone
            for buffers in run.optimizer.chunks[chunk]:
                buffers.zero_grad()
            return undone

        own = enumerate(weights_of(run.optimizer, sums))
        weights = [replace(weights, update=update, validate=partial(validate, chunk)) for chunk, weights in own]
        totals = run.stages.run(batches, consumed, loss_scale=scale, weights=weights, iteration=n)
        # Ranks agree on leaving in the all-reduces that run during the next forwards: a signal is heeded a step later,
        # and no step waits for the question.
        # torch.tensor would be waited for
        wants = torch.full((), leaving(), dtype=torch.float64, device=run.mesh.device)
        any_leaving = Late(run.mesh.world.start_all_reduce(wants, "max").wait, lambda values: bool(values[0]))
        begun = Open(updates[0], totals, any_leaving)
        if begun.update.backup is None:
            return self.end(begun, course.good)
        return replace(course, result=None, open=begun)

    def end(self, step: Open, good: int) -> Course:
        """Wait for the numbers of a step, and end it. good: steps in a row before it."""
        run, progress = self.run, self.run.progress
        totals, norm, leaving = read_together(step.totals, step.update.gradients.norm, step.leaving)
        result = step.update.end(norm, totals)
        good = 0 if result.skipped or run.optimizer.shrink(norm) < 1 else good + 1
        self.guard.judge(result, progress.iteration + 1, progress.loss_scale.scale, self._saving.last)
        progress.advance(result, run.config.precision)
        return Course(result, good=good, leaving=leaving)

    def _waits(self, n: int, course: Course) -> bool:
        """Return whether iteration n is to end at once."""
        config = self.run.config
        # What follows such an iteration reads its weights, or may be the last thing that the run does.
        intervals = (
            config.data.eval_interval,
            config.checkpoint.save_interval,
            config.guards.exit_interval,
            config.guards.check_weight_hash_across_dp_replicas_interval,
            config.log.log_interval if config.checkpoint.trigger_path else None,
        )
        guesses = course.good >= config.parallel.post_validation_after and not self.hooks.callbacks
        last = n == self.run.progress.last_iteration(config)
        return not guesses or course.leaving or last or any(every and n % every == 0 for every in intervals)
