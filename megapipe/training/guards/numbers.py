"""Judge the numbers of a step: losses and gradients that are not finite, and losses that spike.

A step depends on weights and samples alone, so it can run a second time before anything is updated.
A number that does not come again was an error of a device, or of a model that is not deterministic
(Megatron-LM's rerun_state_machine). A number that comes again is the training's own.
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
"""Runs a step, which updates nothing if its losses are refused."""
# Megatron-LM's SPIKY_LOSS_FACTOR.
FACTOR = 10.0
"""A loss is a spike if it is more than this many times the largest recent one."""
OF_LAST = 100
"""Number of recent losses."""


class Guard:
    """Checks that losses and norms are finite and not too large. All ranks decide the same.

    `step` runs a step and checks its numbers. `judge` checks a step that cannot run again.

    Args:
        config: the run's configuration.
        say: prints a line.
    """

    def __init__(self, config: Config, say: Callable[[str], None]) -> None:
        self.guards = config.guards
        self.precision = config.precision
        self.seed = config.batch.seed
        self._say = say
        self._recent: defaultdict[str, deque[float]] = defaultdict(lambda: deque(maxlen=OF_LAST))
        self._in_a_row = 0

    def step(self, run: Run, iteration: int, scale: float, last_saved: int) -> StepResult:
        """Run a step, and judge its numbers.

        With --rerun-mode validate_results (the default) a step whose numbers look wrong runs a
        second time before it is judged.

        Args:
            run: a function that runs the step, called with one argument `refuses`. The function
                calls refuses({name: mean loss}), and updates nothing if that returns True.
            iteration: the step's iteration.
            scale: the step's loss scale.
            last_saved: iteration of the newest checkpoint, 0 for none.
        Returns: the outcome of the last time that the step ran.
        Raises: TrainingError for a number that is not finite (in the second try, if there are two),
            unless flags or the loss scale allow it. Also after too many bad steps in a row, and for
            the drill of a persistent error.
        """
        twice = self.guards.rerun_mode == "validate_results"
        limits = self._limits()
        injected = twice and self._injects(iteration)
        refuses: Refuses = partial(_above, limits={})
        if injected:
            refuses = _always
        elif twice and self.guards.check_for_spiky_loss:
            refuses = partial(_above, limits=limits)
        # A refused step updates nothing. The second run begins with the same weights, samples and
        # random numbers.
        first = result = run(refuses)
        # Where steps that are not finite are skipped anyway, as by a dynamic loss scale, they are
        # no sign of an error.
        if first.spiked or (first.skipped and twice and not self._skips):
            result = run(_never)
            if injected and first.spiked:
                self._injected(iteration)
            # The same step again, with numbers in order: the first run's were an error.
            elif not (result.skipped or _above(result.losses, limits)):
                self._say(
                    f"WARNING: iteration {iteration}: {_text(first)}; run again on the same "
                    f"samples it is {_text(result)}. A device or its memory erred, or the model is "
                    "not deterministic; going on with the second result"
                )
        again = ", twice" if first is not result else ""
        self.judge(result, iteration, scale, last_saved, again)
        return result

    def judge(
        self, result: StepResult, iteration: int, scale: float, last_saved: int, again: str = ""
    ) -> None:
        """Warn about a step whose loss spikes or is not finite, or raise an error.

        Args:
            result: the step's outcome.
            iteration: the step's iteration.
            scale: the step's loss scale.
            last_saved: iteration of the newest checkpoint, 0 for none.
            again: ", twice" in the error's text if the step ran a second time, else "".
        Raises: TrainingError for a number that is not finite, unless flags or the loss scale allow
            it, or after too many bad steps in a row.
        """
        precision = self.precision
        limits = self._limits()
        # A dynamic loss scale finds its size by steps that overflow. While it can shrink, such
        # steps are no bad sign.
        searching = precision.dynamic_loss_scale and scale > precision.min_loss_scale
        if result.skipped and not self._skips:
            raise TrainingError(
                f"iteration {iteration}: {_text(result)}{again}. Nothing was updated. "
                f"{_before(last_saved)}Lower --lr, or skip such iterations with "
                "--no-check-for-nan-in-loss-and-grad."
            )
        self._count(result, iteration, limits, searching)

    def _injects(self, iteration: int) -> bool:
        """Return whether --error-injection-rate simulates an error in this iteration.

        The draw is the same on all ranks and after a restart.
        """
        rate = self.guards.error_injection_rate
        return rate > 0 and random.Random(f"{self.seed} {iteration}").randrange(rate) == 0

    def _injected(self, iteration: int) -> None:
        """Print that an error was simulated. Raises: TrainingError for a persistent error.

        Args:
            iteration: the iteration, for the text.
        """
        kind = self.guards.error_injection_type
        text = (
            f"iteration {iteration}: --error-injection-type {kind}: the step was run again on the "
            "same samples"
        )
        if kind == "persistent_error":
            raise TrainingError(
                f"{text} and counts as wrong, twice. It was a drill: leave out "
                "--error-injection-rate."
            )
        self._say(f"WARNING: {text}; going on with the second result")

    @property
    def _skips(self) -> bool:
        """Return whether the run goes on after a step with a loss or norm that is not finite."""
        return self.guards.no_check_for_nan_in_loss_and_grad or self.precision.dynamic_loss_scale

    def _count(
        self, result: StepResult, iteration: int, limits: Mapping[str, float], searching: bool
    ) -> None:
        """Count bad steps in a row, remember the losses of good steps, and print warnings.

        Args:
            result: the step's outcome.
            iteration: the step's iteration.
            limits: {name of a loss: the value above which it is a spike}.
            searching: whether the loss scale can still shrink.
        Raises: TrainingError after --max-bad-iterations-in-a-row.
        """
        spikes = not result.skipped and _above(result.losses, limits)
        bad = result.skipped and not searching
        if spikes and self.guards.check_for_spiky_loss:
            bad = True
        self._in_a_row = self._in_a_row + 1 if bad else 0
        if spikes:
            largest = ", ".join(f"{name} {x / FACTOR:.6g}" for name, x in limits.items())
            self._say(
                f"WARNING: iteration {iteration}: the loss spikes, {_text(result)}: more than "
                f"{FACTOR:g} times the largest of the last {OF_LAST}, {largest}"
            )
        elif not result.skipped:
            # Only losses have limits: other reported numbers may jump.
            for name, loss in result.losses.items():
                if "loss" in name:
                    self._recent[name].append(loss)
        if bad and self._in_a_row > 1:
            self._say(
                f"WARNING: {self._in_a_row} iterations in a row were skipped or spiked, the last "
                f"is {iteration}"
            )
        most = self.guards.max_bad_iterations_in_a_row
        if self._in_a_row >= most:
            raise TrainingError(
                f"iteration {iteration}: {self._in_a_row} iterations in a row were skipped or "
                f"spiked, as many as --max-bad-iterations-in-a-row {most}; now {_text(result)}. "
                "Go back to a checkpoint before them with --ckpt-step, and lower --lr or leave out "
                "the samples."
            )

    def _limits(self) -> dict[str, float]:
        """Return {name of a loss: the value above which it is a spike}.

        A loss without a recent value above 0 is left out.
        """
        highest = {name: max(losses) for name, losses in self._recent.items()}
        # FACTOR says nothing about a loss that may be 0 or negative.
        return {name: FACTOR * loss for name, loss in highest.items() if loss > 0}


def _above(losses: Mapping[str, float], limits: Mapping[str, float]) -> bool:
    """Return whether any loss is above its limit.

    Args:
        losses: {name: loss}.
        limits: {name: limit}. A loss without a limit counts as below.
    """
    return any(loss > limits[name] for name, loss in losses.items() if name in limits)


def _always(losses: Mapping[str, float]) -> bool:
    return True


def _never(losses: Mapping[str, float]) -> bool:
    return False


def _text(result: StepResult) -> str:
    """Return a text with the losses of a step, and the gradient norm unless a spike was refused.

    The text also says if a differentiated loss is not finite.
    """
    loss = "" if result.finite else " (the loss that is differentiated is not finite)"
    norm = "" if result.spiked else f", gradient norm {result.grad_norm}"
    return f"loss {result.losses}{loss}{norm}"


def _before(last_saved: int) -> str:
    """Return a sentence on the checkpoint that the user may go back to; empty without one.

    Args:
        last_saved: iteration of the newest checkpoint; 0 for none.
    """
    if not last_saved:
        return ""
    return (
        f"The checkpoint of iteration {last_saved} may already be bad: weights can break an "
        "iteration before a loss shows it. If this comes again from there, go back further with "
        "--ckpt-step. "
    )
