"""A signal that asks the run to save and leave, as a cluster's scheduler sends before it takes the machine away."""

from __future__ import annotations

import signal
from types import FrameType


class ExitSignal:
    """Notes a signal instead of dying of it. A second one of the kind does what it did before.

    Args:
        name: such as SIGTERM; None to listen to none. Only the main thread of a process may listen.
    Attributes:
        received: did it arrive on this rank?
    """

    def __init__(self, name: str | None) -> None:
        self.received = False
        self._number = None if name is None else signal.Signals[name]
        if self._number is not None:
            self._before = signal.signal(self._number, self._note)

    def close(self) -> None:
        """Stop listening."""
        if self._number is not None:
            signal.signal(self._number, self._before)
            self._number = None

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self.received:
            self.close()
            signal.raise_signal(number)
        self.received = True
