"""Tables with pairs, drawn: verified, played with sends that wait for their receives, and timed by
another clock.

    python -m tools.proofs.tables.paired --seconds 60 --seed 1

Of the catalogue at p 2 to 8 and m 1 to 4p, and of tables that no catalogue has. Every table comes
out valid, shorter than it was, within its memory, with each stage's passes in their order; or is
refused with a sentence that says why, and what it says to try does gain. Ends with how many of each
there were.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from random import Random

from megapipe.flags.parse import parse, run
from megapipe.schedule import Costs, Kind, Schedule, ScheduleError, simulate, unpaired, verify
from megapipe.schedule.core.bound import paired_bound
from megapipe.schedule.costs import SHARES
from megapipe.schedule.shapes.pairs.pairs import pairs
from tools.proofs.shrink import Draws, Fuzzer
from tools.proofs.tables.drawn import any_table

REFUSED = re.compile(r"They gain from --memory (\S+) on|Take more microbatches")


@dataclass(frozen=True)
class Flags(Draws):
    """Draw tables, and put passes that hide each other's communication together."""

    seconds: float = 60.0
    """How long to go on."""
    tries: int = 24
    """Number of tables that each is chosen from."""


def main(argv: Sequence[str]) -> None:
    """Draw until the time is over."""
    flags, seen = parse(Flags, argv), Counter[str]()

    def tried(case: tuple[Schedule, Costs, float | None]) -> list[str]:
        seen[check(*case, flags.tries)] += 1
        return []

    Fuzzer("paired", draw, tried).prove(flags)
    print(", ".join(f"{count} {what}" for what, count in sorted(seen.items())))


def draw(dice: Random) -> tuple[Schedule, Costs, float | None] | None:
    """A table, costs, and a memory or None for any."""
    table = drawn(dice)
    if table is None:
        return None
    return table, drawn_costs(dice), dice.choice((None, None, dice.uniform(1, 20)))


def drawn(dice: Random) -> Schedule | None:
    """A schedule of the catalogue or a table of dice; None where there is none of these numbers."""
    try:
        return any_table(dice, dice.randint(2, 8), least=1, chunks=(2, 3, 4))
    except ScheduleError:
        return None


def drawn_costs(dice: Random) -> Costs:
    """Draw costs of a device, with equal shares of communication in every pass, or in forward and
    backward alone.
    """
    share = dice.uniform(0.05, 0.6)
    f, b, w = (dice.choice((5, 10, dice.uniform(1, 20))) for _ in range(3))
    links = dict.fromkeys(SHARES[: dice.choice((2, 3))], share)
    return replace(
        Costs(f, b, w, comm=dice.choice((0, 0, 0.5)), piece=dice.choice((0, 0, 0.5))), **links
    )


def check(table: Schedule, costs: Costs, memory: float | None, tries: int) -> str:
    """Return the outcome of a table.

    Raises: AssertionError, or any error of the transform but a refusal.
    """
    case = f"{table.name} {table.placement} m {table.num_microbatches} {costs} memory {memory}"
    made: Schedule | None
    try:
        made = pairs(table, costs, memory=memory, tries=tries)
    except ScheduleError as error:
        made, text = None, str(error)
    if made is None:
        found = REFUSED.search(text)
        assert found, f"{case}: {text}"
        if found[1]:
            again = pairs(table, costs, memory=float(found[1]) * (1 + 1e-6), tries=72)
            assert simulate(again, costs).makespan < simulate(unpaired(table), costs).makespan, case
        return "refused"
    verify(made, memory=memory, costs=costs)
    time = simulate(made, costs)
    assert time.makespan < simulate(unpaired(table), costs).makespan, case
    assert time.makespan >= (paired_bound(made, costs, max(time.peak)) or 0) * (1 - 1e-9), case
    assert orders(made) == orders(table), case
    return "paired"


def orders(table: Schedule) -> dict[tuple[bool, int], list[int]]:
    """The microbatches of each stage's forwards and backwards, in order."""
    found: dict[tuple[bool, int], list[int]] = {}
    for kind, stage, microbatch, _ in (x for row in table.ranks for step in row for x in step):
        if kind is not Kind.W:
            found.setdefault((kind.is_forward, stage), []).append(microbatch)
    return found


if __name__ == "__main__":
    run(main)
