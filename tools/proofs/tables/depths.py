"""Depths of multi-token prediction on ranks of their own, on one, with heads shared: times next to
perfect balance.

    python tools/proofs/tables/depths.py

A head costs as much as HEAD layers, as one of 128k tokens does at a width of 7168. Perfect is 1F1B
where every rank does a p-th of all layers and heads in one stage.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

# A fresh clone runs it before anything is installed.
sys.path.insert(0, str(Path(__file__).parents[3]))

from megapipe.schedule import Costs, build, simulate
from megapipe.schedule.families.vocabulary.shares import all_shared
from megapipe.schedule.shapes.depths import with_depths

HEAD = 4


def perfect(p: int, m: int, each: int) -> float:
    """Return the step time of 1F1B with `each` layers on every stage."""
    return simulate(build("1f1b", p, m), Costs(each, each, each)).makespan


def makespan(p: int, m: int, each: int, ranks: Sequence[int], *, shared: bool = False) -> float:
    """The step time with depths on these ranks, the layers dealt to the rank that has least: p x
    `each` layers in all, heads and depths counted as what they cost. shared: all ranks have a part
    of each head.
    """
    head, heads = HEAD * (not shared), (1 + len(ranks)) * HEAD
    beside = [head * (rank == p - 1) + (head + 1) * ranks.count(rank) for rank in range(p)]
    layers = [0] * p
    for _ in range(p * each - sum(beside) - heads * shared):
        layers[min(range(p), key=lambda rank: layers[rank] + beside[rank])] += 1
    times = (*map(float, layers[:-1]), float(layers[-1] + head), *[head + 1.0] * len(ranks))
    costs = Costs(times, times, times, s=2 * heads / p, t=heads / p)
    return simulate(
        with_depths(build("1f1b", p, m), ranks, costs, shared=all_shared if shared else None), costs
    ).makespan


def apart(p: int, depths: int) -> list[int]:
    """A rank for each depth, before the rank of the loss."""
    return [p - 1 - depth for depth in range(1, 1 + depths)]


def main() -> None:
    print(
        "p  depths  m  apart  best of one stage  vocabulary passes  (of the time of perfect "
        "balance)"
    )
    for p, depths, each in ((4, 1, 12), (4, 2, 12), (4, 3, 14), (8, 1, 12), (8, 2, 12), (8, 3, 14)):
        m, whole = 32 * p, perfect(p, 32 * p, each)
        one = min(makespan(p, m, each, [rank] * depths) for rank in (p - 2, p - 1))
        times = (
            makespan(p, m, each, apart(p, depths)),
            one,
            makespan(p, m, each, [p - 1] * depths, shared=True),
        )
        print(p, depths, m, *(f"{time / whole:.3f}" for time in times), flush=True)


if __name__ == "__main__":
    main()
