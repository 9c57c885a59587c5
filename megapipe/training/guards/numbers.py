"""Numbers that cannot be right: losses and gradients that are not finite, losses that spike.

A step has no state but weights and samples, so it can be run a second time before anything is updated: what does not
come again was an error of a device, or of a model that is not deterministic (Megatron-LM's rerun_state_machine); what
does is the training's own.
"""

from __future__ import annotations

import random
from collections import defaultdict, deque
from collections.abc import Callable, Mapping
from functools import partial

from megapipe.config import Config
from megapipe.errors import TrainingError
from megapipe.training.steps.step import Refuses, StepResult

Run = Callable[[Refuses], StepResult]
FACTOR, OF_LAST = 10.0, 100
"""A loss that is FACTOR times the largest of the last OF_LAST is a spike."""


class Guard:
    """The judge of a run's numbers. All ranks have the same numbers and come to the same end.

    Args:
        say: prints a line.
    """

    def __init__(self, config: Config, say: Callable[[str], None]) -> None:
        self.guards, self.precision, self.seed = config.guards, config.precision, config.batch.seed
        self._say = say
        self._recent: defaultdict[str, deque[float]] = defaultdict(lambda: deque(maxlen=OF_LAST))
        self._in_a_row = 0

    def step(self, run: Run, iteration: int, scale: float, last_saved: int) -> StepResult:
        """One step that may be trusted.

        Args:
            run: the step, which updates nothing if its losses are refused.
            scale: of the loss, in this step.
            last_saved: the iteration of the newest checkpoint, 0 for none.
        Raises: TrainingError for a number that is not finite twice over, and after too many bad steps in a row.
        """
        twice = self.guards.rerun_mode == "validate_results"
        limits, injected = self._limits(), twice and self._injects(iteration)
        refuses = partial(_above, limits=limits if twice and self.guards.check_for_spiky_loss else {})
        # A refused step has updated nothing, so that the second run begins from the same weights, samples and random
        # numbers.
        first = result = run((lambda losses: True) if injected else refuses)
        if first.spiked or (first.skipped and twice and not self._skips):
            result = run(lambda losses: False)
            if injected and first.spiked:
                self._injected(iteration)
            elif not (result.skipped or _above(result.losses, limits)):
                self._say(
                    f"WARNING: iteration {iteration}: {_said(first)}; run again on the same samples it is "
                    f"{_said(result)}. A device or its memory erred, or the model is not deterministic; going on with "
                    "the second result"
                )
        self.judge(result, iteration, scale, last_saved, ", twice" if first is not result else "")
        return result

    def judge(self, result: StepResult, iteration: int, scale: float, last_saved: int, again: str = "") -> None:
        """The end of `step`, for one that cannot be run a second time; errors as there."""
        precision, limits = self.precision, self._limits()
        # A dynamic loss scale finds its size by steps that overflow: while it can shrink they are no bad sign.
        searching = precision.dynamic_loss_scale and scale > precision.min_loss_scale
        if result.skipped and not self._skips:
            raise TrainingError(
                f"iteration {iteration}: {_said(result)}{again}. Nothing was updated. "
                f"{_before(last_saved)}Lower --lr, or skip such iterations with "
                "--no-check-for-nan-in-loss-and-grad."
            )
        self._count(result, iteration, limits, searching)

    def _injects(self, iteration: int) -> bool:
        """A draw for the drill: the same on all ranks, and after a restart."""
        rate = self.guards.error_injection_rate
        return rate > 0 and random.Random(f"{self.seed} {iteration}").randrange(rate) == 0

    def _injected(self, iteration: int) -> None:
        kind = self.guards.error_injection_type
        said = f"iteration {iteration}: --error-injection-type {kind}: the step was run again on the same samples"
        if kind == "persistent_error":
            raise TrainingError(f"{said} and counts as wrong, twice. It was a drill: leave out --error-injection-rate.")
        self._say(f"WARNING: {said}; going on with the second result")

    @property
    def _skips(self) -> bool:
        return self.guards.no_check_for_nan_in_loss_and_grad or self.precision.dynamic_loss_scale

    def _count(self, result: StepResult, iteration: int, limits: Mapping[str, float], searching: bool) -> None:
        spikes = not result.skipped and _above(result.losses, limits)
        bad = (result.skipped and not searching) or (spikes and self.guards.check_for_spiky_loss)
        self._in_a_row = self._in_a_row + 1 if bad else 0
        if spikes:
            self._say(
                f"WARNING: iteration {iteration}: the loss spikes, {_said(result)}: more than {FACTOR:g} times the "
                f"largest of the last {OF_LAST}, {', '.join(f'{name} {x / FACTOR:.6g}' for name, x in limits.items())}"
            )
        elif not result.skipped:
            for name, loss in result.losses.items():
                if "loss" in name:
                    self._recent[name].append(loss)
        if bad and self._in_a_row > 1:
            self._say(f"WARNING: {self._in_a_row} iterations in a row were skipped or spiked, the last is {iteration}")
        if self._in_a_row >= self.guards.max_bad_iterations_in_a_row:
            raise TrainingError(
                f"iteration {iteration}: {self._in_a_row} iterations in a row were skipped or spiked, as many as "
                f"--max-bad-iterations-in-a-row {self.guards.max_bad_iterations_in_a_row}; now {_said(result)}. "
                "Go back to a checkpoint before them with --ckpt-step, and lower --lr or leave out the samples."
            )

    def _limits(self) -> dict[str, float]:
        highest = {name: max(losses) for name, losses in self._recent.items()}
        return {name: FACTOR * loss for name, loss in highest.items() if loss > 0}


def _above(losses: Mapping[str, float], limits: Mapping[str, float]) -> bool:
    """Is any loss above its limit?"""
    return any(loss > limits[name] for name, loss in losses.items() if name in limits)


def _said(result: StepResult) -> str:
    loss = "" if result.finite else " (the loss that is differentiated is not finite)"
    norm = "" if result.spiked else f", gradient norm {result.grad_norm}"
    return f"loss {result.losses}{loss}{norm}"


def _before(last_saved: int) -> str:
    """A sentence on the checkpoint that a run goes back to when a number is not finite."""
    if not last_saved:
        return ""
    return (
        f"The checkpoint of iteration {last_saved} may already be bad: weights can break an iteration before a loss "
        "shows it. If this comes again from there, go back further with --ckpt-step. "
    )
