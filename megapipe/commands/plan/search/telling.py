"""Say how far a search is: a bar on a terminal, else a line now and then."""

from __future__ import annotations

import sys
import time

from megapipe.commands.progress import Progress

_EVERY = 10.0
"""Seconds between two lines."""


class Telling:
    """Says on stderr how many plans were looked at, and the best step so far.

    The first line comes with the first plan that fits. Pass the object to `search` as `tell`.
    """

    def __init__(self) -> None:
        self._bar = Progress()
        self._began = time.monotonic()
        self._said = 0.0
        self._what = ""

    def first(self, text: str) -> None:
        """Print a line before the search begins."""
        print(text, file=sys.stderr, flush=True)

    def __call__(self, done: int, among: int, best: float | None, what: str = "plans") -> None:
        found = "no plan fits yet" if best is None else f"best {best:.4g} s a step"
        if self._bar.shown and among:
            self._bar(done / among, f"{done:,} of {among:,} {what}, {found}")
            return
        now = time.monotonic()
        said_lately = self._said and now - self._said < _EVERY and what == self._what
        if best is None or said_lately:
            return
        self._what = what
        took = now - self._began
        tried = "a first plan"
        if among:
            self._said = now
            tried = f"{done:,} of {among:,} {what}"
        print(f"{took:.0f} s: {tried}, {found}", file=sys.stderr, flush=True)
