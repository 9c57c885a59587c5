"""A bar for what lasts."""

from __future__ import annotations

import sys
import time


class Progress:
    """A bar on stderr, once the work has lasted a second; nothing where stderr is no terminal."""

    def __init__(self) -> None:
        self.started, self.width, self.shown = time.monotonic(), 0, sys.stderr.isatty()

    def __call__(self, share: float, doing: str = "zb-auto") -> None:
        if not self.shown:
            return
        now = time.monotonic()
        if not share:  # what came before, such as counting what there is to do, says nothing of how fast it goes
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
