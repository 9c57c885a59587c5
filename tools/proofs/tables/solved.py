"""The solver of hold, offload and recompute against what one would do by hand, and against every
choice there is.

    python -m tools.proofs.tables.solved --cases 200 --exhaustive 200 --seed 1
    python -m tools.proofs.tables.solved --table

Draws at p 8, m 16: costs, a copy ratio of 0.5, 1 or 2 and a memory of 50% or 25% of 1F1B's. The
solver must never be worse than the best of V-Half and V-Min where they fit, 1F1B with all computed
again, whatever that holds, and 1F1B with copies alone; nor than the same two on any table of the
catalogue. Exhaustive: 1F1B at p 3, m 4, every choice for the two ranks that hold more than one
microbatch. --table: F = B = W, beside what each way takes by itself.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from math import inf
from random import Random
from time import process_time

from megapipe.flags.parse import parse, run
from megapipe.schedule import Costs, Schedule, ScheduleError, build, simulate
from megapipe.schedule.catalogue import PLAIN
from megapipe.schedule.families.offload.copies import with_offload, with_recompute
from megapipe.schedule.families.offload.solve import TRIES, solve, tables
from megapipe.schedule.families.offload.weigh import Verb, scales
from megapipe.schedule.search.offloaded import searched
from tools.proofs.shrink import Draws, Fuzzer

RANKS, MICROBATCHES = 8, 16
SHARES = (0.25, 0.5, 0.75, 1.0)


@dataclass(frozen=True)
class Flags(Draws):
    """Compare the solver with what one would do by hand, and with every choice there is."""

    cases: float = 200
    """Number of costs and memories to solve for."""
    exhaustive: float = 200
    """Number of small ones that are compared with every choice."""
    tries: int = TRIES
    """Of the solver."""
    table: bool = False
    """Print the table at F = B = W alone."""


@dataclass
class Gains:
    """The makespans of drawn cases, and how much shorter they are than those by hand.

    Attributes:
        better: number of cases that are shorter than the best on 1F1B or V, and on any table.
        gained: shares of those makespans, summed.
        spent: CPU seconds of the solver.
    """

    tries: int
    better: list[int] = field(default_factory=lambda: [0, 0])
    gained: list[float] = field(default_factory=lambda: [0.0, 0.0])
    spent: float = 0.0

    def compare(self, case: tuple[Costs, float]) -> list[str]:
        """Solve for costs and a memory. Returns how it is worse than by hand."""
        by_hand = ways(*case)
        began = process_time()
        found = answer(*case, self.tries)
        self.spent += process_time() - began
        for i, best in enumerate(by_hand):
            self.better[i] += found < best * (1 - 1e-9)
            self.gained[i] += 1 - found / best if best < inf else 0.0
        return [] if found <= min(by_hand) * (1 + 1e-9) else [f"{found:g}, by hand {by_hand}"]


def main(argv: Sequence[str]) -> None:
    """Draw, and say how often the solver is better."""
    flags = parse(Flags, argv)
    if flags.table:
        return print_table(flags.tries)
    gains = Gains(flags.tries)
    fuzzer = Fuzzer("solved", draw, gains.compare)
    fuzzer.prove(flags)
    if n := fuzzer.count:
        pairs = zip(gains.better, gains.gained, strict=True)
        one, any_table = (f"in {count / n:.0%}, by {gain / n:.1%}" for count, gain in pairs)
        print(
            f"{n} draws: never worse; better than on 1F1B or V {one}, than on any table "
            f"{any_table}; {gains.spent / n:.1f} s of CPU each"
        )
    fuzzer = Fuzzer("solved exhaustively", draw_small, above_every_choice)
    fuzzer.prove(replace(flags, cases=flags.exhaustive))
    print(f"{fuzzer.count} exhaustive: at most 2% above the best of every choice")


def draw_small(dice: Random) -> tuple[Costs, float]:
    """Costs, and a memory for 1F1B at p 3, m 4."""
    return drawn_costs(dice, dice.choice((0.5, 1.0, 2.0))), dice.choice((1.0, 1.5, 2.0))


def above_every_choice(case: tuple[Costs, float]) -> list[str]:
    """Return by how much the solver's makespan is above the best of every choice, from 2% on."""
    table = build("1f1b", 3, 4)
    best = min(every(table, *case), default=inf)
    above = solve([table], *case).makespan / best - 1 if best < inf else 0.0
    return [f"{above:.2%} above the best of every choice"] if above > 0.02 else []


