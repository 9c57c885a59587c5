"""Training steps that end within the next one: the optimizer step without a barrier (Qi et al. 2023, section 4).

A rank updates as soon as its own gradients are complete, guessing that the global norm asks for no clipping and that
every number is finite. Losses and norm are summed while the next step's first forwards run; V, before the first pass
that writes a gradient, reads them. After a wrong guess what was before the update is copied back, the update is done
right, and those forwards run again: the same bits as with a barrier.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from megapipe.distributed.late import Late, read_together
from megapipe.training.steps.step import Rates, StepResult, weights_of
from megapipe.training.steps.totals import Totals

if TYPE_CHECKING:
    from megapipe.training.pretrain import Run


class Update(NamedTuple):
    """What a rank has done of a step's end by itself.

    Attributes:
        norm: of all ranks.
        kept: main parameters, moments and routers' biases before the update, 12 bytes per owned parameter; None if
            there was none.
        biases: of the routers after it.
    """

    norm: Late[float]
    rates: Rates
    kept: list[Tensor] | None
    biases: list[Tensor]


class Ending(NamedTuple):
    """A step whose passes are over. totals, leaving: of all ranks; leaving: is any to stop? batch: sequences."""

    update: Update
    totals: Late[Totals]
    leaving: Late[bool]
    batch: int


class PostValidation:
    """Runs the steps of a run, each of which ends within the next.

    It ends at once if what follows needs its weights or may end the run, and where guessing does not pay: after a step
    that was clipped or skipped, until --post-validation-after steps in a row were neither.

    Attributes:
        good: steps in a row that were neither.
    """

    def __init__(self, run: Run) -> None:
        self.run, self.optimizer = run, run.optimizer
        self.good = 0
        self._leaving = False
        self._ending: Ending | None = None
        if run.seams.callbacks:
            run.say(
                "WARNING: --enable-optimizer-post-validation waits in every step, for the callbacks before the next"
            )

    @property
    def open(self) -> bool:
        """Has a step begun that has not ended?"""
        return self._ending is not None

    def step(self) -> None:
        """Run all passes of a step; within it the step before ends."""
        run, updates = self.run, list[Update]()
        number = run.progress.iteration + self.open
        consumed = run.progress.consumed_train_samples + self.open * run.pipeline.config.global_batch_size
        batches = run.batches(consumed)

        def update() -> None:
            if not updates:  # at the first of this rank's stages: all of them are reduced
                updates.append(self._update(late=not self._waits(number + 1)))

        def validate(chunk: int) -> bool:
            wrong = self.end()
            for buffers in self.optimizer.chunks[chunk]:
                buffers.zero_grad()
            return wrong

        own = enumerate(weights_of(self.optimizer))
        totals = run.pipeline.run(
            batches,
            consumed,
            loss_scale=self._scale,
            weights=[replace(weights, update=update, validate=partial(validate, n)) for n, weights in own],
            iteration=number + 1,
        )
        leaving = torch.tensor(float(run.stopping.wanted), dtype=torch.float64, device=run.mesh.device)
        any_leaving = Late(run.mesh.world.start_all_reduce(leaving, "max").wait, lambda values: bool(values[0]))
        self._ending = Ending(updates[0], totals, any_leaving, run.pipeline.config.global_batch_size)
        if updates[0].kept is None:
            self.end()

    def end(self) -> bool:
        """If a step is open, wait for its norm, and update if that was not done or was wrong.

        Returns: was it wrong?
        """
        if self._ending is None:
            return False
        ((norm_of, rates, kept, biases), totals_of, leaving, batch), self._ending = self._ending, None
        run, optimizer = self.run, self.optimizer
        norm, totals, self._leaving = read_together(norm_of, totals_of, leaving)
        finite = totals.finite and math.isfinite(norm)
        right = finite and optimizer.shrink(norm) == 1
        zeros = optimizer.count_zeros() if run.config.log.log_num_zeros_in_grad and finite else None
        wrong = kept is not None and not right
        if kept is not None and wrong:
            self._restore(kept)
        if finite and (kept is None or wrong):
            optimizer.clip(norm)
            optimizer.update(rates.lr, rates.ends_lr)
            run.pipeline.routers.move(biases)
        elif wrong:
            optimizer.spread()
        self.good = self.good + 1 if right else 0
        norm = norm if totals.finite else math.nan
        result = StepResult(
            totals.means,
            norm,
            totals.tokens,
            not finite,
            zeros,
            totals.finite,
            batch=batch,
            late=kept is not None,
            undone=wrong,
            routed=run.pipeline.routers.read(totals.beside, run.config.with_batch(batch)),
        )
        progress = run.progress
        run.guard.judge(result, progress.iteration + 1, progress.loss_scale.scale, run.saving.last)
        progress.advance(result, run.config.train)
        run.ended(result)
        return wrong

    def _update(self, *, late: bool) -> Update:
        """What a rank does when its gradients are complete."""
        optimizer, rates = self.optimizer, self.run.rates()
        norm, routers = optimizer.start_norm(1 / self.run.mesh.dp.size / self._scale()), self.run.pipeline.routers
        optimizer.weight_decay, biases = rates.weight_decay, routers.moved()
        if not late:
            return Update(norm, rates, None, biases)
        kept = [x.clone() for x in self._state]
        optimizer.update(rates.lr, rates.ends_lr)
        routers.move(biases)
        return Update(norm, rates, kept, biases)

    def _waits(self, n: int) -> bool:
        """Is iteration n to end at once?"""
        run, config = self.run, self.run.config
        intervals = (
            config.data.eval_interval,
            config.checkpoint.save_interval,
            config.train.exit_interval,
            config.train.check_weight_hash_across_dp_replicas_interval,
            config.log.log_interval if config.checkpoint.trigger_path else None,
        )
        guesses = self.good >= config.parallel.post_validation_after and not run.seams.callbacks
        follows = n == run.progress.last_iteration(config) or any(every and n % every == 0 for every in intervals)
        return not guesses or follows or self._leaving

    def _scale(self) -> float:
        """Of this step's losses; while the step before is open, a guess."""
        scale = self.run.progress.loss_scale
        return (scale.after(False, self.run.config.train) if self.open else scale).scale

    @property
    def _state(self) -> list[Tensor]:
        moments = [x for flats in self.optimizer.moments.values() for x in flats]
        return [*(b.main for b in self.optimizer.owned), *moments, *self.run.pipeline.routers.biases]

    def _restore(self, kept: Sequence[Tensor]) -> None:
        for x, before in zip(self._state, kept, strict=True):
            x.copy_(before)
        self.optimizer.steps -= 1
