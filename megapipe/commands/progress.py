"""Show the progress of long work as a bar on the terminal."""

from __future__ import annotations

import sys
import time


class Progress:
    """A bar on stderr, which appears once the work has lasted a second.

    Nothing is shown if stderr is no terminal. Call the object with the part of the work that is
    done, from 0 to 1, again and again; 1 removes the bar.

    Attributes:
        shown: whether stderr is a terminal.
    """

    def __init__(self) -> None:
        self.started = time.monotonic()
        self.width = 0
        self.shown = sys.stderr.isatty()

    def __call__(self, share: float, doing: str = "zb-auto") -> None:
        """Show the progress, or remove the bar.

        Args:
            share: the part of the work that is done, from 0 to 1. 1 removes the bar.
            doing: a name of the work, or a count, at the right of the bar.
        """
        if not self.shown:
            return
        now = time.monotonic()
        # The time before the first progress, such as counting the work, says nothing of its speed.
        if not share:
            self.started = now
        took = now - self.started
        text = ""
        if share < 1:
            # Short work shows nothing. Once there is a bar, it stays until the end.
            if took < 1 and not self.width:
                return
            filled = int(24 * share)
            text = f"[{'#' * filled}{'.' * (24 - filled)}] {share:4.0%} {doing}"
            if share:
                text += f", {took / share - took:.0f} s left"
        if text or self.width:
            # Blanks cover the rest of a longer text that stood here before.
            sys.stderr.write(f"\r{text:<{self.width}}")
            # Without a bar, the next line of output begins at the left margin.
            if not text:
                sys.stderr.write("\r")
            sys.stderr.flush()
        self.width = len(text)
