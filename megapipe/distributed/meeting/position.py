"""Record where a rank is in its work, for a diagnosis when ranks stop moving."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from time import monotonic
from typing import Any


class Position:
    """The pass, message or other call in which a rank's main thread is.

    The main thread writes it with `begin`, `enter` and `leave`. The thread that watches for
    deadlocks reads it without a lock.

    Attributes:
        step: the training iteration, in words.
        at: (place, seconds of time.monotonic() at which the thread came there). The place is an
            item of `plan`, or the name of another call that waits for ranks. None while the thread
            waits for no other rank.
        limit_s: seconds that the thread may stay at one place; None for no limit but the process
            groups' timeouts.
        plan: the passes and messages of this rank in this step, in the executor's order; None until
            the executor begins.
        hand: {pass: result of the pass}, for results that the executor keeps for later passes.
        comm: the executor's communicator.
    """

    # Slots, because a misspelt attribute here would only show when a run hangs.
    __slots__ = ("at", "comm", "hand", "limit_s", "plan", "step")

    def __init__(self) -> None:
        self.step = "the preparations"
        self.at: tuple[Any, float] | None = None
        self.limit_s: float | None = None
        self.plan: Sequence[Any] | None = None
        self.hand: Mapping[Any, Any] = {}
        self.comm: Any = None

    def begin(self, step: str) -> None:
        """Record the start of the step that the text `step` names, before any of its passes."""
        self.step = step
        self.plan = None
        # A rank may hang before its first pass, and is found by this place.
        self.at = ("the start", monotonic())

    def enter(self, call: str) -> None:
        """Record the start of a call in which ranks wait for each other; `call` is its name."""
        self.at = (call, monotonic())

    def leave(self) -> None:
        """Record the end of the call that `enter` recorded: the thread waits for no other rank."""
        self.at = None
