"""The outcomes of drawn commands, counted by scene."""

from __future__ import annotations

import re
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

VERDICTS = ("accepted", "refused", "traceback", "unclear", "silent", "too slow")
GOOD = ("accepted", "refused")
"""Verdicts on a command that did what it should."""


def breakdown(code: int | None, text: str) -> str | None:
    """Return the verdict on a command that did not come to an end of its own; None if it did.

    code: its exit status, None if it was killed.
    """
    if code is None:
        return "too slow"
    signs = ("Traceback (most recent call last)", "panicked at", "AssertionError")
    return "traceback" if any(sign in text for sign in signs) else None


def names_one_of(text: str, words: Iterable[str]) -> bool:
    """Return whether a message has one of the words in it."""
    return any(re.search(rf"(?<!\w){re.escape(word)}", text) for word in words)


@dataclass
class Tally:
    """Counts verdicts, and keeps the longest time of each scene in milliseconds."""

    scenes: Sequence[str]
    counts: Counter[tuple[str, str]] = field(default_factory=Counter)
    slowest: Counter[str] = field(default_factory=Counter)

    @contextmanager
    def timed(self, scene: str) -> Iterator[None]:
        """Time what runs meanwhile."""
        began = time.monotonic()
        yield
        took = int(1e3 * (time.monotonic() - began))
        self.slowest[scene] = max(self.slowest[scene], took)

    def add(self, scene: str, verdict: str, text: str) -> list[str]:
        """Count a verdict. Returns what is wrong if it is a bad one, of a command that printed
        `text`.
        """
        self.counts[scene, verdict] += 1
        return [] if verdict in GOOD else [f"{scene}, {verdict}: {gist(text)}", text]

    def report(self) -> str:
        """Return a table with a row for each scene and one for all."""
        head = ["command", "draws", *VERDICTS, "slowest, ms"]
        rows = [head, ["---", *["---:"] * (len(head) - 1)]]
        for name in [*self.scenes, "all"]:
            own = [scene for scene in self.scenes if name in (scene, "all")]
            cells = [sum(self.counts[x, verdict] for x in own) for verdict in VERDICTS]
            slowest = max((self.slowest[x] for x in own), default=0)
            rows.append([name, *map(str, [sum(cells), *cells, slowest])])
        return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def gist(text: str) -> str:
    """Return where a traceback ends in our code, or the last line."""
    lines = text.strip().splitlines() or ["nothing printed"]
    places = re.findall(r'File "[^"]*/((?:megapipe|tools|pretrain_gpt)[^"]*)", line (\d+)', text)
    return (f"{places[-1][0]}:{places[-1][1]} " if places else "") + lines[-1][:150]
