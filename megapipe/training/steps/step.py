"""One step of training from its passes to its end, which is now or, without a barrier, within the next step.

Without a barrier (Qi et al. 2023, section 4) a rank updates as soon as its own gradients are complete, guessing that
the global norm asks for no clipping and that every number is finite. After a wrong guess what was before the update is
copied back and the update done right: the same bits as with a barrier.
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
"""Is a step not to count, by its losses?"""


@dataclass(frozen=True)
class StepResult:
    """The outcome of a step, as every rank knows it.

    Attributes:
        losses: what loss_func reported, by name: sum over count of the global batch, or the mean of single numbers.
            What nothing was counted of is left out. Nothing else depends on them.
        grad_norm: before clipping; nan if it was not computed.
        tokens: trained tokens of the global batch: the second of three values of loss_func, 0 if it returns two.
        skipped: nothing was updated, because the loss or the gradient was not finite.
        finite: every loss that was differentiated, whatever was reported.
        spiked: skipped because a loss is above its limit.
        batch: sequences of the global batch.
        late: the update did not wait for the norm. undone: and was wrong.
        routed: of the layers with experts.
    """

    losses: dict[str, float]
    grad_norm: float
    tokens: float
    skipped: bool
    num_zeros: int | None = None
    finite: bool = True
    spiked: bool = False
    batch: int = 0
    late: bool = False
    undone: bool = False
    routed: Routed = field(default_factory=Routed)

    @property
    def shown(self) -> dict[str, float]:
        """The losses as logs have them."""
        return self.losses | self.routed.losses


@dataclass(frozen=True)
class Update:
    """The end of a step on one rank: begun when its own gradients are complete, done when all ranks' numbers are there.

    Attributes:
        config: of this step; the stages may have another batch when it ends.
        gradients: as `begin` has left them.
        moved: as `Stages.moved` has them.
        steps: updates made before this one.
        kept: all that the update changes, as it was before, 12 bytes per owned parameter; None if the update waits for
            the norm.
    """

    stages: Stages
    config: Config
    optimizer: Optimizer
    rates: Rates
    gradients: Gradients
    moved: Sequence[tuple[Tensor, Tensor]]
    steps: int
    kept: Sequence[Tensor] | None = None

    @staticmethod
    def begin(
        stages: Stages, optimizer: Optimizer, sums: Reduction, rates: Rates, scale: float | Tensor, *, late: bool
    ) -> Update:
        """Reduce the gradients, begin to take their norm times `scale`; if `late`, update without it."""
        gradients, frozen = optimizer.reduce(scale, sums), stages.config.optimizer.freeze_all_layers
        # Now, not at the end: the layers forget what they saw when the next step's forwards begin.
        moved = () if frozen else stages.moved()
        update = Update(stages, stages.config, optimizer, rates, gradients, moved, optimizer.steps)
        if not late:
            return update
        update = replace(update, kept=[x.clone() for x in update._changes])
        return replace(update, gradients=update._apply())

    def end(self, norm: float, totals: Totals, refuses: Refuses = lambda losses: False) -> StepResult:
        """Update if that was not done or was wrong, and if the losses are not refused. Nothing is updated by numbers
        that are not finite."""
        optimizer, late = self.optimizer, self.kept is not None
        spiked = totals.finite and refuses(totals.means)
        good = totals.finite and not spiked and math.isfinite(norm)
        zeros = optimizer.count_zeros() if self.config.log.log_num_zeros_in_grad and good else None
        undone = late and not (good and optimizer.shrink(norm) == 1)
        if undone:
            self._restore()
        if good and (undone or not late):
            self._apply(optimizer.shrink(norm))
        # Nothing to update by: the model's own weights are made again of the main parameters that were put back.
        elif undone:
            optimizer.spread()
        return StepResult(
            totals.means,
            norm if totals.finite and not spiked else math.nan,
            totals.tokens,
            skipped=not good,
            num_zeros=zeros,
            finite=totals.finite,
            spiked=spiked,
            batch=self.config.global_batch_size,
            late=late,
            undone=undone,
            routed=self.stages.routers.read(totals.beside, self.config),
        )

    def _apply(self, shrink: float = 1.0) -> Gradients:
        """Update, and return the gradients as that leaves them."""
        # Before the update, which may have to quantise weights by them.
        for x, after in self.moved:
            x.copy_(after)
        return self.optimizer.update(self.gradients, self.rates, shrink, keeps_grads=self.kept is not None)

    def _restore(self) -> None:
        for x, before in zip(self._changes, self.kept or (), strict=True):
            x.copy_(before)
        self.optimizer.steps = self.steps
        self.stages.scales.begin()  # the next step's forwards so far have seen the wrong weights, and come again

    @property
    def _changes(self) -> list[Tensor]:
        """All tensors that an update changes."""
        moments = [x for flats in self.optimizer.moments.values() for x in flats]
        return [*(b.main for b in self.optimizer.owned), *moments, *(x for x, _ in self.moved)]


def weights_of(optimizer: Optimizer, sums: Reduction | None = None) -> list[Weights]:
    """The work of a step's passes on the weights of each of this rank's stages."""
    sums, gathers = sums or optimizer.reduction(), optimizer.gathers
    return [
        Weights(
            partial(sums.start, n),
            partial(gathers.start, n),
            begin=partial(sums.begin, n),
            drop=partial(gathers.drop, n),
            layer_done=partial(sums.start_early, n) if sums.by_layers else None,
        )
        for n in range(len(optimizer.chunks))
    ]


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
    """Forward, backward, reduce, clip, update. Run again after a step that was skipped it does the same.

    refuses: is nothing to be updated after these losses?
    """
    optimizer.zero_grad()
    sums, position = optimizer.reduction(), stages.mesh.position
    weights = weights_of(optimizer, sums)
    late = stages.run(microbatches, consumed, loss_scale=lambda: loss_scale, weights=weights, iteration=iteration)
    per_token = stages.config.batch.calculate_per_token_loss
    scale = counted_tokens(late).clamp(min=1).reciprocal() if per_token else 1 / stages.mesh.dp.size
    # The update waits for the reductions: a rank that hangs there is to be named with this place.
    position.enter("the optimizer step")
    update = Update.begin(stages, optimizer, sums, rates, scale / loss_scale, late=False)
    totals, norm = read_together(late, update.gradients.norm)
    position.leave()
    return update.end(norm, totals, refuses)
