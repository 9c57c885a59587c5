"""Tables with sharded weights and gradients, and the choice of how long a stage stays gathered.

A rank has places for the full weights of some of its stages; `cache` says which stages have them.
Breadth-first tables use a stage for longest at a time, and gather it twice a step (Lamy-Poirier
2023, sec. 3). Depth-first tables gather it for every microbatch. A place that is kept free for the
next stage hides the gather under the passes of the stage before. The clock decides which choice is
best.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import product
from math import inf
from typing import NamedTuple

from megapipe.errors import ScheduleError
from megapipe.schedule.costs import UNIT, Costs
from megapipe.schedule.families.sharding.cache import Stay, stays
from megapipe.schedule.families.sharding.runs import (
    GATHERS,
    REDUCES,
    adds_gradients,
    gather_for,
    reads_weights,
)
from megapipe.schedule.families.sharding.whole import borrowers
from megapipe.schedule.kinds import Kind, Lane
from megapipe.schedule.memory.limits import within
from megapipe.schedule.passes import Schedule, Step, with_steps
from megapipe.schedule.simulate import SimulatedTimes, run_clock, simulate

_AS_FAST = 1.01  # times the best time still count as the best
_MANY = 4096
"""Most steps of a table for which all choices are simulated, in about a second.

The limit is no time, so that every rank finds the same table.
"""


class UnshardedStages(NamedTuple):
    """A choice of how many stages of a rank have full weights and full gradients at a time.

    Attributes:
        weights: number of stages with full weights; 0 never drops weights. With 1, an overlapped
            pair of two stages still holds both.
        gradients: number of stages with full gradients. A stage whose gradients are being reduced
            does not count.
        ahead: whether one of the `weights` stages is the next one to be used, so that its gather
            runs early.
    """

    weights: int
    gradients: int
    ahead: bool = False


def with_sharded_weights(
    schedule: Schedule,
    costs: Costs = UNIT,
    living: UnshardedStages | Sequence[UnshardedStages] = (),
) -> Schedule:
    """Return the table with gathers of weights and reductions of gradients for sharding.

    A gather stands before each run, a sequence of passes of one stage that use the gathered
    weights. In simulated time a gather ends when its run begins, if there is room for the weights
    that early. A reduction follows the last pass whose gradient it sums.

    Args:
        living: how many stages have full weights and gradients at a time: one value for all ranks,
            or one for each. () gathers and reduces every stage once a step.
    Raises: ScheduleError for a table that has gathers (A, AF, AB), reductions (G, RS) or V.
    """
    _refuse(schedule)
    clock = run_clock(schedule, costs)
    most = max(len(schedule.placement.stages_on(rank)) for rank in range(len(schedule.ranks)))
    if isinstance(living, UnshardedStages):
        each = [living] * len(schedule.ranks)
    else:
        each = [*living] or [UnshardedStages(most, most)] * len(schedule.ranks)
    rows = [_row(schedule, rank, clock, costs, one) for rank, one in enumerate(each)]
    return replace(schedule, ranks=tuple(rows))


def sharded_within(
    schedule: Schedule,
    costs: Costs,
    memory: float | Sequence[float] = inf,
    *,
    gathers: bool = True,
    moved: Callable[[float], Schedule] | None = None,
) -> Schedule:
    """Return the fastest table with shards whose ranks keep to their memory limits.

    Times within a hundredth count as equal. Among equals, the table that reduces gradients least
    often is taken. A table with one reduction for each stage trains bitwise like a table that never
    drops weights. Next comes the table that offloads and recomputes the fewest activations, then
    the one with the least memory. A choice is how many stages of a rank have full weights and
    gradients at a time. Candidates are tables with one choice for all ranks, and one table in which
    each rank has the best choice within its own limit.

    Args:
        memory: the limit of all ranks, or one for each, in the unit of the costs; inf for none.
        gathers: shard the weights too, not only the gradients.
        moved: takes a limit on activation and returns the table within it, by offload or
            recomputation, or raises ScheduleError. The function is called if the table that is best
            without limits does not fit. None for no offload and no recomputation.
    Raises: ScheduleError for a table that has gathers (A, AF, AB), reductions (G, RS) or V. Also if
    no table fits, with the memory that one of the ranks needs at least.
    """
    limits = [memory] * len(schedule.ranks) if isinstance(memory, float | int) else [*memory]
    ways = list(ways_to_live(schedule, gathers=gathers))
    played = [_Played(way, with_sharded_weights(schedule, costs, way), costs) for way in ways]
    best = min(one.time.makespan for one in played)
    played.sort(key=lambda one: one.worth(best))

    # Memory differs between ranks. The best choice for all ranks may be refused by one of them,
    # where a table with the best choice of each rank fits.
    each = []
    for rank, limit in enumerate(limits):
        for one in played:
            if one.time.peak[rank] <= limit * (1 + 1e-9):
                each.append(one.way)
                break
    if len(each) == len(limits):
        played.append(_Played(each[0], with_sharded_weights(schedule, costs, each), costs))
    fitting = [one for one in played if one.fits(limits)]

    # A limit may leave so little for weights that their gathers show. Offload or recomputation of
    # activations makes room, and may cost less time than these gathers.
    if moved is not None and played[0] not in fitting:
        for way, table in _moved_tables(schedule, costs, ways, min(limits), moved):
            one = _Played(way, table, costs)
            if one.fits(limits):
                fitting.append(one)
    if not fitting:
        over = []
        for one in played:
            over.append(max((held - limits[r], r) for r, held in enumerate(one.time.peak)))
        need, rank = min(over)
        raise ScheduleError(
            f"{schedule.name}: rank {rank} needs {need + limits[rank]:g} for activations, gathered "
            f"weights and gradients, however shortly they live; the limit is {limits[rank]:g}."
        )
    best = min(one.time.makespan for one in fitting)
    return min(fitting, key=lambda one: one.worth(best)).table


def _moved_tables(
    schedule: Schedule,
    costs: Costs,
    ways: Iterable[UnshardedStages],
    limit: float,
    moved: Callable[[float], Schedule],
) -> Iterator[tuple[UnshardedStages, Schedule]]:
    """Yield (choice, table with offload or recomputation) for each of several choices.

    A choice that leaves too little memory for activations is left out.

    Args:
        ways: choices of how many stages have full weights and gradients at a time.
        limit: memory of a rank for activations, weights and gradients.
        moved: takes a limit on activation and returns the table within it, or raises ScheduleError.
    """
    # Choices with equal room share a table, because `moved` is a solver.
    tables: dict[float, Schedule | None] = {}
    for way in ways:
        room = limit - max(whole_at_most(schedule, costs, way))
        if room not in tables:
            tables[room] = None
            if room > 0:
                with suppress(ScheduleError):
                    tables[room] = moved(room)
        table = tables[room]
        if table is not None:
            yield way, with_sharded_weights(table, costs, way)


def whole_at_most(schedule: Schedule, costs: Costs, way: UnshardedStages) -> list[float]:
    """Return the most memory of full weights and gradients that each rank can hold at once.

    If `way` allows two stages at a time, these are the two largest stages and one more gradient,
    which is being reduced. The rank's shards are not counted.

    Args:
        way: number of stages with full weights and gradients at a time.
    """
    place = schedule.placement
    weights = costs.by_stage("mem_a", place)
    gradients = costs.by_stage("mem_g", place)
    found = []
    for rank, row in enumerate(schedule.ranks):
        own = place.stages_on(rank)
        borrow = borrowers(costs, place, own)
        first: set[int] = set()
        if borrow:
            first = {stage for stage in own if place.is_first(stage)}
        # A pair of two stages needs the weights of both at once, even with a place for one.
        count = way.weights
        if count:
            for step in row:
                count = max(count, len({x.stage for x in step if reads_weights(x.kind)}))
        of_weights = _largest(own, weights, count, first, borrow)
        largest = sorted((gradients[s] for s in own), reverse=True)[: way.gradients + 1]
        found.append(of_weights + sum(largest))
    return found


def _largest(
    own: Sequence[int], sizes: Sequence[float], count: int, first: set[int], borrow: set[int]
) -> float:
    """Return the largest total memory of the weights of any `count` stages of a rank.

    Args:
        own: the stages of the rank.
        sizes: memory of each stage's weights.
        first: {the model's first stage} if the rank has it and `borrow` is not empty; else {}.
        borrow: stages that also use the first stage's weights. With such a stage the first stage's
            weights are in memory too.
    """

    def most(stages: Iterable[int], count: int) -> float:
        return sum(sorted((sizes[s] for s in stages), reverse=True)[:count])

    if not (count and borrow):
        return most(own, count)
    # Either no stage that borrows is among them, or the first stage's weights are there as well.
    return max(most({*own} - borrow, count), most(first, 1) + most({*own} - first, count))


class _Played:
    """A simulated table with the choice from which it was made.

    `fits` compares its memory with limits. `worth` returns the value by which tables are compared.

    Args:
        way: number of stages with full weights and gradients at a time.
        table: the table with gathers and reductions.
        costs: the costs under which it is simulated.
    """

    def __init__(self, way: UnshardedStages, table: Schedule, costs: Costs) -> None:
        self.way = way
        self.table = table
        self.time = simulate(table, costs)

    def fits(self, limits: Sequence[float]) -> bool:
        """Return whether every rank holds at most its memory limit."""
        return within(self.time.peak, limits)

    def worth(self, best: float) -> tuple[float, int, int, float, float]:
        """Return the value by which tables are compared; the smallest is the best.

        It is (makespan, number of reductions, number of activations that are offloaded or
        recomputed, memory, makespan). The first entry is `best` for a table that is at most a
        hundredth slower. Then the other entries decide, and the makespan itself comes last.

        Args:
            best: the makespan of the fastest table.
        """
        sums = sum(x.kind in REDUCES for x in self.table.passes())
        # All times within a hundredth are worth the same, so that the other criteria decide.
        slow = best
        if self.time.makespan > best * _AS_FAST:
            slow = self.time.makespan
        # A room for many gathered weights costs moves that the table may not need.
        moves = sum(x.kind in (Kind.O, Kind.R) for x in self.table.passes())
        return slow, sums, moves, max(self.time.peak), self.time.makespan


def ways_to_live(schedule: Schedule, *, gathers: bool) -> Iterator[UnshardedStages]:
    """Yield the choices to try of how many stages are gathered at a time.

    The choices are one, two, half of a rank's stages, and all. A large table has fewer choices,
    because simulating it takes long.

    Args:
        gathers: shard the weights too, not only the gradients.
    """
    most = max(len(schedule.placement.stages_on(rank)) for rank in range(len(schedule.ranks)))
    counts = sorted({min(n, most) for n in (1, 2, (most + 1) // 2, most)})
    sums = counts
    if sum(map(len, schedule.ranks)) > _MANY:
        counts = sorted({1, min(2, most), most})
        sums = sorted({1, most})
    if not gathers:
        counts = [0]
    for weights, gradients, ahead in product(counts, sums, (False, True)):
        # One place cannot be kept for the next stage, and with a place for each none has to be.
        if not ahead or 1 < weights < most:
            yield UnshardedStages(weights, gradients, ahead)


def _refuse(schedule: Schedule) -> None:
    """Refuse a table that gathers, reduces or validates already.

    Raises: ScheduleError that names these kinds of pass.
    """
    there = sorted(schedule.kinds & (GATHERS | REDUCES | {Kind.A, Kind.G, Kind.V}))
    if there:
        raise ScheduleError(
            f"{schedule.name} has {' and '.join(there)} already. Shard the table without."
        )


def _row(
    schedule: Schedule, rank: int, clock: SimulatedTimes, costs: Costs, living: UnshardedStages
) -> tuple[Step, ...]:
    """Return a rank's row with gathers and reductions inserted.

    Args:
        rank: the number of the rank.
        clock: start and end of each step of the table without them.
        living: number of stages with full weights and gradients at a time.
    """
    row = schedule.ranks[rank]
    duration = costs.durations(schedule.placement)
    start = clock.start[rank]
    end = clock.end[rank]
    reads = []
    adds = []
    for step in row:
        reads.append({x.stage for x in step if reads_weights(x.kind)})
        adds.append({x.stage for x in step if adds_gradients(x.kind)})

    # Each reduction follows the last gradient of its interval. `after` has the steps to insert
    # after each step, -1 for the start of the row.
    after: dict[int, list[Step]] = {}
    sums = []
    for stay in sorted(stays(adds, living.gradients), key=lambda stay: stay.last):
        *_, last = (x for x in row[stay.last] if x.stage == stay.stage and adds_gradients(x.kind))
        after.setdefault(stay.last, []).append((last._replace(kind=Kind.RS),))
        sums.append((end[stay.last], duration[Kind.RS][stay.stage]))

    # Gathers start when the compute pass before them has ended, so their places follow from the
    # ends of compute passes.
    computes = [i for i, step in enumerate(row) if step[0].kind.traits.lane is Lane.COMPUTE]
    ends = [(end[i] * (1 - 1e-9), i) for i in computes]
    gathered: list[Stay] = []
    if living.weights:
        gathered = stays(reads, living.weights, ahead=living.ahead)
    back = inf
    # From the last gather to the first: each ends when its run or the next gather begins.
    in_order = sorted(gathered, key=lambda stay: stay.first)
    for stay in reversed(in_order):
        back = _begin(min(back, start[stay.first]), duration[Kind.AF][stay.stage], sums)
        at = bisect_right(ends, (back, len(row))) - 1
        early = ends[at][1] if at >= 0 else -1
        at = min(max(early, stay.room), stay.first - 1)
        users = (x for x in row[stay.first] if x.stage == stay.stage and reads_weights(x.kind))
        gather = gather_for(next(users))
        # Before reductions that end the same step, and before gathers for later uses.
        after.setdefault(at, []).insert(0, (gather,))
    return with_steps(row, after)


def _begin(due: float, takes: float, sums: Sequence[tuple[float, float]]) -> float:
    """Return the latest start of a gather that ends in time and overlaps no reduction.

    Args:
        due: when the gathered weights are needed.
        takes: duration of the gather.
        sums: (earliest start, duration) of the reductions on the same stream.
    """
    # A gather that would overlap a reduction ends before that begins.
    for ready, length in reversed(sums):
        if ready < due and due - takes < ready + length:
            due = min(due, ready)
    return due - takes
