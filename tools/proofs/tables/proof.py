"""The proof of a kind of tables: drawn ones are checked, and misordered ones have to be refused."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass
from itertools import accumulate
from typing import Generic, TypeVar

from megapipe.flags.parse import parse
from megapipe.schedule import Kind, Pass, Schedule
from tools.proofs.shrink import Draws, Fuzzer
from tools.proofs.tables.drawn import refusal

T = TypeVar("T")


def most(intervals: Iterable[tuple[float, float, float]]) -> float:
    """Return the largest sum of sizes at any time. intervals: (begin, end, size).

    What is freed at an instant is gone before anything is taken: a pass starts when another ends.
    """
    moments = [
        moment
        for begin, end, size in intervals
        for moment in ((round(begin, 9), size > 0, size), (round(end, 9), size < 0, -size))
    ]
    return max(accumulate((size for _, _, size in sorted(moments)), initial=0.0))


Wrong = tuple[str, Schedule, Pass]
"""A mistake, a table that has it, and the pass that a refusal has to name."""
Mistake = Callable[[Schedule, Pass], tuple[Schedule, Pass] | None]
"""Makes a mistake at a pass of a table. Returns the table and the pass to blame, or None."""


def misorder(
    dice: random.Random, table: Schedule, kinds: Set[Kind], mistakes: Mapping[str, Mistake]
) -> Wrong | None:
    """Make one of the mistakes at a pass of these kinds; None where none has a place."""
    items = [x for row in table.ranks for step in row for x in step if x.kind in kinds]
    made: dict[str, Wrong] = {}
    # Of several passes, because some mistakes have few places.
    for item in dice.sample(items, min(8, len(items))):
        for name, mistake in mistakes.items():
            if name not in made and (wrong := mistake(table, item)) is not None:
                made[name] = name, *wrong
    return dice.choice(list(made.values())) if made else None


@dataclass(frozen=True)
class Flags(Draws):
    """Draw tables, check them, and see that misordered ones are refused."""

    cases: float = 300
    """Number of tables."""


class Proof(Generic[T]):
    """Drawn tables that are checked, each misordered too where it has a place for a mistake.

    Args:
        name: names the folder of failing cases.
        draw: returns a table, and what `check` needs to know of it; None for no table.
        check: raises an error for a table that is not as it should be.
        wrong: returns a mistake in a table, which `verify` has to refuse.

    Attributes:
        refused: how often each mistake was made and refused.
    """

    def __init__(
        self,
        name: str,
        draw: Callable[[random.Random], tuple[Schedule, T] | None],
        check: Callable[[Schedule, T], None],
        wrong: Callable[[random.Random, Schedule], Wrong | None],
    ) -> None:
        self.draw, self.check, self.wrong = draw, check, wrong
        self.refused = Counter[str]()
        self.fuzzer = Fuzzer(name, self._case, self._run)

    def _case(self, dice: random.Random) -> tuple[Schedule, T, Wrong | None] | None:
        drawn = self.draw(dice)
        return None if drawn is None else (*drawn, self.wrong(dice, drawn[0]))

    def _run(self, case: tuple[Schedule, T, Wrong | None]) -> list[str]:
        table, known, wrong = case
        self.check(table, known)
        if wrong is not None:
            name, other, blamed = wrong
            told = refusal(other)
            if not any(str(blamed) in line and "rank" in line for line in told):
                return [f"{name} of {blamed} in {table.name}: {told or 'not refused'}"]
            self.refused[name] += 1
        return []

    def main(self, argv: Sequence[str]) -> None:
        """Draw as many tables as the flags say, and print how many of each mistake there were."""
        self.fuzzer.prove(parse(Flags, argv))
        print(f"{self.fuzzer.count} tables verified, held as counted by hand")
        mistakes = ", ".join(f"{count} {name}" for name, count in self.refused.items())
        print(f"{self.refused.total()} misorders, all refused by the line: {mistakes}")
