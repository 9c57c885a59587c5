"""Starts of the search: the papers' patterns, building blocks of our own, and a smaller solution unrolled.

A building block (Qi et al. 2024, "Pipeline Parallelism with Controllable Memory", sec. 3) says when each pass of one
microbatch runs; microbatch i runs i periods later, every rank in the order of those times. Here times are real costs,
not slots; what does not fit the memory is reordered, and W fill the waits.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import zip_longest
from math import exp
from random import Random
from time import process_time

from megapipe.schedule.generators.fit import refilled
from megapipe.schedule.generators.orders import Orders, Problem, clock, encode, fits, length, one_by_one
from megapipe.schedule.passes import Schedule
from megapipe.schedule.patterns import fixed, one_of
from megapipe.schedule.search.anneal import PATIENCE, Found


def patterns(problem: Problem) -> list[tuple[Found, str]]:
    """The known schedules of this placement that fit the memory, as they are and with W refilled for these costs, best
    first, each with its name; "" is one microbatch at a time."""
    place = problem.placement
    known = fixed(place.num_ranks, problem.microbatches, place.num_stages // place.num_ranks, None, place)
    alone = _timed(problem, one_by_one(problem))
    found = [(alone, "")] if alone else []
    found += [(x, schedule.name) for schedule in known for x in _fitted(problem, schedule)]
    return sorted(found, key=lambda x: x[0].length)


def pattern(problem: Problem, name: str) -> list[Found]:
    """The known schedule of this name as in `patterns`, if there is one of these numbers; the best of it first."""
    place = problem.placement
    made = one_of(name, place.num_ranks, problem.microbatches, place.num_stages // place.num_ranks)
    return sorted((x for schedule in made for x in _fitted(problem, schedule)), key=lambda x: x.length)


def _fitted(problem: Problem, schedule: Schedule) -> list[Found]:
    orders = encode(problem, schedule)
    found = _timed(problem, orders) if fits(problem, orders) else None
    return [*([found] if found else []), *_refilled(problem, orders)]


@dataclass(frozen=True)
class Rhythm:
    """A rhythm: the times at which the passes of one microbatch run.

    Attributes:
        waits: after each pass of a leg of the way down and up again, a leg being one chunk on all ranks.
        turns: after each leg.
        period: from one microbatch to the next, in parts of a rank's work for one.
        groups: microbatches that pass one chunk before the next begins, forward and backward; 1: each goes through.
        patience: of fill_weights.
    """

    waits: tuple[float, ...]
    turns: tuple[float, ...]
    period: float
    groups: tuple[int, int]
    patience: float


def blocks(problem: Problem, tries: int, until: float, random: Random, keep: int = 8) -> list[Found]:
    """The best of a random and then narrowing search over building blocks, best first."""
    pool: list[tuple[float, Rhythm, Found]] = []
    for step in range(tries):
        if process_time() > until:
            break
        # Two fifths of the tries look around, the rest vary the best that were found; few go on looking.
        fresh = step < 0.4 * tries or not pool or random.random() < 0.05
        block = _random(problem, random) if fresh else _vary(random.choice(pool)[1], problem, random)
        found = _unrolled(problem, block)
        # Blocks of equal length are mostly one schedule: a pool of copies would leave nothing to vary.
        if found and (len(pool) < keep or found.length < pool[-1][0]) and all(found.length != x[0] for x in pool):
            pool = sorted([*pool, (found.length, block, found)], key=lambda x: x[0])[:keep]
    return [x[2] for x in pool]


def deals(problem: Problem, tries: int, until: float, random: Random, keep: int = 8) -> list[Found]:
    """Interleaved zero-bubble with random sizes of the groups, not the same forward and backward; best first.

    Backward groups that get smaller end the schedule with less waiting for the ring to come round.
    """
    p, m = problem.placement.num_ranks, problem.microbatches
    pool: list[Found] = []
    for _ in range(tries):
        if process_time() > until:
            break
        forward = _split(m, p, random) if random.random() < 0.5 else [p] * (m // p) + [m % p] * (m % p > 0)
        found = _dealt(problem, forward, _split(m, p, random), random.choice((0, 0, 1, -1, 2)))
        if found and all(found.length != x.length for x in pool):
            pool = sorted([*pool, found], key=lambda x: x.length)[:keep]
    return pool


def unroll(problem: Problem, small: Problem, found: Found) -> list[Found]:
    """A schedule of fewer microbatches, its middle repeated. Several places to cut and repeats are tried.

    The repeat is a multiple of what goes round in the loop, so that groups of microbatches stay whole.
    """
    m, n, p = problem.microbatches, small.microbatches, problem.placement.num_ranks
    results = []
    # Which middle repeats well hangs on how the small one was found: all are tried, of large tables at one patience.
    tried = _MIDDLE if is_large(problem) else PATIENCE
    for repeat in sorted({1, 2, p}):
        for head in sorted({(n - repeat) // 3, (n - repeat) // 2}):
            if head < 0 or head + repeat >= n:
                continue
            start = [e - d for e, d in zip(found.end, small.duration, strict=True)]
            times = [0.0] * problem.num_passes
            classes = range(3 * problem.placement.num_stages)
            ahead = [start[c * n + head + repeat] - start[c * n + head] for c in classes]
            # By the mean over all passes: one that is late in a round is no reason to stretch all rounds.
            period = sum(ahead) / len(ahead)
            for c in classes:
                for i in range(m):
                    rounds = 0 if i < head else min((i - head) // repeat, -(-(m - n) // repeat))
                    times[c * m + i] = start[c * n + i - rounds * repeat] + rounds * period
            results += _refilled(problem, _sorted(problem, times), tried)
    results.sort(key=lambda x: x.length)
    if is_large(problem) and results:
        results += _refilled(problem, results[0].orders, [x for x in PATIENCE if x not in tried])
    return sorted(results, key=lambda x: x.length)


_MIDDLE = (0.3,)


def few(problem: Problem) -> int:
    """Microbatches of a smaller problem that has the same ramps and a middle to repeat."""
    return 3 * problem.placement.num_ranks


def is_large(problem: Problem) -> bool:
    """Does a table take so long to make that patterns of few microbatches are looked at in its place?"""
    ranks, m = problem.placement.num_ranks, problem.microbatches
    return problem.placement.num_stages * m > _LARGE and m >= few(problem) + ranks


_LARGE = 4096
"""Forwards of a table."""


def _timed(problem: Problem, orders: Orders) -> Found | None:
    end = clock(problem, orders)
    return None if end is None else Found(orders, end, length(problem, orders, end))


def _refilled(problem: Problem, orders: Orders, patiences: Sequence[float] = PATIENCE) -> list[Found]:
    return [Found(*x, length(problem, *x)) for x in refilled(problem, orders, patiences)]


def _sorted(problem: Problem, times: list[float]) -> Orders:
    orders: Orders = [[] for _ in range(problem.placement.num_ranks)]
    for x in sorted(range(problem.num_passes), key=times.__getitem__):
        orders[problem.rank[x]].append(x)
    return orders


def _unrolled(problem: Problem, block: Rhythm) -> Found | None:
    """A block repeated for every microbatch."""
    place, m = problem.placement, problem.microbatches
    p, stages = place.num_ranks, place.num_stages
    work = max(sum(problem.duration[c * m] for c in range(3 * stages) if place.rank_of[c // 3] == r) for r in range(p))
    starts = [_begins(m, group, block.period * work, p / stages) for group in block.groups]
    bare: list[list[tuple[float, int]]] = [[] for _ in range(p)]
    now = 0.0
    # The way of a microbatch: F down the stages, B up.
    classes = [*range(0, 3 * stages, 3), *range(3 * stages - 2, 0, -3)]
    for at, c in enumerate(classes):
        now += problem.lag[c * m]
        bare[place.rank_of[c // 3]] += [(now + starts[c % 3][i], c * m + i) for i in range(m)]
        leg, rest = divmod(at, p)
        now += problem.duration[c * m] + (block.turns if rest == p - 1 else block.waits)[leg]
    orders = [[x for _, x in sorted(timed)] for timed in bare]
    return next(iter(_refilled(problem, orders, (block.patience,))), None)


def _split(m: int, p: int, random: Random) -> list[int]:
    sizes: list[int] = []
    while m > sum(sizes):
        sizes.append(min(m - sum(sizes), random.choice((p, p, p, -(-p // 2), -(-p // 2), random.randint(1, p)))))
    return sizes


def _dealt(problem: Problem, forward: list[int], backward: list[int], deeper: int) -> Found | None:
    """Forwards and backwards by groups in turns, after a warm-up `deeper` than 1F1B's."""
    place, m = problem.placement, problem.microbatches
    p, chunks = place.num_ranks, place.num_stages // place.num_ranks
    bare: Orders = []
    for rank in range(p):
        following = [c * m for c in range(3 * place.num_stages)]
        down = [3 * (v * p + rank) for size in forward for v in range(chunks) for _ in range(size)]
        up = [3 * (v * p + rank) + 1 for size in backward for v in reversed(range(chunks)) for _ in range(size)]
        warm = max(1, p - 1 - rank + (chunks - 1) * forward[0] + deeper)
        order = []
        for c in [*down[:warm], *(c for pair in zip_longest(down[warm:], up) for c in pair if c is not None)]:
            order.append(following[c])
            following[c] += 1
        bare.append(order)
    return min(_refilled(problem, bare), key=lambda x: x.length, default=None)


