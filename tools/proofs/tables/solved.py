"""The solver of hold, offload and recompute against what one would do by hand, and against every choice there is.

    python tools/proofs/tables/solved.py --draws 200 --exhaustive 6 --seed 1

Draws at p 8, m 16: costs, a copy ratio of 0.5, 1 or 2 and a memory of 50% or 25% of 1F1B's. The solver must never be
worse than the best of V-Half, V-Min, full recomputation and offloading alone: those of 1F1B, and those of any table.
Exhaustive: 1F1B at p 3, m 4, every choice for the two ranks that hold more than one microbatch.
"""

from __future__ import annotations

from argparse import ArgumentParser
from collections.abc import Iterator
from itertools import product
from math import inf
from random import Random

from megapipe.schedule import Costs, Schedule, ScheduleError, build, simulate
from megapipe.schedule.catalogue import PLAIN
from megapipe.schedule.memory.solve import Verb, applied, solve, tables
from megapipe.schedule.transforms.memory import with_offload, with_recompute

RANKS, MICROBATCHES = 8, 16


def main() -> None:
    """Draw, and say how often the solver is better."""
    parser = ArgumentParser(description=__doc__)
    parser.add_argument("--draws", type=int, default=200)
    parser.add_argument("--exhaustive", type=int, default=6)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--tries", type=int, default=60)
    args = parser.parse_args()
    dice, better = Random(args.seed), [0, 0]
    for n in range(1, args.draws + 1):
        costs, memory = draw(dice)
        plain = list(tables(RANKS, MICROBATCHES, costs))
        ways = [[one for one in plain if one.name == PLAIN], plain]
        by_hand = [min((simulate(x, costs).makespan for x in usual(of, costs, memory)), default=inf) for of in ways]
        try:
            found = solve(plain, costs, memory, tries=args.tries).makespan
        except ScheduleError:
            found = inf
        assert found <= min(by_hand) * (1 + 1e-9), f"{costs}, memory {memory:g}: {found:g}, by hand {by_hand}"
        better = [count + (found < best * (1 - 1e-9)) for count, best in zip(better, by_hand, strict=True)]
        if n % 5 == 0 or n == args.draws:
            shares = [f"{count / n:.0%}" for count in better]
            print(
                f"{n} draws: never worse; better in {shares[0]} than on 1F1B, {shares[1]} than on any table", flush=True
            )
    for n in range(args.exhaustive):
        costs, memory = drawn_costs(dice, dice.choice((0.5, 1.0, 2.0))), dice.choice((1.0, 1.5, 2.0))
        table = build("1f1b", 3, 4)
        best = min(every(table, costs, memory), default=inf)
        found = solve([table], costs, memory).makespan if best < inf else inf
        print(f"{n}: every choice {best:g}, the solver {found:g}", flush=True)
        assert found <= best * 1.02 or best == inf


def draw(dice: Random) -> tuple[Costs, float]:
    """Costs and a memory."""
    costs = drawn_costs(dice, dice.choice((0.5, 1.0, 2.0)))
    return costs, RANKS * dice.choice((0.5, 0.25))


def drawn_costs(dice: Random, ratio: float) -> Costs:
    """Costs of which a copy takes so much of a forward, each way."""
    f, b, w = 1.0, dice.uniform(0.8, 1.6), dice.uniform(0.6, 1.1)
    return Costs(f, b, w, comm=dice.choice((0.0, 0.05, 0.1)), mem_w=dice.uniform(0.2, 1), o=ratio, l=ratio)


def usual(plain: list[Schedule], costs: Costs, memory: float) -> Iterator[Schedule]:
    """Tables that fit without a solver."""
    ways = [build(name, RANKS, MICROBATCHES, costs=costs) for name in ("v-half", "v-min")]
    for table in plain:
        ways += [with_recompute(table, costs), *(with_offload(table, costs, share=x) for x in (0.25, 0.5, 0.75, 1.0))]
    yield from (way for way in ways if max(simulate(way, costs).peak) <= memory * (1 + 1e-9))


def every(table: Schedule, costs: Costs, memory: float) -> Iterator[float]:
    """The makespan of every choice that fits. The last rank holds one microbatch at a time, whatever is chosen."""
    places = [(stage, microbatch) for stage in range(2) for microbatch in range(4)]
    for verbs in product(Verb, repeat=len(places)):
        choices = {place: verb for place, verb in zip(places, verbs, strict=True) if verb is not Verb.HOLD}
        tried = applied(table, choices, costs)
        if tried.fits(memory):
            yield tried.makespan


if __name__ == "__main__":
    main()
