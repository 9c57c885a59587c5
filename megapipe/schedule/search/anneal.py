"""Simulated annealing of a schedule's orders, with two moves.

*Push* looks at one chain of passes that makes the schedule as long as it is, and moves a pass of it, or one that stands
in its way, by a few places. *Shift* moves a pattern in time: one kind of pass, of a range of ranks and microbatches,
starts sooner or later, and every rank runs its passes in the order of their new times. A push cannot leave a valley
that several ranks must cross together; a shift can. `moves.c` makes the same moves from the same draws, some fifty
times as fast.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import dataclass
from math import inf, log
from statistics import NormalDist
from time import process_time

from megapipe.schedule.generators.fit import fill_weights
from megapipe.schedule.generators.orders import (
    Orders,
    Problem,
    backward_sooner,
    clock,
    fits_rank,
    length,
    weights_sooner,
)

KIND_SETS = ((0,), (1,), (1, 2), (2,), (0, 1))
PATIENCE = (0.0, 0.3, 0.6, 1.0)
QUANTILES = [(i + 0.5) / 1024 for i in range(1024)]
# Rounded: the same on every machine, whatever its logarithm does with the last bit.
NORMAL = tuple(round(NormalDist().inv_cdf(x), 6) for x in QUANTILES)
DECAY = tuple(round(-log(x), 6) for x in QUANTILES)


@dataclass(frozen=True)
class Found:
    """Orders of all ranks, the end of every pass, and the objective."""

    orders: Orders
    end: list[float]
    length: float


@dataclass(frozen=True)
class Cooling:
    """The course of an annealing.

    Attributes:
        steps: moves to try.
        hot, cold: first and last temperature, in units of the longest pass.
        spread: weight of the mean over ranks beside the objective, which is a maximum over ranks.
        until: when to stop at the latest, by this process's CPU time.
    """

    steps: int
    hot: float
    cold: float
    spread: float
    until: float = inf

    @property
    def factor(self) -> float:
        """The heat of a move, in parts of that of the move before it."""
        return round(float((self.cold / self.hot) ** (1 / self.steps)), 12)


class Draws:
    """Numbers drawn alike in Python and in C: Knuth's linear congruence, of which the upper 31 bits count."""

    def __init__(self, seed: int) -> None:
        self.state = seed

    def below(self, n: int) -> int:
        """A number from 0 to n - 1."""
        self.state = (self.state * 6364136223846793005 + 1442695040888963407) & (2**64 - 1)
        return (self.state >> 33) * n >> 31


def anneal(problem: Problem, start: Found, cooling: Cooling, seed: int, goal: float) -> Found:
    """The best orders met on the way; stops at the goal. Same inputs, same result."""
    best, draws = start, Draws(seed)
    orders, end = start.orders, start.end
    cost = length(problem, orders, end, cooling.spread)
    heat, factor = problem.unit * cooling.hot, cooling.factor
    path: list[tuple[int, int]] = []
    for _ in range(cooling.steps):
        if best.length <= goal or process_time() > cooling.until:
            break
        # From hot to cold by equal factors: early on worse orders are taken too, at the end hardly any.
        limit = cost + heat * DECAY[draws.below(1024)]
        heat *= factor
        if draws.below(10) < 6:
            moved = _shift(problem, orders, end, draws)
        else:
            # The critical path is walked anew only after a move that was taken: it is as costly as the move itself.
            path = path or list(_critical(problem, orders, end, draws))
            moved = _push(problem, orders, path, draws)
        if moved is None or (new_cost := length(problem, *moved, cooling.spread)) > limit:
            continue
        (orders, end), cost, path = moved, new_cost, []
        now = length(problem, orders, end)
        if now < best.length * (1 - 1e-12):
            best = Found(orders, end, now)
    return best


def _critical(problem: Problem, orders: Orders, end: list[float], draws: Draws) -> Iterator[tuple[int, int]]:
    """(rank, place) of the passes that start the moment the pass before them on the rank ends, back from the last."""
    duration, source = problem.duration, problem.source
    rank = draws.below(len(orders))
    if draws.below(10):
        # Mostly the rank that ends last: moves elsewhere change nothing unless it waits for them.
        rank = max(range(len(orders)), key=lambda r: length(problem, [orders[r]], end))
    i = len(orders[rank]) - 1
    while i >= 0:
        order = orders[rank]
        x = order[i]
        if i and end[order[i - 1]] >= (end[x] - duration[x]) * (1 - 1e-12):
            yield rank, i
            i -= 1
            continue
        x = source[x]
        if x == problem.nothing:
            return
        rank = problem.rank[x]
        # Ends rise along a row, so the pass that sent the input is found by when it ended.
        i = bisect_left(orders[rank], end[x], key=end.__getitem__)
        while orders[rank][i] != x:
            i += 1


