"""Tables with sharded weights and gradients, and the choice of how long a stage stays gathered.

The full stages on a rank are like a cache, and the row says every future use. So the stage evicted
is the one needed last (Belady 1966), which makes the fewest gathers. Breadth-first tables use a
stage for longest at a time, and gather it twice a step (Lamy-Poirier 2023, sec. 3). Depth-first
tables gather it for every microbatch. A place that is kept free for the next stage hides the gather
under the passes of the stage before. The clock decides which choice is best.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import product
from math import inf
from typing import NamedTuple

from megapipe.errors import ScheduleError
from megapipe.schedule.costs import UNIT, Costs
from megapipe.schedule.families.sharding.runs import GATHERS, REDUCES, adds_gradients, reads_weights
from megapipe.schedule.families.sharding.whole import borrowers
from megapipe.schedule.kinds import Kind, Lane
from megapipe.schedule.passes import Pass, Schedule, Step
from megapipe.schedule.simulate import Clock, run_clock, simulate

_HAIR = 1 + 1e-9  # rounding
_AS_FAST = 1.01  # times the best time still count as the best
_MANY = 4096
"""Most steps of a table for which all choices are simulated, in about a second.

The limit is no time, so that every rank finds the same table.
"""


class Living(NamedTuple):
    """A choice of how many stages of a rank are gathered at a time.

    Attributes:
        weights: stages with full weights; 0 never drops weights. A pair of two stages may need
            more.
        gradients: stages with full gradients, without the one that is being summed.
        ahead: keep one of the `weights` places for the stage that comes next.
    """

    weights: int
    gradients: int
    ahead: bool = False


@dataclass(frozen=True)
class _Whole:
    """A run of a stage.

    Attributes:
        first, last: the steps of its first and last use.
        room: the step after which there is a place for it; -1 for the start of the row.
    """

    stage: int
    first: int
    last: int
    room: int


def with_sharded_weights(
    schedule: Schedule, costs: Costs = UNIT, living: Living | Sequence[Living] = ()
) -> Schedule:
    """Return the table with a gather before each run of a stage's passes, and reductions.

    By the clock a gather ends when its run begins, if there is a place for the stage that early. A
    reduction follows the last gradient of its interval.

    Args:
        living: of all ranks, or one for each. () gathers and reduces every stage once a step.
    Raises: ScheduleError for a table that has such passes.
    """
    _refuse(schedule)
    clock = run_clock(schedule, costs)
    most = max(len(schedule.placement.stages_on(rank)) for rank in range(len(schedule.ranks)))
    each = [living] * len(schedule.ranks) if isinstance(living, Living) else [*living]
    each = each or [Living(most, most)] * len(schedule.ranks)
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

    Times within a hundredth count as equal. Among equals it is the table that sums gradients least
    often: with one sum for a stage it is bitwise equal to a table that never drops weights. Next
    comes a table without offload or recomputation, then the one with the least memory. All choices
    are simulated on all ranks. Then each rank takes the best choice that fits it.

    Args:
        memory: the limit of all ranks, or one for each.
        gathers: shard weights too, and not only gradients.
        moved: returns a table of the same passes with at most this much activation, by offload or
            recomputation, or raises ScheduleError. It is called where the table does not fit.
    Raises: ScheduleError as `with_sharded_weights`, or if none fits, with the least memory that the
        fullest rank needs.
    """
    limits = [memory] * len(schedule.ranks) if isinstance(memory, float | int) else [*memory]
    ways = list(ways_to_live(schedule, gathers=gathers))
    played = [_Played(way, with_sharded_weights(schedule, costs, way), costs) for way in ways]
    best = min(one.time.makespan for one in played)
    played.sort(key=lambda one: one.worth(best))
    room = [
        next((x.way for x in played if x.time.peak[r] <= limit * _HAIR), None)
        for r, limit in enumerate(limits)
    ]
    each = [way for way in room if way]
    if len(each) == len(room):
        played.append(_Played(each[0], with_sharded_weights(schedule, costs, each), costs))
    fitting = [one for one in played if one.fits(limits)]
    if moved is not None and played[0] not in fitting:
        for way, table in _moved_tables(schedule, costs, ways, min(limits), moved):
            one = _Played(way, table, costs)
            if one.fits(limits):
                fitting.append(one)
    if not fitting:
        over = [
            max((held - limits[r], r) for r, held in enumerate(one.time.peak)) for one in played
        ]
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
    ways: Iterable[Living],
    limit: float,
    moved: Callable[[float], Schedule],
) -> Iterator[tuple[Living, Schedule]]:
    """Yield each choice with a table whose offload or recomputation leaves memory for it."""
    tables: dict[float, Schedule | None] = {}
    for way in ways:
        room = limit - max(whole_at_most(schedule, costs, way))
        if room not in tables:
            tables[room] = None
            with suppress(ScheduleError):
                tables[room] = moved(room) if room > 0 else None
        table = tables[room]
        if table is not None:
            yield way, with_sharded_weights(table, costs, way)


