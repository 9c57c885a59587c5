"""One training step: passes, reduction, clipping and update.

Without a barrier (post-validation, Qi et al. 2023, section 4) a rank updates when its own gradients
are complete. It guesses that the global norm asks for no clipping and that all numbers are finite.
After a wrong guess the old state is copied back and the update is made again. The results are
bitwise equal to those with a barrier.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

from torch import Tensor

from megapipe.config import Config
from megapipe.data.loader import Microbatch
from megapipe.distributed.late import read_together
from megapipe.optim.optimizer import Gradients, Optimizer
from megapipe.optim.reduction import Reduction
from megapipe.optim.rule import Rates
from megapipe.pipeline_parallel.passes.begin import Weights
from megapipe.training.steps.routers import Routed
from megapipe.training.steps.stages import Stages
from megapipe.training.steps.totals import Totals, counted_tokens

Refuses = Callable[[Mapping[str, float]], bool]
"""(losses of a step) -> whether the step must not update anything."""


@dataclass(frozen=True)
class StepResult:
    """The outcome of a step, equal on every rank.

    `shown` joins the losses of loss_func and of the routers.

    Attributes:
        losses: the values that loss_func reported, by name: sum over count for the global batch, or
            the mean of single numbers. A name whose count is 0 is left out. Only reports depend on
            these values.
        grad_norm: norm of all gradients before clipping; NaN if a loss was not finite or `spiked`.
        tokens: trained tokens of the global batch, the second of three values that loss_func
            returns. The number is 0 if loss_func returns two.
        skipped: nothing was updated, because a loss or the gradient was not finite, or `spiked`.
        num_zeros: gradient elements that are 0, with --log-num-zeros-in-grad; else, and if skipped,
            None.
        finite: every differentiated loss was finite, whatever was reported.
        spiked: the caller refused the losses: one was above its limit, or a drill asked for it.
        batch: number of sequences in the global batch.
        guessed: the update did not wait for the norm.
        undone: the update did not wait for the norm and was wrong.
        routed: the report of the layers with experts.
    """

    losses: dict[str, float]
    grad_norm: float
    tokens: float
    skipped: bool
    num_zeros: int | None = None
    finite: bool = True
    spiked: bool = False
    batch: int = 0
    guessed: bool = False
    undone: bool = False
    routed: Routed = field(default_factory=Routed)

    @property
    def shown(self) -> dict[str, float]:
        """Return {name: loss} for logs: losses of loss_func, then of the routers."""
        return self.losses | self.routed.losses


@dataclass(frozen=True)
class Update:
    """The optimizer's update at the end of a step on one rank, in two halves.

    `begin` is called when this rank's gradients are complete. `begin` may update at once, on the
    guess that nothing is clipped or skipped. `end` is called when the gradient norm and the losses
    of all ranks are known. `end` updates if `begin` has not, and repairs a wrong guess.

    Attributes:
        stages: this rank's stages.
        config: the configuration of this step. When `end` is called, `stages` may already have
            another batch size.
        optimizer: this rank's optimizer.
        rates: learning rates and weight decay.
        gradients: the reduced gradients; scaled and clipped already if `begin` has updated.
        buffers: (tensor, its value after this step) of tensors that change without a gradient.
        steps: number of updates before this one.
        backup: copies of all tensors that the update changes, 12 bytes per owned parameter. None if
            the update waits for the norm.
    """

    stages: Stages
    config: Config
    optimizer: Optimizer
    rates: Rates
    gradients: Gradients
    buffers: Sequence[tuple[Tensor, Tensor]]
    steps: int
    backup: Sequence[Tensor] | None = None

    @staticmethod
    def begin(
        stages: Stages,
        optimizer: Optimizer,
        sums: Reduction,
        rates: Rates,
        scale: float | Tensor,
        *,
        guess: bool,
    ) -> Update:
        """Reduce the gradients, and begin to compute their norm.

        Args:
            stages: this rank's stages, whose backward passes are over.
            optimizer: this rank's optimizer.
            sums: the reductions of this step's gradients over data parallelism, under way.
            rates: learning rates and weight decay.
            scale: factor on the gradients.
            guess: update at once, without waiting for the norm.
        """
        gradients = optimizer.reduce(scale, sums)
        buffers: Sequence[tuple[Tensor, Tensor]] = ()
        if not stages.config.optimizer.freeze_all_layers:
            # Not in `end`: layers forget their records when the next step's forwards begin.
            buffers = stages.buffer_updates()
        config = stages.config
        update = Update(stages, config, optimizer, rates, gradients, buffers, optimizer.steps)
        if not guess:
            return update
        # `_apply` keeps the gradients if there is a backup, so the backup comes first.
        update = replace(update, backup=[x.clone() for x in update._changing])
        return replace(update, gradients=update._apply())

    def end(
        self, norm: float, totals: Totals, refuses: Refuses = lambda losses: False
    ) -> StepResult:
        """Complete the update and return the outcome of the step.

        Nothing is updated if a number is not finite or `refuses` returns True for the losses.

        Args:
            norm: the global gradient norm.
            totals: the sums of all ranks' losses.
            refuses: called with {name: mean loss}, if all are finite.
        """
        optimizer = self.optimizer
        guessed = self.backup is not None
        spiked = totals.finite and refuses(totals.means)
        good = totals.finite and not spiked and math.isfinite(norm)
        # Before the update, which may change the gradients in place.
        zeros = None
        if good and self.config.log.log_num_zeros_in_grad:
            zeros = optimizer.count_zeros()
        # A guess is right only if it neither clips nor skips: shrink is then exactly 1.
        undone = guessed and not (good and optimizer.shrink(norm) == 1)
        if undone:
            self._restore()
        if good and (undone or not guessed):
            self._apply(optimizer.shrink(norm))
        elif undone:
            # No update follows, so the model's weights are made from the restored parameters.
            optimizer.spread()
        if spiked or not totals.finite:
            # As if it had not been computed: nothing is updated with it.
            norm = math.nan
        return StepResult(
            totals.means,
            norm,
            totals.tokens,
            skipped=not good,
            num_zeros=zeros,
            finite=totals.finite,
            spiked=spiked,
            batch=self.config.global_batch_size,
            guessed=guessed,
            undone=undone,
            routed=self.stages.routers.read(totals.extra, self.config),
        )

    def _apply(self, shrink: float = 1.0) -> Gradients:
        """Update all weights, and return the gradients, scaled and clipped.

        shrink: the clipping factor.
        """
        # Before the update, which may quantise weights with the new FP8 histories.
        for x, after in self.buffers:
            x.copy_(after)
        # A wrong guess is repaired with the same gradients.
        keeps_grads = self.backup is not None
        return self.optimizer.update(self.gradients, self.rates, shrink, keeps_grads=keeps_grads)

    def _restore(self) -> None:
        """Undo an update: copy the backup back."""
        for x, before in zip(self._changing, self.backup or (), strict=True):
            x.copy_(before)
        # Adam's bias correction counts updates, so the wrong one must not count.
        self.optimizer.steps = self.steps
        # Forwards of the next step have quantised the wrong weights, and will run again.
        self.stages.scales.begin()

    @property
    def _changing(self) -> list[Tensor]:
        """Return all tensors that an update changes, always in the same order."""
        optimizer = self.optimizer
        flats = [x for n in range(len(optimizer.chunks)) for x in optimizer.flats(n)]
        return [*flats, *(x for x, _ in self.buffers)]


def weights_of(optimizer: Optimizer, sums: Reduction | None = None) -> list[Weights]:
    """Return, for each stage of this rank, the functions that passes such as a weight update run.

    Args:
        optimizer: this rank's optimizer.
        sums: the sums of this step's gradients over data parallelism; None to begin new ones.
    """
    if sums is None:
        sums = optimizer.reduction()
    gathers = optimizer.gathers
    found = []
    for n in range(len(optimizer.chunks)):
        layer_done = partial(sums.start_early, n) if sums.by_layers else None
        weights = Weights(
            partial(sums.start, n),
            partial(gathers.start, n),
            begin=partial(sums.begin, n),
            drop=partial(gathers.drop, n),
            layer_done=layer_done,
        )
        found.append(weights)
    return found


def train_step(
    stages: Stages,
    optimizer: Optimizer,
    microbatches: Sequence[Microbatch],
    consumed: int,
    rates: Rates,
    *,
    loss_scale: float = 1.0,
    refuses: Refuses = lambda losses: False,
    iteration: int | None = None,
) -> StepResult:
    """Run forward, backward, reduction, clipping and update, and return the outcome.

    A second call with the same arguments, after a skipped step, computes the same.

    Args:
        stages: this rank's stages.
        optimizer: this rank's optimizer.
        microbatches: this data-parallel rank's part of the batch.
        consumed: samples trained on before this step.
        rates: learning rates and weight decay.
        loss_scale: factor on the loss before the backward.
        refuses: given the mean losses by name, returns whether nothing must be updated.
        iteration: the iteration's number in diagnoses; None computes it from `consumed`.
    """
    optimizer.zero_grad()
    sums = optimizer.reduction()
    totals = stages.run(
        microbatches,
        consumed,
        loss_scale=lambda: loss_scale,
        weights=weights_of(optimizer, sums),
        iteration=iteration,
    )
    scale: float | Tensor = 1 / stages.mesh.dp.size
    if stages.config.batch.calculate_per_token_loss:
        # The division stays on the device: the host does not wait for the number of tokens.
        # At least 1: the gradient of a batch without tokens is 0, and must not become NaN.
        scale = counted_tokens(totals).clamp(min=1).reciprocal()
    # The update waits for the reductions. The watchdog then names this place for a rank that hangs.
    position = stages.mesh.position
    position.enter("the optimizer step")
    update = Update.begin(stages, optimizer, sums, rates, scale / loss_scale, guess=False)
    read, norm = read_together(totals, update.gradients.norm)
    position.leave()
    return update.end(norm, read, refuses)
