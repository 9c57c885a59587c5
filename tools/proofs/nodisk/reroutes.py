"""Draw lost ranks of all schedules: each rerouted table is verified, and its price printed.

python -m tools.proofs.nodisk.reroutes --draw 500
"""

from __future__ import annotations

import random
import sys
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from megapipe.errors import ScheduleError
from megapipe.flags.parse import parse
from megapipe.schedule import SCHEDULES, Costs, build, simulate, verify
from megapipe.schedule.core.joint import joint_costs
from megapipe.schedule.core.reroute import reroute


@dataclass(frozen=True)
class Options:
    """Reroute around drawn ranks."""

    draw: int = 100
    """Tables to draw."""
    seed: int = 1
    """Seed of the draws."""


@dataclass(frozen=True)
class Price:
    """What a table costs without a rank.

    Attributes:
        step: its time, as a multiple of the healthy step.
        work: the time of the busiest rank's passes, as a multiple of the healthy step.
        limited: whether no rank holds more than the fullest one of a healthy replica.
        name: of the schedule.
    """

    step: float
    work: float
    limited: bool
    name: str


def _line(replicas: int, rows: Sequence[Price]) -> str:
    """Return a line on the tables of so many replicas, and on those above d/(d-1) by cause."""
    bound = replicas / (replicas - 1) + 1e-9
    steps = sorted(row.step for row in rows)
    above = [row for row in rows if row.step > bound]
    # Few microbatches do not divide among the peers.
    busy = [row for row in above if row.work > bound]
    limited = [row for row in above if row.limited and row not in busy]
    longest = sorted((round(row.step, 3), row.name) for row in above)[-3:]
    return (
        f"{replicas} replicas: {len(rows)} tables sound; a step takes {steps[0]:.3f} to "
        f"{steps[-1]:.3f} x the healthy one, in the middle {steps[len(steps) // 2]:.3f}; "
        f"{replicas}/{replicas - 1} = {bound:.3f}, {len(above)} above it: {len(busy)} have a rank "
        f"with more work, {len(limited)} of the others no more memory than the fullest rank had; "
        f"longest {longest}"
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Exit status: 0 if each table is sound, and no step faster than the work of its ranks."""
    options = parse(Options, sys.argv[1:] if argv is None else argv)
    draw = random.Random(options.seed)
    names = [name for name, entry in SCHEDULES.items() if not entry.searched]
    refused: Counter[str] = Counter()
    prices: defaultdict[int, list[Price]] = defaultdict(list)
    count = 0
    while count < options.draw:
        name = draw.choice(names)
        ranks = draw.choice([2, 3, 4, 6])
        microbatches = ranks * draw.choice([1, 2, 3])
        try:
            table = build(name, ranks, microbatches)
        except ScheduleError:
            continue
        count += 1
        comm = draw.choice([0, 0.1])
        f, b, w = (draw.choice([1.0, 1.5, 2.0]) for _ in range(3))
        costs = Costs(f, b, w, comm=comm)
        replicas = draw.choice([1, 2, 3, 4])
        lost = (draw.randrange(replicas), draw.randrange(ranks))
        memory = draw.choice([None, None, None, 1.0])
        if memory is not None:
            memory = max(simulate(table, costs).peak)
        try:
            found = reroute(table, replicas, lost, costs, memory)
        except ScheduleError as error:
            text = str(error)
            refused["no peer" if "no peer" in text else text.rpartition(": ")[2][:12]] += 1
            continue
        verify(found, memory=memory, costs=joint_costs(costs, table))
        of_all = joint_costs(costs, table)
        time = simulate(found, of_all)
        healthy = simulate(table, costs).makespan
        sliced = found if found.cuts else None
        work = max(
            sum(of_all.of_step(x, found.placement, sliced) for x in row) for row in found.ranks
        )
        assert time.makespan >= work - 1e-9, (name, lost)
        limited = memory is not None
        prices[replicas].append(Price(time.makespan / healthy, work / healthy, limited, name))
    for replicas, rows in sorted(prices.items()):
        print(_line(replicas, rows))
    print("refused:", ", ".join(f"{n} ({why})" for why, n in refused.items()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
