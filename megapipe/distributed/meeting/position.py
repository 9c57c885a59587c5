"""The place of a rank in its work: written by its main thread, read by a diagnosis when ranks stop moving."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from time import monotonic
from typing import Any


class Position:
    """The position of a rank's main thread, which writes it; another thread reads without a lock.

    Attributes:
        step: the iteration, in words.
        at: the item of the plan or some other call (in words) the thread is in, and the time.monotonic() since which;
            None where no rank waits for another.
        limit_s: how long it may be at one place; None where the groups alone keep time.
        plan, hand, comm: the executor's items (None until it begins), what it holds, and its communicator.
    """

    __slots__ = ("at", "comm", "hand", "limit_s", "plan", "step")

    def __init__(self) -> None:
        self.step = "the preparations"
        self.at: tuple[Any, float] | None = None
        self.limit_s: float | None = None
        self.plan: Sequence[Any] | None = None
        self.hand: Mapping[Any, Any] = {}
        self.comm: Any = None

    def begin(self, step: str) -> None:
        """A new step, none of whose passes has begun."""
        self.step, self.plan, self.at = step, None, ("the start", monotonic())

    def enter(self, call: str) -> None:
        """Into a call in which ranks wait for each other."""
        self.at = call, monotonic()

    def leave(self) -> None:
        """Out of it, to work in which no rank waits."""
        self.at = None
