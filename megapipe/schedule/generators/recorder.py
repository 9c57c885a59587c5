"""Writes down one rank's passes, so that a generator reads like its diagram."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping

from megapipe.errors import ScheduleError
from megapipe.schedule.passes import Kind, Pass, Step


class Recorder:
    """The steps of one rank. Each stage runs its microbatches in order, counted from `first[stage]` (0 if not named).

    `b` splits: it leaves a weight gradient owed, and `w` pays the oldest of those.
    """

    def __init__(self, first: Mapping[int, int] | None = None) -> None:
        self.steps: list[Step] = []
        self.owed: deque[Pass] = deque()
        self._first = first or {}
        self._forwards: dict[int, int] = {}
        self._backwards: dict[int, int] = {}

    def f(self, stage: int) -> None:
        self.steps.append((self._forward(stage),))

    def b(self, stage: int) -> None:
        item = self._backward(Kind.B, stage)
        self.steps.append((item,))
        self.owed.append(Pass(Kind.W, stage, item.microbatch))

    def w(self, stage: int | None = None) -> None:
        """The oldest weight gradient owed, or the oldest of one stage."""
        item = next((x for x in self.owed if stage in (None, x.stage)), None)
        if item is None:
            of = "" if stage is None else f" of stage {stage}"
            raise ScheduleError(
                f"Recorder.w, after {len(self.steps)} steps: no weight gradient{of} is owed; b owes one."
            )
        self.owed.remove(item)
        self.steps.append((item,))

    def bw(self, stage: int) -> None:
        self.steps.append((self._backward(Kind.BW, stage),))

    def f_bw(self, forward: int, backward: int) -> None:
        """A forward of one stage and a fused backward of another, overlapped."""
        self.steps.append((self._forward(forward), self._backward(Kind.BW, backward)))

    def pay(self) -> None:
        """Every weight gradient still owed."""
        while self.owed:
            self.w()

    def _forward(self, stage: int) -> Pass:
        microbatch = self._forwards.get(stage, self._first.get(stage, 0))
        self._forwards[stage] = microbatch + 1
        return Pass(Kind.F, stage, microbatch)

    def _backward(self, kind: Kind, stage: int) -> Pass:
        microbatch = self._backwards.get(stage, self._first.get(stage, 0))
        self._backwards[stage] = microbatch + 1
        return Pass(kind, stage, microbatch)