def whole_at_most(schedule: Schedule, costs: Costs, way: Living) -> list[float]:
    """Return the most full weights and gradients that each rank holds at once.

    These are the largest stages that a choice gathers at a time, and one gradient more, which is
    being summed. The rank's shards are not counted.
    """
    place = schedule.placement
    weights = costs.by_stage("mem_a", place)
    gradients = costs.by_stage("mem_g", place)
    found = []
    for rank, row in enumerate(schedule.ranks):
        own = place.stages_on(rank)
        borrow = borrowers(costs, place, own)
        first = {stage for stage in own if place.is_first(stage)} if borrow else set()
        used = (len({x.stage for x in step if reads_weights(x.kind)}) for step in row)
        pairs = max(used, default=0)
        count = max(way.weights, pairs) if way.weights else 0
        of_weights = _largest(own, weights, count, first, borrow)
        largest = sorted((gradients[s] for s in own), reverse=True)[: way.gradients + 1]
        found.append(of_weights + sum(largest))
    return found


def _largest(
    own: Sequence[int], sizes: Sequence[float], count: int, first: set[int], borrow: set[int]
) -> float:
    """Return the largest total size of any `count` stages.

    A stage in `borrow` uses the first stage's weights too and counts those.

    Args:
        first: the first stage, if the rank has it.
    """

    def most(stages: Iterable[int], count: int) -> float:
        return sum(sorted((sizes[s] for s in stages), reverse=True)[:count])

    if not (count and borrow):
        return most(own, count)
    return max(most({*own} - borrow, count), most(first, 1) + most({*own} - first, count))


class _Played:
    """A table with its choice and simulated times. `fits` and `worth` compare it with others."""

    def __init__(self, way: Living, table: Schedule, costs: Costs) -> None:
        self.way = way
        self.table = table
        self.time = simulate(table, costs)

    def fits(self, limits: Sequence[float]) -> bool:
        """Return whether every rank keeps to its limit."""
        both = zip(self.time.peak, limits, strict=True)
        return all(held <= limit * _HAIR for held, limit in both)

    def worth(self, best: float) -> tuple[float, int, bool, float, float]:
        """Return a value to minimise, given the time of the fastest table."""
        sums = sum(x.kind in REDUCES for x in self.table.passes())
        slow = self.time.makespan if self.time.makespan > best * _AS_FAST else best
        moves = not self.table.kinds.isdisjoint((Kind.O, Kind.R))
        return slow, sums, moves, max(self.time.peak), self.time.makespan


