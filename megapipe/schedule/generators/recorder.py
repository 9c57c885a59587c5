"""A recorder of one rank's passes, so that a generator reads like the paper's diagram."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping

from megapipe.errors import ScheduleError
from megapipe.schedule.passes import Kind, Pass, Step


class Recorder:
    """A recorder of one rank's steps: each method adds to `steps`, in the order of the calls.

    Each stage runs its microbatches in order. `f` adds a forward, `bw` a fused backward and `f_bw`
    an overlapped pair. `b` adds an input gradient and defers its weight gradient. `w` adds the
    oldest deferred weight gradient, and `pay` adds all of them.

    Args:
        first: {stage: number of its first microbatch}; 0 for a stage that is not in it.
    """

    def __init__(self, first: Mapping[int, int] | None = None) -> None:
        self.steps: list[Step] = []
        self.owed: deque[Pass] = deque()
        self._first = first or {}
        self._forwards: dict[int, int] = {}
        self._backwards: dict[int, int] = {}

    # Short names, so that a line of a generator reads like a cell of the paper's figure.
    def f(self, stage: int) -> None:
        self.steps.append((self._forward(stage),))

    def b(self, stage: int) -> None:
        item = self._backward(Kind.B, stage)
        self.steps.append((item,))
        self.owed.append(Pass(Kind.W, stage, item.microbatch))

    def w(self, stage: int | None = None) -> None:
        """Add the oldest deferred weight gradient.

        Args:
            stage: take the oldest of this stage; None for the oldest of any stage.
        Raises: ScheduleError if none is deferred.
        """
        item = next((x for x in self.owed if stage in (None, x.stage)), None)
        if item is None:
            of = "" if stage is None else f" of stage {stage}"
            raise ScheduleError(
                f"Recorder.w, after {len(self.steps)} steps: no weight gradient{of} is owed; "
                "b owes one."
            )
        self.owed.remove(item)
        self.steps.append((item,))

    def bw(self, stage: int) -> None:
        self.steps.append((self._backward(Kind.BW, stage),))

    def f_bw(self, forward: int, backward: int) -> None:
        """Add a step in which a forward and a fused backward run overlapped.

        Args:
            forward: the stage of the forward.
            backward: the stage of the fused backward.
        """
        self.steps.append((self._forward(forward), self._backward(Kind.BW, backward)))

    def pay(self) -> None:
        """Add all deferred weight gradients, the oldest first."""
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