def print_table(tries: int) -> None:
    """Print the makespans of the solver, and of each way by itself, at F = B = W."""
    print(
        "| memory | K | solved | V-Min | 1F1B computed again | 1F1B copied | any table computed "
        "again | any copied |"
    )
    for memory, ratio in product((4.0, 2.0), (0.5, 1.0, 2.0)):
        costs = Costs(o=ratio, l=ratio)
        plain = list(tables(RANKS, MICROBATCHES, costs))
        some = [[one for one in plain if one.name == PLAIN], plain]
        alone = [way(some_tables, costs, memory) for some_tables in some for way in (again, copied)]
        found = [
            answer(costs, memory, tries),
            fitting([build("v-min", RANKS, MICROBATCHES)], costs, memory),
            *alone,
        ]
        print(
            "| " + " | ".join(f"{x:g}" if x < inf else "-" for x in (memory, ratio, *found)) + " |",
            flush=True,
        )


def answer(costs: Costs, memory: float, tries: int = TRIES) -> float:
    """The solver's makespan; infinite if it finds nothing that fits."""
    size = RANKS, MICROBATCHES, costs
    try:
        return solve(
            [*tables(*size), *searched(*size, memory)], costs, memory, tries=tries
        ).makespan
    except ScheduleError:
        return inf


def draw(dice: Random) -> tuple[Costs, float]:
    """Costs and a memory."""
    costs = drawn_costs(dice, dice.choice((0.5, 1.0, 2.0)))
    return costs, RANKS * dice.choice((0.5, 0.25))


def drawn_costs(dice: Random, ratio: float) -> Costs:
    """Draw costs whose copies each take `ratio` of a forward."""
    f, b, w = 1.0, dice.uniform(0.8, 1.6), dice.uniform(0.6, 1.1)
    return Costs(
        f, b, w, comm=dice.choice((0.0, 0.05, 0.1)), mem_w=dice.uniform(0.2, 1), o=ratio, l=ratio
    )


def ways(costs: Costs, memory: float) -> tuple[float, float]:
    """The best by hand: of 1F1B and the V schedules, and of any table of the catalogue."""
    plain = list(tables(RANKS, MICROBATCHES, costs))
    one = [table for table in plain if table.name == PLAIN]
    v = fitting(
        [build(name, RANKS, MICROBATCHES, costs=costs) for name in ("v-half", "v-min")],
        costs,
        memory,
    )
    return (
        min(v, again(one, costs, inf), copied(one, costs, memory)),
        min(v, again(plain, costs, memory), copied(plain, costs, memory)),
    )


def again(plain: Sequence[Schedule], costs: Costs, memory: float) -> float:
    """The best with everything computed again."""
    return fitting([with_recompute(table, costs) for table in plain], costs, memory)


def copied(plain: Sequence[Schedule], costs: Costs, memory: float) -> float:
    """The best with copies of a share of the microbatches."""
    return fitting(
        [with_offload(table, costs, share=x) for table in plain for x in SHARES], costs, memory
    )


def fitting(made: Sequence[Schedule], costs: Costs, memory: float) -> float:
    """Return the least makespan of the tables that fit."""
    times = [simulate(one, costs) for one in made]
    return min(
        (time.makespan for time in times if max(time.peak) <= memory * (1 + 1e-9)), default=inf
    )


def every(table: Schedule, costs: Costs, memory: float) -> Iterator[float]:
    """The makespan of every choice that fits. The last rank holds one microbatch at a time,
    whatever is chosen.
    """
    places, weigh = (
        [(stage, microbatch) for stage in range(2) for microbatch in range(4)],
        scales(table, costs, memory),
    )
    for verbs in product(Verb, repeat=len(places)):
        weight = weigh(
            {
                place: verb
                for place, verb in zip(places, verbs, strict=True)
                if verb is not Verb.HOLD
            }
        )
        yield weight.makespan if weight.fits else inf


if __name__ == "__main__":
    run(main)
