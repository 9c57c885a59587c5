"""Show the progress of long work as a bar on the terminal."""

from __future__ import annotations

import sys
import time


class Progress:
    """A bar on stderr, which appears once the work has lasted a second.

    Nothing is shown if stderr is no terminal. Call it with the part that is done, from 0 to 1; 1
    removes the bar.
    """

    def __init__(self) -> None:
        self.started = time.monotonic()
        self.width = 0
        self.shown = sys.stderr.isatty()

    def __call__(self, share: float, doing: str = "zb-auto") -> None:
        if not self.shown:
            return
        now = time.monotonic()
        # The time before the first progress, such as counting the work, says nothing of its speed.
        if not share:
            self.started = now
        took = now - self.started
        if share >= 1:
            text = ""
        elif took < 1 and not self.width:
            return
        else:
            filled = int(24 * share)
            left = f", {took / share - took:.0f} s left" if share else ""
            text = f"[{'#' * filled}{'.' * (24 - filled)}] {share:4.0%} {doing}{left}"
        if text or self.width:
            sys.stderr.write(f"\r{text:<{self.width}}" + ("" if text else "\r"))
            sys.stderr.flush()
        self.width = len(text)
