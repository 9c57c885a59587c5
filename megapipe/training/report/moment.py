"""Collect the values that logged numbers are computed from, of one step or of several."""

from __future__ import annotations

import sys
import time
from dataclasses import dataclass
from datetime import timedelta

from megapipe.config import Config
from megapipe.training.progress import Progress
from megapipe.training.report.compared import Measured
from megapipe.training.report.counters import Counters
from megapipe.training.steps.step import StepResult


class Window:
    """The steps that are reported together: one step, or the steps since the last line.

    `add` counts a step. `printed` begins a new window after a line, `restart` leaves out a pause.

    `elapsed` is the time since the last step. `losses` are the means over the window.

    Attributes:
        first: whether no line was printed yet.
        seconds: total time of the steps.
        last_seconds: time of the last step.
        iterations: number of steps.
        samples: number of samples of the steps.
        skipped: number of steps that updated nothing.
        nan: number of steps with a loss that is not finite.
        guessed: number of updates that did not wait for the norm.
        undone: number of updates that did not wait for the norm and were wrong.
    """

    def __init__(self) -> None:
        self.first = True
        self.last_seconds = 0.0
        self._last: dict[str, float] = {}
        self.clear()

    @staticmethod
    def of(result: StepResult, seconds: float) -> Window:
        """Return a window of a single step.

        Args:
            result: the outcome of the step.
            seconds: the time that it took.
        """
        window = Window()
        window.add(result)
        window.seconds = seconds
        return window

    def printed(self, *, regular: bool) -> None:
        """Begin a new window after a line, if the line was a regular one.

        The line of the first iteration is not regular but additional, as in Megatron-LM. The first
        iteration therefore counts in the first regular line too.
        """
        self.first = False
        if regular:
            self.clear()

    def clear(self) -> None:
        """Set all counts and sums to 0."""
        self.skipped = 0
        self.nan = 0
        self.guessed = 0
        self.undone = 0
        self.samples = 0
        self.iterations = 0
        self._sums: dict[str, tuple[float, int]] = {}
        self.seconds = 0.0
        self._since = time.monotonic()

    def add(self, result: StepResult) -> None:
        """Count a step.

        The loss of a skipped step does not enter the mean, unless all steps are skipped.

        Args:
            result: the outcome of the step.
        """
        self.last_seconds = time.monotonic() - self._since
        self.seconds += self.last_seconds
        self._since = time.monotonic()
        self.iterations += 1
        self.samples += result.batch
        self.skipped += result.skipped
        self.nan += not result.finite
        self.guessed += result.guessed
        self.undone += result.undone
        if not result.skipped:
            for name, loss in result.shown.items():
                total, count = self._sums.get(name, (0.0, 0))
                self._sums[name] = total + loss, count + 1
        # Shown if all steps of the window are skipped.
        self._last = result.shown

    def restart(self) -> None:
        """Do not count a pause since the last step, such as an evaluation, as step time."""
        self._since = time.monotonic()

    @property
    def elapsed(self) -> float:
        """Return the seconds since the last step was counted, or since the last pause."""
        return time.monotonic() - self._since

    @property
    def losses(self) -> dict[str, float]:
        """Return {name: mean loss} over the steps that updated and reported the loss.

        If no step updated, return the losses of the last step.
        """
        means = {name: total / count for name, (total, count) in self._sums.items()}
        return means or self._last


@dataclass(frozen=True)
class Moment:
    """The state of a run at one report, from which the reported values are computed.

    The properties are the reported values: times, speeds, and the comparison with the plan (`now`).

    Attributes:
        config: the run's configuration.
        progress: iterations and samples so far.
        result: the last step's outcome.
        over: the losses and times of the steps that are reported.
        lr: the learning rate of the next iteration, which Megatron-LM prints too.
        params_norm: L2 norm of all parameters; None without --log-params-norm.
        flops: model FLOPs of a token.
        peak: TFLOP/s of a device; None if it is not known.
        counters: times of passes; None in a report without them.
    """

    config: Config
    progress: Progress
    result: StepResult
    over: Window
    lr: float = 0.0
    params_norm: float | None = None
    flops: float = 0.0
    peak: float | None = None
    counters: Counters | None = None

    @property
    def now(self) -> Measured | None:
        """Return the times of the last steps' passes, compared with the plan.

        Returns None where `Counters.now` does, such as before the second or third step.
        """
        return None if self.counters is None else self.counters.now

    @property
    def seconds(self) -> float:
        """Return the mean time of the reported steps, in seconds."""
        return self.over.seconds / self.over.iterations

    @property
    def last(self) -> int:
        """Return the iteration at which the run ends."""
        return self.progress.last_iteration(self.config)

    @property
    def tokens_per_second(self) -> float:
        """Return the tokens per second of all devices together."""
        return self.over.samples * self.config.batch.sequence / self.over.seconds

    @property
    def tflops(self) -> float:
        """Return the model TFLOP/s of each device."""
        return self.flops * self.tokens_per_second / self.config.world_size / 1e12

    @property
    def mfu(self) -> float | None:
        """Return the model FLOPs utilization; None if the device's peak is not known."""
        return None if self.peak is None else self.tflops / self.peak

    @property
    def remaining(self) -> timedelta | None:
        """Return the time to the end of the run at this speed.

        Returns None if standard output is no terminal: the number is for people.
        """
        # A file that a tool reads keeps Megatron-LM's fields; the rest of the time is for people.
        if not sys.stdout.isatty():
            return None
        return timedelta(seconds=round(self.seconds * (self.last - self.progress.iteration)))
