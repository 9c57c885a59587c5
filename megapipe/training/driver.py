"""Run the steps of a run, one after the other.

A step ends at once or, without a barrier at the update, during the next step. Without a barrier,
losses and norm are summed while the next step's first forwards run. V, a pass before the first one
that writes a gradient, reads them. After a wrong guess (see steps/step.py) those forwards run
again.

    step n     F B ... B update(guess)
    step n+1                           F F V        F B ...
                                           right: go on
                                           wrong: restore, update, run F F again
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch

from megapipe.data.loader import Microbatch
from megapipe.distributed.late import Late, read_together
from megapipe.training.guards.numbers import Guard
from megapipe.training.hooks import Hooks
from megapipe.training.reading import Awaited, BatchesAt
from megapipe.training.run import Run
from megapipe.training.saving import Saving
from megapipe.training.steps.step import StepResult, Update, train_step, weights_of
from megapipe.training.steps.totals import Totals


@dataclass(frozen=True)
class OpenStep:
    """A step whose passes have run, and whose gradient norm is still unknown.

    The update has run on the guess that nothing is clipped or skipped, or it waits for the norm.

    Attributes:
        update: the update, whose norm is still being computed.
        totals: the sums of the losses over all ranks, still under way.
        leaving: whether any rank wants to stop, still under way.
    """

    update: Update
    totals: Late[Totals]
    leaving: Late[bool]


@dataclass(frozen=True)
class Handover:
    """The state that a step hands over to the next one.

    Attributes:
        result: the outcome of the last complete step; None if it was reported already.
        open: the step that the next one completes; None if no step is open.
        good: number of steps in a row that were neither clipped nor skipped.
        leaving: whether any rank wants to stop.
    """

    result: StepResult | None = None
    open: OpenStep | None = None
    good: int = 0
    leaving: bool = False


class Driver:
    """Runs the steps of a run.

    `step` runs the next step; with --enable-optimizer-post-validation it may stay open: its update
    is checked by V, a pass of the following step. `end` completes an open step. `whole` runs a step
    to its end. `ended` reports it.

    A step ends at once if the following work needs its weights, or if the run may end after it. It
    also does at the start and after a clipped or skipped step, until --post-validation-after steps
    in a row were neither.

    Args:
        run: this rank's part of the run.
        hooks: the user's changes to the run, such as callbacks.
        saving: knows the last checkpoint, which messages name.
        batches_at: returns the microbatches of a step, given the number of samples before it.
    """

    def __init__(self, run: Run, hooks: Hooks, saving: Saving, batches_at: BatchesAt) -> None:
        self.run = run
        self.hooks = hooks
        self.guard = Guard(run.config, run.say)
        self._saving = saving
        self._batches_at = batches_at
        self._barrier = not run.config.parallel.enable_optimizer_post_validation
        if hooks.callbacks and not self._barrier:
            run.say(
                "WARNING: --enable-optimizer-post-validation waits in every step, for the "
                "callbacks before the next"
            )

    def step(self, before: Handover, leaving: Callable[[], bool]) -> Handover:
        """Run the next step, and return the state for the step after it.

        Args:
            before: the state that the last step handed over.
            leaving: returns whether this rank wants to stop.
        """
        if self._barrier:
            return Handover(self.whole())
        return self._step(before, leaving)

    def whole(self) -> StepResult:
        """Run one step from its passes to its update, and return its outcome."""
        run = self.run
        progress = run.progress
        consumed = progress.consumed_train_samples
        n = progress.iteration + 1
        scale = progress.loss_scale.scale
        batches = self._batches(consumed)
        given = (run.stages, run.optimizer, batches, consumed, run.rates())
        step = partial(train_step, *given, loss_scale=scale, iteration=n)
        # The guard may run the step again, to find out whether an error repeats.
        result = self.guard.step(lambda refuses: step(refuses=refuses), n, scale, self._saving.last)
        progress.advance(result, run.config.precision)
        return result

    def pass_over(self) -> None:
        """Pass over the samples of the next iteration, for --iterations-to-skip."""
        run = self.run
        progress = run.progress
        progress.pass_over(run.config.batch_sizes.at(progress.consumed_train_samples))
        run.say(f"iteration {progress.iteration} is passed over: --iterations-to-skip")

    def ended(self, result: StepResult) -> None:
        """Call the callbacks after a step and report its outcome.

        Args:
            result: the outcome of the step.
        """
        run = self.run
        self.hooks.call("after_step", run, result)
        run.report.iteration(result, run.progress, run.rate(), run.optimizer)

    def _batches(self, consumed: int) -> Sequence[Microbatch]:
        """Return the microbatches of the step that follows after `consumed` samples.

        The stages are set to the step's batch size, which --rampup-batch-size changes.

        Args:
            consumed: number of samples before the step.
        """
        run = self.run
        size = run.config.batch_sizes.at(consumed)
        if size != run.stages.config.global_batch_size:
            config = run.config.with_batch(size)
            # All ranks count the same samples, so all of them change the table before the same
            # step.
            run.stages.take(config, run.schedule_of(config))
        # Time spent on waiting for samples is reported separately.
        with run.report.reading():
            step = self._batches_at(consumed)
        return Awaited(step, run.report.reading)

    def _step(self, before: Handover, leaving: Callable[[], bool]) -> Handover:
        """Run all passes of a step, with this rank's update among them.

        If the update of the last step is still unchecked (`before.open`), it is checked during
        these passes.

        Args:
            before: the state that the last step handed over.
            leaving: returns whether this rank wants to stop.
        Returns: the state for the next step. In it this step is open if its update was a guess.
        """
        run = self.run
        now = before
        updates: list[Update] = []
        progress = run.progress
        # While a step is open, `progress` does not count it yet.
        ahead = before.open is not None
        n = progress.iteration + ahead + 1
        consumed = progress.consumed_train_samples + ahead * run.stages.config.global_batch_size
        batches = self._batches(consumed)
        sums = run.optimizer.reduction()

        def scale() -> float:
            """Return this step's loss scale; assume that an open step was not skipped."""
            if now.open is not None:
                # As if the open step were not skipped. If it was, its V has these forwards run
                # again, under the scale that a skipped step leaves.
                return progress.loss_scale.after(False, run.config.precision).scale
            return progress.loss_scale.scale

        def update() -> None:
            # Called for each stage of the rank. At the first one the gradients of all are reduced.
            if not updates:
                # The gradients are sums over data-parallel ranks, of losses times the loss scale.
                factor = 1 / run.mesh.dp.size / scale()
                guess = not self._waits(n, now)
                updates.append(
                    Update.begin(run.stages, run.optimizer, sums, run.rates(), factor, guess=guess)
                )

        def validate(chunk: int) -> bool:
            # V stands before the first pass that writes a gradient. Up to here the last step's
            # gradients are complete, and a wrong update can be made again from them.
            nonlocal now
            undone = False
            if now.open is not None:
                now = self.end(now.open, now.good)
                assert now.result is not None
                self.ended(now.result)
                undone = now.result.undone
            for buffers in run.optimizer.chunks[chunk]:
                buffers.zero_grad()
            return undone

        weights = []
        for chunk, own in enumerate(weights_of(run.optimizer, sums)):
            weights.append(replace(own, update=update, validate=partial(validate, chunk)))
        totals = run.stages.run(batches, consumed, loss_scale=scale, weights=weights, iteration=n)
        # Ranks agree on stopping in an all-reduce that runs during the next forwards. A signal thus
        # takes effect one step later, and no step waits for the answer. torch.full does not wait
        # for the device, as torch.tensor would.
        wants = torch.full((), leaving(), dtype=torch.float64, device=run.mesh.device)
        reduced = run.mesh.world.start_all_reduce(wants, "max")
        any_leaving = Late(reduced.wait, lambda values: bool(values[0]))
        begun = OpenStep(updates[0], totals, any_leaving)
        # Nothing was guessed: the update waits for the norm, here and now.
        if begun.update.backup is None:
            return self.end(begun, now.good)
        return replace(now, result=None, open=begun)

    def end(self, step: OpenStep, good: int) -> Handover:
        """Wait for the norm and losses of an open step, complete it, and return the new state.

        Args:
            step: the step.
            good: number of steps before it, in a row, that were neither clipped nor skipped.
        """
        run = self.run
        progress = run.progress
        # One copy to the host brings all three.
        norm_of = step.update.gradients.norm
        totals, norm, leaving = read_together(step.totals, norm_of, step.leaving)
        result = step.update.end(norm, totals)
        good += 1
        if result.skipped or run.optimizer.shrink(norm) < 1:
            good = 0
        # The scale that this step had: `advance` changes it.
        scale = progress.loss_scale.scale
        self.guard.judge(result, progress.iteration + 1, scale, self._saving.last)
        progress.advance(result, run.config.precision)
        return Handover(result, good=good, leaving=leaving)

    def _waits(self, n: int, before: Handover) -> bool:
        """Return whether the update of iteration n must wait for the norm, and not guess.

        before: the state that the last step handed over.
        """
        config = self.run.config
        guesses = before.good >= config.parallel.post_validation_after
        if not guesses or self.hooks.callbacks or before.leaving:
            return True
        # An iteration that is passed over runs no V.
        if n + 1 in config.guards.iterations_to_skip:
            return True
        # The work after these iterations reads the weights, or the run may end there.
        intervals = (
            config.data.eval_interval,
            config.checkpoint.save_interval,
            config.guards.exit_interval,
            config.guards.check_weight_hash_across_dp_replicas_interval,
            config.log.log_interval if config.checkpoint.trigger_path else None,
        )
        if any(every and n % every == 0 for every in intervals):
            return True
        return n == self.run.progress.last_iteration(config)
