"""Starts of the search: the papers' patterns, random building blocks, and a smaller table unrolled.

A building block (Qi et al. 2024, "Pipeline Parallelism with Controllable Memory", sec. 3) says when
each pass of one microbatch runs. Microbatch i runs i periods later, and every rank runs its passes
in the order of these times. Here times are in the unit of the costs and not slots. Passes that do
not fit the memory are reordered, and W fill the waits.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain, product, zip_longest
from math import exp
from random import Random
from time import process_time

from megapipe.schedule.core.fit import refilled
from megapipe.schedule.core.orders import Orders, Problem, clock, encode, fits, length, one_by_one
from megapipe.schedule.passes import Schedule
from megapipe.schedule.patterns import fixed, one_of
from megapipe.schedule.search.anneal import FoundSchedule

OVERRUNS: tuple[float, ...] = (0.0, 0.3, 0.6, 1.0)


def patterns(problem: Problem) -> list[tuple[FoundSchedule, str]]:
    """Return (schedule, its name) for built-in schedules that fit placement and memory.

    `problem` has the placement, costs and memory limits. Each comes in several versions: with its
    own order of W (weight gradient), and with W put where ranks would wait. The best is first. The
    schedule that runs one microbatch at a time has the name "".
    """
    place = problem.placement
    found = []
    # One microbatch at a time holds least of all orders, so there is a start under any limit.
    alone = _timed(problem, one_by_one(problem))
    if alone:
        found.append((alone, ""))
    chunks = place.num_stages // place.num_ranks
    for schedule in fixed(place.num_ranks, problem.microbatches, chunks, None, place):
        found += [(x, schedule.name) for x in _fitted(problem, schedule)]
    return sorted(found, key=lambda x: x[0].length)


def pattern(problem: Problem, name: str) -> list[FoundSchedule]:
    """Return a built-in schedule as it is and with W put where ranks wait, the best first.

    The list is empty if the schedule does not exist for these numbers, or exceeds the memory.

    Args:
        problem: placement, costs, memory limits and objective.
    """
    place = problem.placement
    chunks = place.num_stages // place.num_ranks
    found = []
    for schedule in one_of(name, place.num_ranks, problem.microbatches, chunks):
        found += _fitted(problem, schedule)
    return sorted(found, key=lambda x: x.length)


def _fitted(problem: Problem, schedule: Schedule) -> list[FoundSchedule]:
    """Return the versions of a schedule that fit the memory.

    One has the schedule's own order of W; in the others, W runs where ranks would wait.
    """
    orders = encode(problem, schedule)
    found = None
    if fits(problem, orders):
        found = _timed(problem, orders)
    refilled_too = _refilled(problem, orders)
    return [found, *refilled_too] if found else refilled_too


@dataclass(frozen=True)
class Rhythm:
    """A building block of a schedule: waiting times that say when the passes of a microbatch run.

    A *leg* is the forward or the backward of one chunk on all ranks, one after another.

    Attributes:
        waits: for each leg, how long its pass on one rank waits after its pass on the rank before.
        turns: for each leg, how long the next leg waits after the last pass of this one.
        period: time between two microbatches, as a multiple of the busiest rank's work for one.
        groups: (for forwards, for backwards) how many microbatches go through one chunk before the
            next chunk begins. 1 lets each microbatch go through all chunks directly.
        overrun: a W may extend beyond the wait in which it starts by this fraction of its own time.
    """

    waits: tuple[float, ...]
    turns: tuple[float, ...]
    period: float
    groups: tuple[int, int]
    overrun: float


def blocks(
    problem: Problem, tries: int, until: float, random: Random, keep: int = 8
) -> list[FoundSchedule]:
    """Return schedules made of the best building blocks found by a random search.

    The search narrows around the best blocks. The best schedule is first.

    Args:
        problem: placement, costs, memory limits and objective.
        tries: number of blocks to try.
        until: CPU time of this process at which to stop.
        keep: number of blocks to return and to vary.
    """
    pool: list[tuple[float, Rhythm, FoundSchedule]] = []
    for step in _tries(problem, tries, until):
        # The first two fifths of the tries are random. Later ones vary the best blocks, and one in
        # twenty is random.
        if step < 0.4 * tries or not pool or random.random() < 0.05:
            block = _random(problem, random)
        else:
            block = _vary(random.choice(pool)[1], problem, random)
        found = _unrolled(problem, block)
        if not found or (len(pool) == keep and found.length >= pool[-1][0]):
            continue
        # Blocks of equal length are mostly the same schedule. Copies would leave nothing to vary.
        if all(found.length != x[0] for x in pool):
            pool = sorted([*pool, (found.length, block, found)], key=lambda x: x[0])[:keep]
    return [x[2] for x in pool]


def _tries(problem: Problem, tries: int, until: float) -> Iterator[int]:
    """Yield the numbers below `tries`, until the CPU time of this process is `until`.

    The time is asked about every 20 ms: the kernel's answer may take half as long as a small try.
    """
    between = max(1, 30_000 // problem.num_passes)
    for step in range(tries):
        if step % between == 0 and process_time() > until:
            return
        yield step


def in_groups(
    problem: Problem, tries: int, until: float, random: Random, keep: int = 8
) -> list[FoundSchedule]:
    """Return interleaved zero-bubble schedules with random group sizes, the best first.

    Groups of microbatches go through one chunk before the next chunk begins. Forwards and backwards
    have different groups. With smaller backward groups at the end, ranks wait less for gradients
    from the last rank to the first.

    Args:
        problem: placement, costs, memory limits and objective.
        tries: number of schedules to try.
        until: CPU time of this process at which to stop.
        keep: number of schedules to return.
    """
    p = problem.placement.num_ranks
    m = problem.microbatches
    pool: list[FoundSchedule] = []
    # Megatron-LM's groups: p microbatches each, and the rest in the last one.
    usual = [p] * (m // p)
    if m % p:
        usual.append(m % p)
    for _ in _tries(problem, tries, until):
        forward = usual
        if random.random() < 0.5:
            forward = _split(m, p, random)
        found = _dealt(problem, forward, _split(m, p, random), random.choice((0, 0, 1, -1, 2)))
        if found and all(found.length != x.length for x in pool):
            pool = sorted([*pool, found], key=lambda x: x.length)[:keep]
    return pool


def unroll(problem: Problem, small: Problem, found: FoundSchedule) -> list[FoundSchedule]:
    """Return schedules made from a schedule of fewer microbatches by repeating its middle.

    The middle has 1, 2 or p microbatches on p ranks; p keeps groups of microbatches whole. Several
    places where it begins are tried. With 2 microbatches before the middle and 1 repeated, four
    microbatches become six:

        0 1 2 3  ->  0 1 2 2' 2'' 3     2' is 2 one period later, 2'' two periods

    Args:
        problem: placement, costs, memory limits and objective, for all microbatches.
        small: the same with fewer microbatches.
        found: the schedule of `small`.
    """
    m = problem.microbatches
    n = small.microbatches
    p = problem.placement.num_ranks
    results = []
    start = [e - d for e, d in zip(found.end, small.duration, strict=True)]
    classes = range(3 * problem.placement.num_stages)
    # Which middle repeats well depends on the small schedule, so all are tried. A large table is
    # filled with W in one way first.
    tried = OVERRUNS
    if is_large(problem):
        tried = (0.3,)
    for repeat in sorted({1, 2, p}):
        most_rounds = -(-(m - n) // repeat)
        for head in sorted({(n - repeat) // 3, (n - repeat) // 2}):
            if head < 0 or head + repeat >= n:
                continue
            ahead = [start[c * n + head + repeat] - start[c * n + head] for c in classes]
            # The mean over all passes: a single late pass must not stretch all rounds.
            period = sum(ahead) / len(ahead)
            times = [0.0] * problem.num_passes
            for i in range(m):
                rounds = 0
                if i >= head:
                    rounds = min((i - head) // repeat, most_rounds)
                for c in classes:
                    times[c * m + i] = start[c * n + i - rounds * repeat] + rounds * period
            results += _refilled(problem, _sorted(problem, times), tried)
    results.sort(key=lambda x: x.length)
    # Only the best of a large table is filled in the other ways too.
    if is_large(problem) and results:
        results += _refilled(problem, results[0].orders, [x for x in OVERRUNS if x not in tried])
    return sorted(results, key=lambda x: x.length)


def few(problem: Problem) -> int:
    """Return a smaller number of microbatches with the same warm-up and cool-down."""
    ranks = problem.placement.num_ranks
    # 1F1B fills the pipeline with p microbatches and drains it with p; a third p is the middle.
    # A large table does without, as its small contest must be short.
    if problem.placement.num_stages * problem.microbatches > _LARGE:
        return 2 * ranks
    return 3 * ranks


def is_large(problem: Problem) -> bool:
    """Return whether a table is so large that schedules are tried with few microbatches first."""
    ranks = problem.placement.num_ranks
    m = problem.microbatches
    return problem.placement.num_stages * m > _LARGE and m >= few(problem) + ranks


_LARGE = 4096  # the most forwards of a table that is not large


def _timed(problem: Problem, orders: Orders) -> FoundSchedule | None:
    end = clock(problem, orders)
    if end is None:
        return None
    return FoundSchedule(orders, end, length(problem, orders, end))


def _refilled(
    problem: Problem, orders: Orders, overruns: Sequence[float] = OVERRUNS
) -> list[FoundSchedule]:
    return [FoundSchedule(*x, length(problem, *x)) for x in refilled(problem, orders, overruns)]


def _sorted(problem: Problem, times: list[float]) -> Orders:
    orders: Orders = [[] for _ in range(problem.placement.num_ranks)]
    for x in sorted(range(problem.num_passes), key=times.__getitem__):
        orders[problem.rank[x]].append(x)
    return orders


def _unrolled(problem: Problem, block: Rhythm) -> FoundSchedule | None:
    """Return the schedule that repeats a building block; None if it exceeds the memory."""
    place = problem.placement
    m = problem.microbatches
    p = place.num_ranks
    stages = place.num_stages
    work = [0.0] * p
    for c in range(3 * stages):
        work[place.rank_of[c // 3]] += problem.duration[c * m]
    period = block.period * max(work)
    starts = [_begins(m, group, period, p / stages) for group in block.groups]
    bare: list[list[tuple[float, int]]] = [[] for _ in range(p)]
    now = 0.0
    # The classes in the order of a microbatch: F down the stages, B up.
    classes = [*range(0, 3 * stages, 3), *range(3 * stages - 2, 0, -3)]
    for at, c in enumerate(classes):
        now += problem.lag[c * m]
        bare[place.rank_of[c // 3]] += [(now + starts[c % 3][i], c * m + i) for i in range(m)]
        leg, rest = divmod(at, p)
        waits = block.turns if rest == p - 1 else block.waits
        now += problem.duration[c * m] + waits[leg]
    orders = []
    for timed in bare:
        timed.sort()
        orders.append([x for _, x in timed])
    return next(iter(_refilled(problem, orders, (block.overrun,))), None)


def _split(m: int, p: int, random: Random) -> list[int]:
    """Return random sizes of groups whose sum is `m` microbatches: mostly p or half of p.

    Args:
        p: number of ranks.
    """
    half = -(-p // 2)
    sizes: list[int] = []
    while m > sum(sizes):
        size = random.choice((p, p, p, half, half, random.randint(1, p)))
        sizes.append(min(m - sum(sizes), size))
    return sizes


def _dealt(
    problem: Problem, forward: list[int], backward: list[int], deeper: int
) -> FoundSchedule | None:
    """Return the best interleaved schedule with these groups; None if it exceeds the memory.

    Args:
        problem: placement, costs, memory limits and objective.
        forward, backward: sizes of the groups of microbatches, in order.
        deeper: number of warm-up forwards that each rank has more than in `interleaved_zb`.
    """
    place = problem.placement
    m = problem.microbatches
    p = place.num_ranks
    chunks = place.num_stages // place.num_ranks
    bare: Orders = []
    for rank in range(p):
        # The classes of the rank's forwards and of its backwards, group by group. With two chunks
        # and groups of two: F of chunk 0 twice, F of chunk 1 twice, and so on.
        down: list[int] = []
        for size, v in product(forward, range(chunks)):
            down += [3 * (v * p + rank)] * size
        up: list[int] = []
        for size, v in product(backward, reversed(range(chunks))):
            up += [3 * (v * p + rank) + 1] * size
        # Forwards alone until the first backward arrives, then both in turns, as 1F1B.
        warm = max(1, p - 1 - rank + (chunks - 1) * forward[0] + deeper)
        turns = chain.from_iterable(zip_longest(down[warm:], up))
        classes = [*down[:warm], *(c for c in turns if c is not None)]
        # Each class takes its microbatches in ascending order.
        following = [c * m for c in range(3 * place.num_stages)]
        order = []
        for c in classes:
            order.append(following[c])
            following[c] += 1
        bare.append(order)
    return min(_refilled(problem, bare), key=lambda x: x.length, default=None)


def _begins(m: int, group: int, period: float, part: float) -> list[float]:
    """Return the time at which each of `m` microbatches starts.

    Microbatches of one group start faster than others: at the pace of one chunk.

    Args:
        group: number of microbatches in a group.
        period: mean time between two microbatches.
        part: the fraction of the model in one chunk.
    """
    pace = 1.0
    if group > 1:
        pace = part
    return [(i // group * group + i % group * pace) * period for i in range(m)]


def _random(problem: Problem, random: Random) -> Rhythm:
    place = problem.placement
    p = place.num_ranks
    legs = 2 * place.num_stages // place.num_ranks
    looped = legs > 2 and place.rank_of[:p] == place.rank_of[p : 2 * p]
    # Groups are of use on a loop of several chunks only: on a V each microbatch turns at once.
    group = 1
    if looped:
        group = random.choice((p, p, random.randint((p + 1) // 2, p), 1))
    back = random.choice((group, random.randint(1, group)))
    # In groups the ranks are busy with other microbatches, so long waits gain nothing.
    scale = 3.0 * problem.unit
    if group > 1:
        scale = problem.unit * 0.3

    def some() -> tuple[float, ...]:
        return tuple(random.choice((0.0, 0.0, random.uniform(0.0, scale))) for _ in range(legs))

    return Rhythm(
        some(),
        some(),
        random.choice((1.0, random.uniform(0.9, 1.6))),
        (group, back),
        random.choice(OVERRUNS),
    )


def _vary(block: Rhythm, problem: Problem, random: Random) -> Rhythm:
    """Return a building block with one to three of its values changed at random."""
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
            block = replace(block, overrun=random.uniform(0.0, 1.0))
    return block


def _changed(values: tuple[float, ...], j: int, by: float, least: float) -> tuple[float, ...]:
    return (*values[:j], max(least, values[j] + by), *values[j + 1 :])
