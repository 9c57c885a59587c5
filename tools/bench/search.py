"""Cases where a better schedule than any fixed pattern is known to exist, and how far the search
gets in its minute.

    python tools/bench/search.py [--effort 50] [--only 6 15]

Known is the best that any search has found, ours or minutes of annealing elsewhere; closed, how
much of the way from the best table of the catalogue that fits to it. CPU time is counted, so that a
busy machine says the same.
"""

from __future__ import annotations

import sys
from argparse import ArgumentParser
from pathlib import Path
from random import Random
from time import process_time
from typing import NamedTuple

# A fresh clone runs it before anything is installed.
sys.path.insert(0, str(Path(__file__).parents[2]))

from megapipe.schedule import Placement, loop, simulate, vee
from megapipe.schedule.costs import Costs
from megapipe.schedule.patterns import fixed
from megapipe.schedule.search.auto import search

_REAL, _LONG, _EVEN = (10.0, 11.0, 8.0), (10.0, 14.0, 7.0), (10.0, 10.0, 10.0)


class Case(NamedTuple):
    """A search. times: F, B, W of a device share, or the seed of uneven ones; lag: of a message."""

    shape: str
    chunks: int
    ranks: int
    microbatches: int
    times: tuple[float, float, float] | int
    lag: float
    memory: float
    known: float

    @property
    def placement(self) -> Placement:
        return vee(self.ranks) if self.shape == "v" else loop(self.ranks, self.chunks)

    @property
    def costs(self) -> Costs:
        if isinstance(self.times, tuple):
            return Costs(*self.times, comm=self.lag)
        dice, chain = Random(self.times), self.placement.chain
        share = self.ranks / chain
        f, b, w = (
            tuple(round(x * share * dice.uniform(0.8, 1.2), 2) for _ in range(chain)) for x in _REAL
        )
        return Costs(f, b, w, comm=self.lag, mem_b=(share,) * chain, mem_w=(share,) * chain)

    @property
    def peer(self) -> float:
        """The shortest table of the catalogue that fits."""
        made = (
            x
            for x in fixed(self.ranks, self.microbatches, self.chunks)
            if x.placement == self.placement
        )
        timed = (simulate(x, self.costs) for x in made)
        return min(x.makespan for x in timed if max(x.peak) <= self.memory * (1 + 1e-9))


CASES = [
    Case("v", 2, 4, 8, _LONG, 0.0, 3, 290.5),
    Case("v", 2, 4, 8, _LONG, 0.0, 2, 344.5),
    Case("v", 2, 8, 16, _LONG, 0.0, 6, 589.5),
    Case("v", 2, 8, 16, _LONG, 0.0, 5, 620.5),
    Case("v", 2, 8, 16, _LONG, 0.0, 4, 681.5),
    Case("v", 2, 8, 16, _REAL, 0.0, 4, 600.0),
    Case("loop", 2, 8, 16, _REAL, 0.0, 8, 502.5),
    Case("loop", 2, 4, 8, _LONG, 0.0, 4, 270.0),
    Case("v", 2, 8, 16, _REAL, 0.5, 8, 513.0),
    Case("v", 2, 8, 16, _REAL, 0.5, 6, 556.5),
    Case("v", 2, 8, 16, _REAL, 0.5, 5, 585.5),
    Case("v", 2, 8, 16, _REAL, 0.5, 4, 636.0),
    Case("v", 2, 4, 8, _REAL, 0.5, 4, 253.0),
    Case("v", 2, 4, 8, _REAL, 0.5, 3, 273.5),
    Case("v", 2, 4, 8, _REAL, 0.5, 2, 324.0),
    Case("loop", 2, 8, 16, _REAL, 0.5, 8, 516.0),
    Case("loop", 2, 8, 16, _LONG, 0.0, 8, 550.5),
    Case("loop", 2, 8, 16, _LONG, 0.5, 8, 563.5),
    Case("loop", 2, 8, 16, _REAL, 1.0, 8, 531.5),
    Case("loop", 2, 4, 8, _REAL, 0.5, 4, 253.5),
    Case("loop", 2, 4, 8, _REAL, 0.0, 4, 248.5),
    Case("v", 2, 8, 8, _REAL, 0.0, 8, 270.5),
    Case("v", 2, 8, 8, _REAL, 0.0, 6, 303.5),
    Case("v", 2, 8, 16, _EVEN, 0.5, 8, 525.5),
    Case("v", 2, 8, 16, _EVEN, 0.5, 6, 556.0),
    Case("loop", 1, 8, 16, 1, 0.0, 8, 582.0),
    Case("v", 2, 8, 16, 2, 0.0, 8, 531.4),
    Case("v", 2, 8, 16, 3, 0.0, 6, 548.0),
    Case("loop", 2, 8, 16, 4, 0.5, 8, 544.44),
    Case("v", 2, 4, 12, _LONG, 0.0, 3, 414.5),
    Case("v", 2, 6, 12, _REAL, 0.0, 4, 414.5),
    Case("loop", 2, 6, 12, _REAL, 0.5, 6, 385.0),
    Case("loop", 4, 4, 8, _LONG, 0.5, 4, 267.75),
]


def main() -> None:
    """Print a line for each case as soon as it is searched."""
    parser = ArgumentParser(description=__doc__)
    parser.add_argument(
        "--effort", type=float, default=50.0, help="about the seconds for each line (default: 50)"
    )
    parser.add_argument(
        "--only",
        type=int,
        nargs="+",
        default=range(len(CASES)),
        metavar="N",
        help="lines by number",
    )
    args = parser.parse_args()
    print(
        " n placement  p   m       F/B/W  lag memory   peer    ours   known   bound closed seconds"
    )
    far = best = 0
    for n in args.only:
        x = CASES[n]
        began, peer = process_time(), x.peer
        found = search(
            x.ranks,
            x.microbatches,
            placement=x.shape,
            chunks=x.chunks,
            costs=x.costs,
            memory=x.memory,
            effort=args.effort,
            seconds=55.0,
        )
        closed = (peer - found.makespan) / (peer - x.known) if peer > x.known else 1.0
        far += closed >= 2 / 3
        best += found.makespan <= x.known * (1 + 1e-9)
        times = (
            f"uneven {x.times}" if isinstance(x.times, int) else "/".join(f"{t:g}" for t in x.times)
        )
        print(
            f"{n:2} {x.shape:>7} {x.chunks} {x.ranks:2} {x.microbatches:3} {times:>11} {x.lag:4} "
            f"{x.memory:6}",
            end=" ",
        )
        print(
            f"{peer:6.6g} {found.makespan:7.6g} {x.known:7.6g} {found.bound:7.6g} {closed:6.0%}",
            end=" ",
        )
        print(f"{process_time() - began:7.1f}", flush=True)
    print(f"{far} of {len(args.only)} at two thirds of the way or more, {best} at the best known")


if __name__ == "__main__":
    main()
