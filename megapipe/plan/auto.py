"""A split by cost: the layers of each stage for which the schedule takes the least simulated time.

Balanced stages are not enough, since a schedule hides work in one place and waits for it in
another. So every candidate is judged by its simulated step. A balanced split is only where the
search begins.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import permutations
from math import inf

from megapipe.partition.spans import nearly_even
from megapipe.plan.pieces import ModelWork
from megapipe.schedule import Costs, Schedule
from megapipe.schedule.simulate import memory_steps, run_clock

Counts = tuple[int, ...]
Score = tuple[float, float, float]
# Passes that a search may time, some five seconds. Counted, not timed: every rank finds the same.
_PASSES = 4_000_000


def as_they_are(costs: Costs) -> Costs:
    """Return costs unchanged."""
    return costs


@dataclass(frozen=True)
class Judge:
    """Compares splits of the layers into stages, under a fixed schedule.

    A split is the number of layers of each stage. `score` returns the score of a split; the
    function `search` looks for the smallest. `loads` returns the work of each rank, and
    `of_depths` the work of multi-token prediction on each stage. Times have the unit of the costs.

    Attributes:
        schedule: the table of passes.
        pieces: the work of embedding, each layer and head.
        limit: takes a split, and returns the bytes that the activations of each rank may take; None
            for no limit.
        price: takes the costs of a split, and returns the costs to simulate. It may add the
            communication that overlapped pairs hide, for example.
    """

    schedule: Schedule
    pieces: ModelWork
    limit: Callable[[Counts], Sequence[float]] | None = None
    price: Callable[[Costs], Costs] = as_they_are

    def score(self, counts: Counts) -> Score:
        """Return the score of a split; a smaller tuple is better.

        Args:
            counts: layers of each stage.
        Returns: (the most bytes by which a rank exceeds its limit, or 0; makespan; unevenness).
            Unevenness is the sum of the squares of the times in `loads`.
        """
        costs = self.price(self.pieces.costs(counts))
        clock = run_clock(self.schedule, costs)
        # Memory comes first: a fast split that does not fit is worth nothing.
        excess = 0.0
        if self.limit is not None:
            curves = memory_steps(self.schedule, costs, clock)
            for curve, allowed in zip(curves, self.limit(counts), strict=True):
                peak = max((held for _, held, _ in curve), default=0.0)
                excess = max(excess, peak - allowed)
        makespan = max(ends[-1] for ends in clock.end if ends)
        # Among splits of equal makespan, and many are equal, one with even ranks leaves slack.
        unevenness = sum(load**2 for load in self.loads(costs))
        return excess, makespan, unevenness

    def loads(self, costs: Costs) -> list[float]:
        """Return, for each rank, the time that it computes for one microbatch of each chain.

        A chain is the stages of one copy of the model; DualPipe has two.

        Args:
            costs: the times of F, B and W on each stage.
        """
        place = self.schedule.placement
        passes = zip(_tuple(costs.f), _tuple(costs.b), _tuple(costs.w), strict=True)
        times = [sum(of_stage) for of_stage in passes]
        loads = []
        for rank in range(place.num_ranks):
            loads.append(sum(times[place.position(stage)] for stage in place.stages_on(rank)))
        return loads

    def of_depths(self) -> list[float]:
        """Return, for each stage, a part of its rank's time for multi-token prediction.

        A rank's time for modules of multi-token prediction is divided evenly among its stages.
        The result has the stages of the main model.
        """
        place = self.schedule.placement
        own = place.rank_of[: place.main]
        loads = dict.fromkeys(own, 0.0)
        depths = place.rank_of[place.main : place.chain]
        for rank, depth in zip(depths, self.pieces.depths, strict=True):
            loads[rank] += depth.time
        return [loads[rank] / own.count(rank) for rank in own]


def search(judge: Judge) -> Counts:
    """Return the best split that is found: the number of layers of each stage.

    The best split has the smallest score. A descent begins from an even split and from a balanced
    one. A move takes a layer from one stage to another, and the stages between them shift by one.
    If no split is faster by more than rounding, the even one is returned. Every rank of a run
    searches by itself and finds the same split.

    Args:
        judge: computes the score of a split.
    """
    chain = judge.schedule.placement.main
    layers = len(judge.pieces.layers)
    budget = _PASSES // sum(map(len, judge.schedule.ranks))
    scores: dict[Counts, Score] = {}

    def score(counts: Counts) -> Score:
        if counts not in scores:
            # Beyond the budget every split counts as bad, so that the descent ends where it is,
            # at the same split on all ranks.
            found = (inf, inf, inf)
            if len(scores) <= budget:
                found = judge.score(counts)
            scores[counts] = found
        return scores[counts]

    even = nearly_even(layers, chain)
    for start in dict.fromkeys((even, balanced(judge.pieces, chain, judge.of_depths()))):
        here = start
        best = min(_moves(here), key=score, default=here)
        while score(best) < score(here):
            here = best
            best = min(_moves(here), key=score, default=here)
    best = min(scores, key=score, default=even)
    excess, time, _ = score(best)
    even_excess, even_time, _ = score(even)
    # A difference by rounding alone is no reason to leave the even split.
    if excess == even_excess and time > even_time * (1 - 1e-9):
        return even
    return best


def balanced(pieces: ModelWork, chain: int, more: Sequence[float] = ()) -> Counts:
    """Return the number of layers of each stage such that the slowest stage is as fast as possible.

    Dynamic programming over stages: the best way to end a stage after the n-th layer follows from
    the best ways to end the stage before it.

    Args:
        pieces: the work of embedding, each layer and head.
        chain: number of stages.
        more: for each stage, the time of other work on its rank; () for none.
    """
    more = more or [0.0] * chain
    ends = [0.0]
    for work in pieces.layers:
        ends.append(ends[-1] + work.time)
    # The time of the first stage, for each number of layers in it.
    best = [pieces.embedding.time + end + more[0] for end in ends]
    cuts: list[list[int]] = []
    for position in range(1, chain):
        fixed = more[position]
        if position == chain - 1:
            fixed += pieces.head.time
        rows = []
        for upto, end in enumerate(ends):
            # Of equal ways the one whose cut is nearest the middle.
            rows.append(
                min(
                    (max(best[cut], end - ends[cut] + fixed), abs(2 * cut - upto), cut)
                    for cut in range(upto + 1)
                )
            )
        best = [longest for longest, _, _ in rows]
        cuts.append([cut for _, _, cut in rows])
    # From the last stage back: each cut says where the stage before it ends.
    counts = []
    upto = len(pieces.layers)
    for row in reversed(cuts):
        counts.append(upto - row[upto])
        upto = row[upto]
    return (upto, *reversed(counts))


def _moves(counts: Counts) -> Iterator[Counts]:
    for source, target in permutations(range(len(counts)), 2):
        if counts[source]:
            moved = [*counts]
            moved[source] -= 1
            moved[target] += 1
            yield tuple(moved)


def _tuple(value: float | tuple[float, ...]) -> tuple[float, ...]:
    assert isinstance(value, tuple)
    return value
