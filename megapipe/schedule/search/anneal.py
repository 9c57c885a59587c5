"""Simulated annealing of a schedule's orders, with two moves.

*Push* takes a critical path of the schedule, and moves a pass of it, or a pass that delays it, by a
few places. *Shift* moves a pattern in time: some kinds of pass, of a range of ranks and
microbatches, start sooner or later. Every rank then runs its passes in the order of their new
times. A push cannot leave a local minimum that several ranks must leave together, but a shift can.
`moves.c` makes the same moves from the same random draws, some fifty times as fast.
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
OVERRUNS = (0.0, 0.3, 0.6, 1.0)
QUANTILES = [(i + 0.5) / 1024 for i in range(1024)]
# Rounded, so that all machines have equal values even if the last bits of their logarithms differ.
NORMAL = tuple(round(NormalDist().inv_cdf(x), 6) for x in QUANTILES)
DECAY = tuple(round(-log(x), 6) for x in QUANTILES)


@dataclass(frozen=True)
class Found:
    """A schedule that a search found: orders of all ranks, end of every pass, and the objective."""

    orders: Orders
    end: list[float]
    length: float


@dataclass(frozen=True)
class Cooling:
    """The course of an annealing; `factor` returns the ratio of two temperatures in a row.

    Attributes:
        steps: moves to try.
        hot, cold: first and last temperature, in units of the longest pass.
        spread: weight of the mean over ranks, added to the objective, a maximum over ranks.
        until: CPU time of this process at which to stop.
    """

    steps: int
    hot: float
    cold: float
    spread: float
    until: float = inf

    @property
    def factor(self) -> float:
        """Return the ratio of the temperatures of a move and the move before it."""
        return round(float((self.cold / self.hot) ** (1 / self.steps)), 12)


class Draws:
    """Random numbers that are equal in Python and in C.

    They are the upper 31 bits of Knuth's linear congruential generator.
    """

    def __init__(self, seed: int) -> None:
        self.state = seed

    def below(self, n: int) -> int:
        """Return a random number from 0 to n - 1."""
        self.state = (self.state * 6364136223846793005 + 1442695040888963407) & (2**64 - 1)
        return (self.state >> 33) * n >> 31


def anneal(problem: Problem, start: Found, cooling: Cooling, seed: int, goal: float) -> Found:
    """Return the best orders that annealing meets. Equal inputs give equal results.

    Args:
        goal: stop at this objective.
    """
    best = start
    draws = Draws(seed)
    orders = start.orders
    end = start.end
    cost = length(problem, orders, end, cooling.spread)
    heat = problem.unit * cooling.hot
    factor = cooling.factor
    path: list[tuple[int, int]] = []
    for _ in range(cooling.steps):
        if best.length <= goal or process_time() > cooling.until:
            break
        # The temperature falls by equal factors. Early moves may make the schedule longer, late
        # moves hardly.
        limit = cost + heat * DECAY[draws.below(1024)]
        heat *= factor
        if draws.below(10) < 6:
            moved = _shift(problem, orders, end, draws)
        else:
            # Find the critical path again only after an accepted move: it costs as much as a move.
            path = path or list(_critical(problem, orders, end, draws))
            moved = _push(problem, orders, path, draws)
        if moved is None or (new_cost := length(problem, *moved, cooling.spread)) > limit:
            continue
        (orders, end), cost, path = moved, new_cost, []
        now = length(problem, orders, end)
        if now < best.length * (1 - 1e-12):
            best = Found(orders, end, now)
    return best


def _critical(
    problem: Problem, orders: Orders, end: list[float], draws: Draws
) -> Iterator[tuple[int, int]]:
    """Yield (rank, place) along a critical path, from its last pass back.

    The passes on it start when the previous pass of their rank ends.
    """
    duration = problem.duration
    source = problem.source
    rank = draws.below(len(orders))
    if draws.below(10):
        # Mostly start at the rank that ends last. Moves on other ranks help only if it waits for
        # them.
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
        # Ends rise along a row, so bisection by the end finds the pass that sent the input.
        i = bisect_left(orders[rank], end[x], key=end.__getitem__)
        while orders[rank][i] != x:
            i += 1


def _push(
    problem: Problem, orders: Orders, path: list[tuple[int, int]], draws: Draws
) -> tuple[Orders, list[float]] | None:
    """Return orders in which a pass of the path comes sooner, or the pass before it later."""
    if not path:
        return None
    rank, i = path[draws.below(len(path))]
    order = orders[rank]
    m = problem.microbatches
    places = 1
    while places < 12 and draws.below(2):
        places += 1
    how = draws.below(100)
    if how < 50:
        first = max(0, i - places)
        last = i
        part = [order[last], *order[first:last]]
    else:
        # Sometimes move it far: a pending W may run anywhere.
        first = i - 1
        last = min(len(order) - 1, first + (1 + draws.below(3 * m) if how >= 85 else places))
        part = [*order[first + 1 : last + 1], order[first]]
    part = _in_order(part, m)
    if part == order[first : last + 1]:
        return None
    inside = set(part)
    before = set[int]()
    for x in part:
        # Refuse a B before its F, or a W before its B.
        if x // m % 3 and x - m in inside and x - m not in before:
            return None
        before.add(x)
    moved = [*order[:first], *part, *order[last + 1 :]]
    if not fits_rank(problem, moved, rank):
        return None
    result = [*orders[:rank], moved, *orders[rank + 1 :]]
    end = clock(problem, result)
    return None if end is None else (result, end)


def _shift(
    problem: Problem, orders: Orders, end: list[float], draws: Draws
) -> tuple[Orders, list[float]] | None:
    """Return orders in which some passes start at other times; W move with them or are refilled.

    The passes are of some kinds, of a range of ranks and a range of microbatches.
    """
    p = len(orders)
    m = problem.microbatches
    place = problem.placement
    ranks = _range(p, (0, p - 1), draws)
    batches = _range(m, (0, m - 1, m - 1), draws)
    chunk = draws.below(place.num_stages // p)
    chunk = chunk if draws.below(10) < 7 else -1
    kinds = KIND_SETS[draws.below(5)]
    by = 2.0 * NORMAL[draws.below(1024)] * problem.unit
    chosen = [c % 3 in kinds and chunk in (-1, c // 3 // p) for c in range(3 * place.num_stages)]
    refill = draws.below(10) < 4
    overrun = OVERRUNS[draws.below(4)] if refill else 0.0
    duration = problem.duration
    moved = list(orders)
    for rank in range(ranks[0], ranks[1] + 1):
        times = {}
        for x in orders[rank]:
            c, i = divmod(x, m)
            if refill and c % 3 == 2:
                continue
            times[x] = (
                end[x] - duration[x] + (by if chosen[c] and batches[0] <= i <= batches[1] else 0.0)
            )
        order = _in_order(sorted(times, key=times.__getitem__), m)
        fitting = (
            backward_sooner(problem, order, rank)
            if refill
            else weights_sooner(problem, order, rank)
        )
        if fitting is None:
            return None
        moved[rank] = fitting
    if refill:
        for rank in (*range(ranks[0]), *range(ranks[1] + 1, p)):
            moved[rank] = [x for x in orders[rank] if x // m % 3 != 2]
        return fill_weights(problem, moved, overrun)
    after = clock(problem, moved)
    return None if after is None else (moved, after)


def _range(n: int, ends: tuple[int, ...], draws: Draws) -> list[int]:
    """Return a random range within n; in most cases one of its ends is in `ends`."""
    one = draws.below(n)
    way = draws.below(len(ends) + 1)
    return sorted((one, ends[way] if way < len(ends) else draws.below(n)))


def _in_order(part: list[int], m: int) -> list[int]:
    """Return the order with the microbatches of each class in order; classes keep their places."""
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