def ways_to_live(schedule: Schedule, *, gathers: bool = True) -> Iterator[Living]:
    """Yield the choices to try: one stage gathered at a time, two, half of a rank's, all.

    A large table has fewer choices, because simulating it takes long.

    Args:
        gathers: shard weights too, and not only gradients.
    """
    most = max(len(schedule.placement.stages_on(rank)) for rank in range(len(schedule.ranks)))
    counts = sorted({min(n, most) for n in (1, 2, (most + 1) // 2, most)})
    sums = counts
    if sum(map(len, schedule.ranks)) > _MANY:
        counts = sorted({1, min(2, most), most})
        sums = sorted({1, most})
    for weights, gradients, ahead in product(counts if gathers else [0], sums, (False, True)):
        if not ahead or 1 < weights < most:
            yield Living(weights, gradients, ahead)


def _refuse(schedule: Schedule) -> None:
    """Refuse a table that gathers or reduces already. Raises: ScheduleError with the kinds."""
    there = sorted(schedule.kinds & (GATHERS | REDUCES | {Kind.A, Kind.G, Kind.V}))
    if there:
        raise ScheduleError(
            f"{schedule.name} has {' and '.join(there)} already. Shard the table without."
        )


def _row(
    schedule: Schedule, rank: int, clock: Clock, costs: Costs, living: Living
) -> tuple[Step, ...]:
    """Return a rank's row with gathers and reductions."""
    row = schedule.ranks[rank]
    duration = costs.durations(schedule.placement)
    start = clock.start[rank]
    end = clock.end[rank]
    reads = [{x.stage for x in step if reads_weights(x.kind)} for step in row]
    adds = [{x.stage for x in step if adds_gradients(x.kind)} for step in row]
    after: dict[int, list[Pass]] = {}
    sums = []
    for whole in sorted(_lives(adds, living.gradients, ahead=False), key=lambda whole: whole.last):
        *_, last = (x for x in row[whole.last] if x.stage == whole.stage and adds_gradients(x.kind))
        after.setdefault(whole.last, []).append(last._replace(kind=Kind.RS))
        sums.append((end[whole.last], duration[Kind.RS][whole.stage]))
    computes = [i for i, step in enumerate(row) if step[0].kind.traits.lane is Lane.COMPUTE]
    ends = [(end[i] * (1 - 1e-9), i) for i in computes]
    gathered: list[_Whole] = []
    if living.weights:
        gathered = _lives(reads, living.weights, ahead=living.ahead)
    back = inf
    # From the last gather to the first: each ends when its run or the next gather begins.
    in_order = sorted(gathered, key=lambda whole: whole.first)
    for whole in reversed(in_order):
        back = _begin(min(back, start[whole.first]), duration[Kind.AF][whole.stage], sums)
        at = bisect_right(ends, (back, len(row))) - 1
        early = ends[at][1] if at >= 0 else -1
        at = min(max(early, whole.room), whole.first - 1)
        users = (x for x in row[whole.first] if x.stage == whole.stage and reads_weights(x.kind))
        first = next(users)
        gather = first._replace(kind=Kind.AF if first.kind.is_forward else Kind.AB)
        # Before reductions that end the same step, and before gathers for later uses.
        after.setdefault(at, []).insert(0, gather)
    steps: list[Step] = [(item,) for item in after.get(-1, ())]
    for i, step in enumerate(row):
        steps.append(step)
        steps += [(item,) for item in after.get(i, ())]
    return tuple(steps)


def _begin(due: float, takes: float, sums: Sequence[tuple[float, float]]) -> float:
    """Return the latest start of a gather that must end when it is due.

    Args:
        takes: its duration.
        sums: (earliest start, duration) of the reductions on the same stream.
    """
    for ready, length in reversed(sums):
        if ready < due and due - takes < ready + length:
            due = min(due, ready)
    return due - takes


def _lives(uses: Sequence[set[int]], places: int, *, ahead: bool) -> list[_Whole]:
    """Return the runs of a row.

    Args:
        uses: the stages that each step of the row uses.
        places: stages that may be gathered at a time.
        ahead: keep the stages of the step before, so that the next gather need not wait for them.
    """
    coming: dict[int, list[int]] = {}
    for i in reversed(range(len(uses))):
        for stage in uses[i]:
            coming.setdefault(stage, []).append(i)
    runs: list[_Whole] = []
    whole: dict[int, _Whole] = {}
    free = [-1] * places
    recent: set[int] = set()
    for i, used in enumerate(uses):
        for stage in sorted(used):
            coming[stage].pop()
            if stage in whole:
                whole[stage] = replace(whole[stage], last=i)
                continue
            while len(whole) >= places:
                gone = _farthest(whole, coming, used, recent if ahead else set())
                if gone < 0:
                    break
                runs.append(whole.pop(gone))
                if len(whole) + len(free) < places:
                    free.append(runs[-1].last)
            # The place that has been free longest. A step with more stages than places has none.
            room = free.pop(free.index(min(free))) if free else i - 1
            whole[stage] = _Whole(stage, i, i, room)
        for stage in [stage for stage in whole if not coming[stage]]:
            runs.append(whole.pop(stage))
            if len(whole) + len(free) < places:
                free.append(runs[-1].last)
        recent = used or recent
    return runs


def _farthest(
    whole: dict[int, _Whole], coming: dict[int, list[int]], used: set[int], recent: set[int]
) -> int:
    """Return the stage to evict: the one whose next use is farthest; -1 if all are in use.

    Args:
        coming: the steps of each stage's future uses, the next one last.
        used: stages that this step uses.
        recent: stages not to evict while there is another one.
    """
    candidates = [stage for stage in whole if stage not in used]
    candidates = [stage for stage in candidates if stage not in recent] or candidates
    return max(candidates, key=lambda stage: coming[stage][-1], default=-1)