def _begins(m: int, group: int, period: float, part: float) -> list[float]:
    """Times at which microbatches enter: in groups, a group's at the pace of one chunk, `part` of the model's."""
    return [(i // group * group + i % group * (part if group > 1 else 1.0)) * period for i in range(m)]


def _random(problem: Problem, random: Random) -> Rhythm:
    place = problem.placement
    p, legs = place.num_ranks, 2 * place.num_stages // place.num_ranks
    looped = legs > 2 and place.rank_of[:p] == place.rank_of[p : 2 * p]
    group = random.choice((p, p, random.randint((p + 1) // 2, p), 1)) if looped else 1
    back = random.choice((group, random.randint(1, group)))
    scale = problem.unit * (0.3 if group > 1 else 3.0)

    def some() -> tuple[float, ...]:
        return tuple(random.choice((0.0, 0.0, random.uniform(0.0, scale))) for _ in range(legs))

    return Rhythm(
        some(), some(), random.choice((1.0, random.uniform(0.9, 1.6))), (group, back), random.choice(PATIENCE)
    )


def _vary(block: Rhythm, problem: Problem, random: Random) -> Rhythm:
    """A block with one to three of its numbers changed."""
    legs = len(block.waits)
    for _ in range(random.choice((1, 1, 2, 3))):
        j = random.randrange(2 * legs + 2)
        by = random.gauss(0.0, 1.0) * problem.unit * random.choice((0.1, 0.3, 1.0))
        if j < legs:
            block = replace(block, waits=_changed(block.waits, j, by, -problem.unit))
        elif j < 2 * legs:
            block = replace(block, turns=_changed(block.turns, j - legs, by, -problem.unit))
        elif j == 2 * legs:
            block = replace(block, period=block.period * exp(random.gauss(0.0, 0.08)))
        else:
            block = replace(block, patience=random.uniform(0.0, 1.0))
    return block


def _changed(values: tuple[float, ...], j: int, by: float, least: float) -> tuple[float, ...]:
    return (*values[:j], max(least, values[j] + by), *values[j + 1 :])
