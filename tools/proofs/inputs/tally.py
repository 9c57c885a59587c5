"""The outcomes of drawn commands, counted by scene."""

from __future__ import annotations

import re
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

GOOD = ("accepted", "refused")
"""Verdicts on a command that did what it should."""


@dataclass
class Tally:
    """Counts verdicts, and keeps the longest time of each scene in milliseconds."""

    scenes: Sequence[str]
    verdicts: Sequence[str]
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
        head = ["command", "draws", *self.verdicts, "slowest, ms"]
        rows = [head, ["---", *["---:"] * (len(head) - 1)]]
        for name in [*self.scenes, "all"]:
            own = [scene for scene in self.scenes if name in (scene, "all")]
            cells = [sum(self.counts[x, verdict] for x in own) for verdict in self.verdicts]
            slowest = max((self.slowest[x] for x in own), default=0)
            rows.append([name, *map(str, [sum(cells), *cells, slowest])])
        return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def gist(text: str) -> str:
    """Return where a traceback ends in our code, or the last line."""
    lines = text.strip().splitlines() or ["nothing printed"]
    places = re.findall(r'File "[^"]*/((?:megapipe|tools|pretrain_gpt)[^"]*)", line (\d+)', text)
    return (f"{places[-1][0]}:{places[-1][1]} " if places else "") + lines[-1][:150]
