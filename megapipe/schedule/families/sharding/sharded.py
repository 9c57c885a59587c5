"""Weights and gradients as shares between the runs of a stage's passes: how long a gathered stage lives.

What a rank has whole is a cache of its stages, and its row says every use in advance: the stage that goes is the one
whose next use is farthest (Belady 1966), so that none gathers less. Breadth-first tables use a stage longest at once
and gather it twice a step (Lamy-Poirier 2023, sec. 3), depth-first ones for every microbatch. A place that is kept
free for the stage that comes next hides its gather behind the passes of the one before. Which is better the clock says.
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

_HAIR, _AS_FAST = 1 + 1e-9, 1.01
_MANY = 4096
"""Steps of a table of which all ways are played, in a second; counted, not timed: every rank finds the same."""


class Living(NamedTuple):
    """A choice of how many stages of a rank are whole at a time.

    Attributes:
        weights: stages whose weights are; more only in a step of two passes of two stages. 0: all, for ever.
        gradients: stages whose gradients are, beside those that are just being summed.
        ahead: one of `weights` is the one that comes next, not the one that would be used last.
    """

    weights: int
    gradients: int
    ahead: bool = False


@dataclass(frozen=True)
class _Whole:
    """A run: steps of its first and last use, and the one behind which there is a place for it; -1: from the start."""

    stage: int
    first: int
    last: int
    room: int


def with_sharded_weights(
    schedule: Schedule, costs: Costs = UNIT, living: Living | Sequence[Living] = ()
) -> Schedule:
    """The table with a gather (AF, AB) before each run of a stage's passes and a reduction (RS) behind its gradients.

    A gather stands where it is over by the clock when the run begins, as far as there is a place for the stage by then.

    Args:
        living: of all ranks, or of each; (): every stage is gathered once a step and reduced once.
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
    """The fastest table whose ranks hold at most so much by the clock, to a hundredth of its time; of several that
    which sums gradients least often (once a stage has the bits of weights that live for ever), then one that moves
    nothing, then the smallest.

    Every way to live is played on all ranks; then each rank takes the best of those that it has the memory for.

    Args:
        memory: of all ranks, or of each.
        gathers: weights live for a while too, not gradients alone.
        moved: a table of the same passes that holds at most so much activation, by moving some of it out of the way; it
            is asked where the table as it is does not fit, and raises ScheduleError where there is none.
    Raises: ScheduleError as `with_sharded_weights`, or if none fits, saying the least that the fullest rank needs.
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
        tables = _moved_tables(schedule, costs, ways, min(limits), moved)
        fitting += [
            one for one in (_Played(way, table, costs) for way, table in tables) if one.fits(limits)
        ]
    if not fitting:
        over = [
            max((held - limits[r], r) for r, held in enumerate(one.time.peak)) for one in played
        ]
        need, rank = min(over)
        raise ScheduleError(
            f"{schedule.name}: rank {rank} needs {need + limits[rank]:g} for activations, gathered weights and "
            f"gradients, however shortly they live; the limit is {limits[rank]:g}."
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
    """Each way beside activations that are moved to leave it room."""
    tables: dict[float, Schedule | None] = {}
    for way in ways:
        room = limit - max(whole_at_most(schedule, costs, way))
        if room not in tables:
            tables[room] = None
            with suppress(ScheduleError):
                tables[room] = moved(room) if room > 0 else None
        if (table := tables[room]) is not None:
            yield way, with_sharded_weights(table, costs, way)


def whole_at_most(schedule: Schedule, costs: Costs, way: Living) -> list[float]:
    """The most weights and gradients that each rank has whole at once: of as many of its largest stages as live at a
    time, and of the gradients one more, which are being summed. What it has for ever, its shares, comes on top."""
    place = schedule.placement
    weights = costs.by_stage("mem_a", place)
    gradients = costs.by_stage("mem_g", place)
    found = []
    for rank, row in enumerate(schedule.ranks):
        own = place.stages_on(rank)
        borrow = borrowers(costs, place, own)
        first = {stage for stage in own if place.is_first(stage)} if borrow else set()
        pairs = max(
            (len({x.stage for x in step if reads_weights(x.kind)}) for step in row), default=0
        )
        of_weights = _largest(
            own, weights, max(way.weights, pairs) if way.weights else 0, first, borrow
        )
        found.append(
            of_weights + sum(sorted((gradients[s] for s in own), reverse=True)[: way.gradients + 1])
        )
    return found


def _largest(
    own: Sequence[int], sizes: Sequence[float], count: int, first: set[int], borrow: set[int]
) -> float:
    """The most that so many of these stages have; those that borrow of the first have its with them."""

    def most(stages: Iterable[int], count: int) -> float:
        return sum(sorted((sizes[s] for s in stages), reverse=True)[:count])

    if not (count and borrow):
        return most(own, count)
    return max(most({*own} - borrow, count), most(first, 1) + most({*own} - first, count))


class _Played:
    """A table with how long its weights live, and what it takes."""

    def __init__(self, way: Living, table: Schedule, costs: Costs) -> None:
        self.way, self.table, self.time = way, table, simulate(table, costs)

    def fits(self, limits: Sequence[float]) -> bool:
        """Does every rank hold at most so much?"""
        return all(
            held <= limit * _HAIR for held, limit in zip(self.time.peak, limits, strict=True)
        )

    def worth(self, best: float) -> tuple[float, int, bool, float, float]:
        """The less the better, beside a table that takes the time `best`."""
        sums = sum(x.kind in REDUCES for x in self.table.passes())
        slow = self.time.makespan if self.time.makespan > best * _AS_FAST else best
        moves = not self.table.kinds.isdisjoint((Kind.O, Kind.R))
        return slow, sums, moves, max(self.time.peak), self.time.makespan


def ways_to_live(schedule: Schedule, *, gathers: bool = True) -> Iterator[Living]:
    """The choices that are worth a look: one stage whole, two, half of a rank's, all; fewer of a table that takes long
    to play. gathers: of weights too."""
    most = max(len(schedule.placement.stages_on(rank)) for rank in range(len(schedule.ranks)))
    counts = sorted({min(n, most) for n in (1, 2, (most + 1) // 2, most)})
    sums = counts
    if sum(map(len, schedule.ranks)) > _MANY:
        counts, sums = sorted({1, min(2, most), most}), sorted({1, most})
    for weights, gradients, ahead in product(counts if gathers else [0], sums, (False, True)):
        if not ahead or 1 < weights < most:
            yield Living(weights, gradients, ahead)


def _refuse(schedule: Schedule) -> None:
    if there := sorted(schedule.kinds & (GATHERS | REDUCES | {Kind.A, Kind.G, Kind.V})):
        raise ScheduleError(
            f"{schedule.name} has {' and '.join(there)} already. Shard the table without."
        )


def _row(
    schedule: Schedule, rank: int, clock: Clock, costs: Costs, living: Living
) -> tuple[Step, ...]:
    row, duration = schedule.ranks[rank], costs.durations(schedule.placement)
    reads = [{x.stage for x in step if reads_weights(x.kind)} for step in row]
    adds = [{x.stage for x in step if adds_gradients(x.kind)} for step in row]
    behind: dict[int, list[Pass]] = {}
    sums = []
    for whole in sorted(_lives(adds, living.gradients, ahead=False), key=lambda whole: whole.last):
        *_, last = (x for x in row[whole.last] if x.stage == whole.stage and adds_gradients(x.kind))
        behind.setdefault(whole.last, []).append(last._replace(kind=Kind.RS))
        sums.append((clock.end[rank][whole.last], duration[Kind.RS][whole.stage]))
    ends = [
        (e * (1 - 1e-9), i)
        for i, e in enumerate(clock.end[rank])
        if row[i][0].kind.traits.lane is Lane.COMPUTE
    ]
    whole_for_a_while = _lives(reads, living.weights, ahead=living.ahead) if living.weights else []
    gathers = sorted(whole_for_a_while, key=lambda whole: whole.first)
    back = inf
    for whole in reversed(gathers):
        back = _begin(
            min(back, clock.start[rank][whole.first]), duration[Kind.AF][whole.stage], sums
        )
        at = bisect_right(ends, (back, len(row))) - 1
        at = min(max(ends[at][1] if at >= 0 else -1, whole.room), whole.first - 1)
        first = next(
            x for x in row[whole.first] if x.stage == whole.stage and reads_weights(x.kind)
        )
        gather = first._replace(kind=Kind.AF if first.kind.is_forward else Kind.AB)
        # Before reductions that end the same step, and before gathers for later uses.
        behind.setdefault(at, []).insert(0, gather)
    return (*((x,) for x in behind.get(-1, ())),
            *(x for i, step in enumerate(row) for x in (step, *((y,) for y in behind.get(i, ())))))  # fmt: skip


def _begin(due: float, takes: float, sums: Sequence[tuple[float, float]]) -> float:
    """The latest begin of a gather that is over when it is due, on a lane with these reductions."""
    for ready, length in reversed(sums):
        if ready < due and due - takes < ready + length:
            due = min(due, ready)
    return due - takes


def _lives(uses: Sequence[set[int]], places: int, *, ahead: bool) -> list[_Whole]:
    """The runs of a row that uses these stages in each of its steps."""
    coming: dict[int, list[int]] = {}
    for i in reversed(range(len(uses))):
        for stage in uses[i]:
            coming.setdefault(stage, []).append(i)
    runs, whole, free = list[_Whole](), dict[int, _Whole](), [-1] * places
    recent: set[int] = set()
    for i, used in enumerate(uses):
        for stage in sorted(used):
            coming[stage].pop()
            if stage in whole:
                whole[stage] = replace(whole[stage], last=i)
                continue
            while (
                len(whole) >= places
                and (gone := _farthest(whole, coming, used, recent if ahead else set())) >= 0
            ):
                runs.append(whole.pop(gone))
                if len(whole) + len(free) < places:
                    free.append(runs[-1].last)
            # The place that has been free longest; none is where one step uses more stages than there are places.
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
    """The stage to let go: that of the farthest next use, none that was used just now if another is there. -1: none."""
    candidates = [stage for stage in whole if stage not in used]
    candidates = [stage for stage in candidates if stage not in recent] or candidates
    return max(candidates, key=lambda stage: coming[stage][-1], default=-1)