def _push(
    problem: Problem, orders: Orders, path: list[tuple[int, int]], draws: Draws
) -> tuple[Orders, list[float]] | None:
    """A pass of the path goes some places forward, or the one before it some places back."""
    if not path:
        return None
    rank, i = path[draws.below(len(path))]
    order, m = orders[rank], problem.microbatches
    places = 1
    while places < 12 and draws.below(2):
        places += 1
    how = draws.below(100)
    if how < 50:
        first, last = max(0, i - places), i
        part = [order[last], *order[first:last]]
    else:
        # Now and then far: a W that waits can go anywhere.
        first = i - 1
        last = min(len(order) - 1, first + (1 + draws.below(3 * m) if how >= 85 else places))
        part = [*order[first + 1 : last + 1], order[first]]
    part = _in_order(part, m)
    if part == order[first : last + 1]:
        return None
    inside, before = set(part), set[int]()
    for x in part:
        # A B before its F, or a W before its B.
        if x // m % 3 and x - m in inside and x - m not in before:
            return None
        before.add(x)
    moved = [*order[:first], *part, *order[last + 1 :]]
    if not fits_rank(problem, moved, rank):
        return None
    result = [*orders[:rank], moved, *orders[rank + 1 :]]
    end = clock(problem, result)
    return None if end is None else (result, end)


def _shift(problem: Problem, orders: Orders, end: list[float], draws: Draws) -> tuple[Orders, list[float]] | None:
    """Some kinds of passes, of a range of ranks and microbatches, get other times; W move along or are refilled."""
    p, m, place = len(orders), problem.microbatches, problem.placement
    ranks = _range(p, (0, p - 1), draws)
    batches = _range(m, (0, m - 1, m - 1), draws)
    chunk = draws.below(place.num_stages // p)
    chunk = chunk if draws.below(10) < 7 else -1
    kinds = KIND_SETS[draws.below(5)]
    by = 2.0 * NORMAL[draws.below(1024)] * problem.unit
    chosen = [c % 3 in kinds and chunk in (-1, c // 3 // p) for c in range(3 * place.num_stages)]
    refill = draws.below(10) < 4
    patience = PATIENCE[draws.below(4)] if refill else 0.0
    duration = problem.duration
    moved = list(orders)
    for rank in range(ranks[0], ranks[1] + 1):
        times = {}
        for x in orders[rank]:
            c, i = divmod(x, m)
            if refill and c % 3 == 2:
                continue
            times[x] = end[x] - duration[x] + (by if chosen[c] and batches[0] <= i <= batches[1] else 0.0)
        order = _in_order(sorted(times, key=times.__getitem__), m)
        fitting = backward_sooner(problem, order, rank) if refill else weights_sooner(problem, order, rank)
        if fitting is None:
            return None
        moved[rank] = fitting
    if refill:
        for rank in (*range(ranks[0]), *range(ranks[1] + 1, p)):
            moved[rank] = [x for x in orders[rank] if x // m % 3 != 2]
        return fill_weights(problem, moved, patience)
    after = clock(problem, moved)
    return None if after is None else (moved, after)


def _range(n: int, ends: tuple[int, ...], draws: Draws) -> list[int]:
    """A first and a last of n; one of them in most cases at an end, where a step begins or ends."""
    one, way = draws.below(n), draws.below(len(ends) + 1)
    return sorted((one, ends[way] if way < len(ends) else draws.below(n)))


def _in_order(part: list[int], m: int) -> list[int]:
    """An order with the same classes at the same places, the microbatches of each class in their order."""
    classes = [x // m for x in part]
    if len(set(classes)) == len(classes):
        return part
    following: dict[int, int] = {}
    for x, c in zip(part, classes, strict=True):
        if x < following.get(c, x + 1):
            following[c] = x
    result = []
    for c in classes:
        result.append(following[c])
        following[c] += 1
    return result
