"""A split by cost: the layers of each stage such that the chosen schedule takes the least simulated time.

Balancing stages is not enough, since a schedule hides work in one place and waits for it in another. So the clock
itself judges every candidate; a balanced split is only where the search begins.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import permutations
from math import inf

from megapipe.partition.spans import nearly_even
from megapipe.plan.pieces import Pieces
from megapipe.schedule import Costs, Schedule
from megapipe.schedule.simulate import memory_steps, run_clock

Counts = tuple[int, ...]
Score = tuple[float, float, float]
# Passes that a search may time, some five seconds. Counted, not timed: every rank finds the same.
_PASSES = 4_000_000


@dataclass(frozen=True)
class Judge:
    """The worth of a split under a schedule.

    Attributes:
        limit: bytes that the activations of each rank may take, given the split; None: no limit.
    """

    schedule: Schedule
    pieces: Pieces
    limit: Callable[[Counts], Sequence[float]] | None = None

    def score(self, counts: Counts) -> Score:
        """(bytes above the limit, makespan, unevenness): the less the better, in this order."""
        costs = self.pieces.costs(counts)
        clock = run_clock(self.schedule, costs)
        excess = 0.0
        if self.limit is not None:
            curves = memory_steps(self.schedule, costs, clock)
            peaks = [max((held for _, held, _ in curve), default=0.0) for curve in curves]
            excess = max(0.0, *(p - allowed for p, allowed in zip(peaks, self.limit(counts), strict=True)))
        return excess, max(ends[-1] for ends in clock.end if ends), sum(load**2 for load in self.loads(costs))

    def loads(self, costs: Costs) -> list[float]:
        """Time that each rank computes for one microbatch of each chain."""
        place = self.schedule.placement
        times = [sum(column) for column in zip(*(_tuple(c) for c in (costs.f, costs.b, costs.w)), strict=True)]
        return [sum(times[place.position(s)] for s in place.stages_on(r)) for r in range(place.num_ranks)]

    def beside(self) -> list[float]:
        """Time of the depths of multi-token prediction on the rank of each stage, its part of it."""
        place, own = self.schedule.placement, self.schedule.placement.rank_of[: self.schedule.placement.main]
        loads = dict.fromkeys(own, 0.0)
        for rank, depth in zip(place.rank_of[place.main : place.chain], self.pieces.depths, strict=True):
            loads[rank] += depth.time
        return [loads[rank] / own.count(rank) for rank in own]


def search(judge: Judge) -> Counts:
    """The best split that descent finds from an even and from a balanced one.

    A move takes a layer from one stage to another, those between shifting by one. Same input, same result: every rank
    runs it by itself.
    """
    chain = judge.schedule.placement.main
    layers = len(judge.pieces.layers)
    budget = _PASSES // sum(map(len, judge.schedule.ranks))
    scores: dict[Counts, Score] = {}

    def score(counts: Counts) -> Score:
        if counts not in scores:
            # Beyond the budget every split counts as bad: the descent ends where it stands, on all ranks alike.
            scores[counts] = judge.score(counts) if len(scores) <= budget else (inf, inf, inf)
        return scores[counts]

    even = nearly_even(layers, chain)
    for start in dict.fromkeys((even, balanced(judge.pieces, chain, judge.beside()))):
        here = start
        while (best := min(_moves(here), key=score, default=here)) and score(best) < score(here):
            here = best
    best = min(scores, key=score, default=even)
    (excess, time, _), (even_excess, even_time, _) = score(best), score(even)
    # What differs by rounding alone is no reason to leave the even split.
    return even if excess == even_excess and time > even_time * (1 - 1e-9) else best


def balanced(pieces: Pieces, chain: int, beside: Sequence[float] = ()) -> Counts:
    """The split whose longest stage is shortest, by dynamic programming over (stages, layers so far).

    beside: time that each stage shares its rank with.
    """
    layers, more = len(pieces.layers), beside or [0.0] * chain
    ends = [0.0]
    for work in pieces.layers:
        ends.append(ends[-1] + work.time)
    best = [pieces.embedding.time + end + more[0] for end in ends]
    cuts: list[list[int]] = []
    for position in range(1, chain):
        head = more[position] + (pieces.head.time if position == chain - 1 else 0.0)
        rows = [
            min((max(best[a], ends[b] - ends[a] + head), abs(2 * a - b), a) for a in range(b + 1))
            for b in range(layers + 1)
        ]
        best = [row[0] for row in rows]
        cuts.append([row[2] for row in rows])
    counts, upto = [], layers
    for row in reversed(cuts):
        counts.append(upto - row[upto])
        upto = row[upto]
    return (upto, *reversed(counts))


def _moves(counts: Counts) -> Iterator[Counts]:
    for source, target in permutations(range(len(counts)), 2):
        if counts[source]:
            yield tuple(n - (i == source) + (i == target) for i, n in enumerate(counts))


def _tuple(value: float | tuple[float, ...]) -> tuple[float, ...]:
    assert isinstance(value, tuple)
    return value
