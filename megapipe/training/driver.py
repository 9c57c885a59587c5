"""The steps of a run, one after the other; each ends at once or, without a barrier at the update, within the next.

Without a barrier losses and norm are summed while the next step's first forwards run; V, before the first pass that
writes a gradient, reads them. After a wrong guess (see step.py) those forwards run again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

import torch

from megapipe.data.loader import Microbatch
from megapipe.distributed.late import Late, read_together
from megapipe.plan import with_batch
from megapipe.training.guards.numbers import Guard
from megapipe.training.reading import Awaited, BatchesAt
from megapipe.training.run import Run
from megapipe.training.saving import Saving
from megapipe.training.seams import Seams
from megapipe.training.steps.step import StepResult, Update, train_step, weights_of
from megapipe.training.steps.totals import Totals


class Driver:
    """Runs the steps of a run. With --enable-optimizer-post-validation a step stays open until the next one's V.

    It ends at once if what follows needs its weights or may end the run, and where guessing does not pay: after a step
    that was clipped or skipped, until --post-validation-after steps in a row were neither.

    Attributes:
        good: steps in a row that were neither.
    """

    def __init__(self, run: Run, seams: Seams, saving: Saving, batches_at: BatchesAt) -> None:
        self.run, self.seams, self.guard = run, seams, Guard(run.config.train, run.say)
        self._saving, self._batches_at = saving, batches_at
        self._barrier = not run.config.parallel.enable_optimizer_post_validation
        self.good, self._leaving = 0, False
        self._ending: tuple[Update, Late[Totals], Late[bool]] | None = None  # the last: is any rank to stop?
        if seams.callbacks and not self._barrier:
            run.say(
                "WARNING: --enable-optimizer-post-validation waits in every step, for the callbacks before the next"
            )

    @property
    def open(self) -> bool:
        """Has a step begun that has not ended?"""
        return self._ending is not None

    def step(self, leaving: Callable[[], bool]) -> StepResult | None:
        """The next step. Returns: its result, not told of yet; None if it stays open. leaving: is this rank to stop?"""
        return self.whole() if self._barrier else self._step(leaving)

    def whole(self) -> StepResult:
        """One step from its passes to its end."""
        run, progress = self.run, self.run.progress
        consumed, n, scale = progress.consumed_train_samples, progress.iteration + 1, progress.loss_scale.scale
        given = run.stages, run.optimizer, self._batches(consumed), consumed, run.rates()
        step = partial(train_step, *given, loss_scale=scale, iteration=n)
        result = self.guard.step(lambda refuses: step(refuses=refuses), n, scale, self._saving.last)
        progress.advance(result, run.config.train)
        return result

    def ended(self, result: StepResult) -> None:
        """Tell of an iteration."""
        self.seams.tell("after_step", self.run, result)
        self.run.report.iteration(result, self.run.progress, self.run.rate(), self.run.optimizer)

    def _batches(self, consumed: int) -> Sequence[Microbatch]:
        """The microbatches of the step behind so many samples. The stages have its batch size from then on."""
        run = self.run
        if (size := run.config.batch_sizes.at(consumed)) != run.stages.config.global_batch_size:
            config = run.config.with_batch(size)
            run.stages.take(config, with_batch(run.plan, config).schedule)
        with run.report.reading():
            step = self._batches_at(consumed)
        return Awaited(step, run.report.reading)

    def _step(self, leaving: Callable[[], bool]) -> StepResult | None:
        """All passes of a step, this rank's update among them; the step before ends within them, if it is open."""
        run, updates, n = self.run, list[Update](), self.run.progress.iteration + self.open + 1
        consumed = run.progress.consumed_train_samples + self.open * run.stages.config.global_batch_size
        batches = self._batches(consumed)

        def update() -> None:
            if not updates:  # at the first of this rank's stages: all of them are reduced
                scale, late = 1 / run.mesh.dp.size / self._scale(), not self._waits(n)
                updates.append(Update.begin(run.stages, run.optimizer, run.rates(), scale, late=late))

        def validate(chunk: int) -> bool:
            # V stands before the first pass that writes a gradient: until here the gradients of the step before are
            # whole, and a wrong update can be done again from them.
            before = self._end() if self.open else None
            if before is not None:
                self.ended(before)
            for buffers in run.optimizer.chunks[chunk]:
                buffers.zero_grad()
            return before is not None and before.undone

        own = enumerate(weights_of(run.optimizer))
        weights = [replace(weights, update=update, validate=partial(validate, chunk)) for chunk, weights in own]
        totals = run.stages.run(batches, consumed, loss_scale=self._scale, weights=weights, iteration=n)
        # Ranks agree on leaving in the all-reduces that run beside the next forwards: a signal is heeded a step later,
        # and no step waits for the question.
        wants = torch.full(
            (), leaving(), dtype=torch.float64, device=run.mesh.device
        )  # torch.tensor would be waited for
        any_leaving = Late(run.mesh.world.start_all_reduce(wants, "max").wait, lambda values: bool(values[0]))
        self._ending = updates[0], totals, any_leaving
        return self._end() if updates[0].kept is None else None

    def _end(self) -> StepResult:
        """Wait for the numbers of the step that is open, and end it."""
        assert self._ending is not None
        (update, totals_of, leaving), self._ending = self._ending, None
        run, progress = self.run, self.run.progress
        totals, norm, self._leaving = read_together(totals_of, update.norm, leaving)
        result = update.end(norm, totals)
        self.good = 0 if result.skipped or run.optimizer.shrink(norm) < 1 else self.good + 1
        self.guard.judge(result, progress.iteration + 1, progress.loss_scale.scale, self._saving.last)
        progress.advance(result, run.config.train)
        return result

    def _waits(self, n: int) -> bool:
        """Is iteration n to end at once?"""
        config = self.run.config
        # What follows such an iteration reads its weights, or may be the last thing that the run does.
        intervals = (
            config.data.eval_interval,
            config.checkpoint.save_interval,
            config.train.exit_interval,
            config.train.check_weight_hash_across_dp_replicas_interval,
            config.log.log_interval if config.checkpoint.trigger_path else None,
        )
        guesses = self.good >= config.parallel.post_validation_after and not self.seams.callbacks
        last = n == self.run.progress.last_iteration(config)
        return not guesses or self._leaving or last or any(every and n % every == 0 for every in intervals)

    def _scale(self) -> float:
        """The loss scale of this step; while the step before is open, a guess."""
        scale = self.run.progress.loss_scale
        return (scale.after(False, self.run.config.train) if self.open else scale).scale
