"""Moments that logged numbers are computed from: a step, or those since the last line."""

from __future__ import annotations

import sys
import time
from dataclasses import dataclass
from datetime import timedelta

from megapipe.config import Config
from megapipe.training.progress import Progress
from megapipe.training.report.counters import Counters, Measured
from megapipe.training.steps.step import StepResult


class Window:
    """Steps that are told of together: those since the last line, or one."""

    def __init__(self) -> None:
        self.first = True
        self.last_seconds = 0.0
        self._last: dict[str, float] = {}
        self.clear()

    @staticmethod
    def of(result: StepResult, seconds: float) -> Window:
        """One step."""
        one = Window()
        one.add(result)
        one.seconds = seconds
        return one

    def told(self, *, regular: bool) -> None:
        """A line was printed. That of the first iteration comes beside the regular ones, as in Megatron-LM, and takes
        nothing out of them."""
        self.first = False
        if regular:
            self.clear()

    def clear(self) -> None:
        """Start after a line."""
        self.skipped = self.nan = self.guessed = self.undone = self.samples = self.iterations = 0
        self._sums: dict[str, tuple[float, int]] = {}
        self.seconds = 0.0
        self._since = time.monotonic()

    def add(self, result: StepResult) -> None:
        """Count an iteration; one that was skipped does not enter the mean loss unless it is the only one."""
        self.last_seconds = time.monotonic() - self._since
        self.seconds += self.last_seconds
        self._since = time.monotonic()
        self.iterations += 1
        self.samples += result.batch
        self.skipped += result.skipped
        self.nan += not result.finite
        self.guessed += result.guessed
        self.undone += result.undone
        for name, loss in result.shown.items() if not result.skipped else ():
            total, count = self._sums.get(name, (0.0, 0))
            self._sums[name] = total + loss, count + 1
        self._last = result.shown

    def restart(self) -> None:
        """Leave the time of an evaluation or a save out of the iterations' time."""
        self._since = time.monotonic()

    @property
    def losses(self) -> dict[str, float]:
        """Means over the iterations that advanced and reported the name; the last losses as they are if none did."""
        return {name: total / count for name, (total, count) in self._sums.items()} or self._last


@dataclass(frozen=True)
class Moment:
    """A moment that numbers are computed from.

    Attributes:
        result: of the last step. over: the steps that are told of.
        lr: as Megatron-LM prints it, already that of the next iteration.
        flops: model FLOPs of a token. peak: TFLOP/s of a device, where it is known.
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
        """The passes of the last steps."""
        return None if self.counters is None else self.counters.now

    @property
    def seconds(self) -> float:
        """Seconds of an iteration."""
        return self.over.seconds / self.over.iterations

    @property
    def last(self) -> int:
        """Iteration at which the run ends."""
        return self.progress.last_iteration(self.config)

    @property
    def tokens_per_second(self) -> float:
        """Tokens per second of the whole run."""
        return self.over.samples * self.config.batch.sequence / self.over.seconds

    @property
    def tflops(self) -> float:
        """TFLOP/s of the model on each device."""
        return self.flops * self.tokens_per_second / self.config.world_size / 1e12

    @property
    def mfu(self) -> float | None:
        return None if self.peak is None else self.tflops / self.peak

    @property
    def remaining(self) -> timedelta | None:
        """The time to the end of the run at this speed, where somebody watches a terminal."""
        left = round(self.seconds * (self.last - self.progress.iteration))
        return timedelta(seconds=left) if sys.stdout.isatty() else None
