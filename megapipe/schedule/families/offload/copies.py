"""Activations out of the way, as passes of any table: O and L copy a microbatch's to the host and back, R repeats it.

An O stands right behind its forward. An L stands where its copy can be back when the backward asks for it, and no
sooner; an R right before the backward, in the wait for its gradient if there is one. (PipeOffload, arXiv 2503.01328.)
Of microbatches in slices each slice is moved by itself; keys and values, which others read, go with the last one of
their document, whose forward is the last to read them before a backward does.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from math import inf

from megapipe.errors import ScheduleError
from megapipe.schedule.costs import UNIT, Costs
from megapipe.schedule.kinds import COPIES, Kind, Lane
from megapipe.schedule.passes import Pass, Schedule, Shared, Step
from megapipe.schedule.simulate import Clock, run_clock

Chosen = Collection[tuple[int, int]]
"""Stages and microbatches, or where these are cut slices by their number among all."""
_GOLDEN = (5**0.5 - 1) / 2


def with_offload(
    schedule: Schedule,
    costs: Costs = UNIT,
    *,
    share: float = 1.0,
    chosen: Chosen | None = None,
    stages: Collection[int] | None = None,
    switches: Iterable[Sequence[int]] = (),
) -> Schedule:
    """The table with O and L of some stages and microbatches.

    Args:
        share: of each stage's microbatches, those that are held longest; of equals evenly spread ones. A copy that
            could not be back in time is left out.
        chosen: these, in place of a share.
        stages: of these alone, if it is a share.
        switches: ranks that share the way to the host in each direction; the order there is the clock's.
    Raises: ScheduleError for a table that has such passes, or a choice that is not of the table.
    """
    _refuse(schedule, {Kind.O, Kind.L}, chosen)
    clock = run_clock(schedule, costs)
    by_share = (x for x in longest(schedule, clock, share) if stages is None or x[0] in stages)
    wanted = frozenset(by_share if chosen is None else chosen)
    groups = [tuple(group) for group in switches]
    alone = [(rank,) for rank in range(len(schedule.ranks)) if not any(rank in group for group in groups)]
    rows: dict[int, tuple[Step, ...]] = {}
    for group in (*groups, *alone):
        rows |= _put_copies(group, schedule, clock, costs, wanted, fixed=chosen is not None)
    return sharing(replace(schedule, ranks=tuple(rows[rank] for rank in sorted(rows))), costs, groups)


def with_recompute(
    schedule: Schedule, costs: Costs = UNIT, *, share: float = 1.0, chosen: Chosen | None = None
) -> Schedule:
    """The table with R of some stages and microbatches; arguments and errors as of `with_offload`."""
    _refuse(schedule, {Kind.R}, chosen)
    wanted = longest(schedule, run_clock(schedule, costs), share) if chosen is None else frozenset(chosen)

    def again(step: Step) -> list[Step]:
        back = (x for x in step if x.kind.is_backward and (x.stage, schedule.number(x)) in wanted)
        return [(x._replace(kind=Kind.R),) for x in back]

    return schedule.map(lambda step: (*again(step), step))


def sharing(schedule: Schedule, costs: Costs, groups: Sequence[tuple[int, ...]]) -> Schedule:
    """The table whose ranks share their copy lanes in these groups, each lane in the order of the clock."""
    if not groups:
        return schedule
    # By when each is posted, the place in its row: so no rank waits in a circle, as rows and needs go the same way.
    clock, posted = run_clock(schedule, costs), [0.0] * len(schedule.ranks)
    at: list[tuple[float, int, Pass]] = []
    for number, (rank, i) in enumerate(clock.order):
        step = schedule.ranks[rank][i]
        if step[0].kind.traits.lane is Lane.COMPUTE:
            posted[rank] = clock.end[rank][i]
        at += [(posted[rank], number, x) for x in step]
    order = [x for *_, x in sorted(at)]
    rank_of = schedule.placement.rank_of
    shared = [
        Shared(lane, group, tuple(x for x in order if x.kind.traits.lane is lane and rank_of[x.stage] in group))
        for group in groups
        for lane in Lane
        if lane in COPIES
    ]
    return replace(schedule, shared=(*schedule.shared, *shared))


def longest(schedule: Schedule, clock: Clock, share: float) -> frozenset[tuple[int, int]]:
    """A share of the microbatches, or slices, of each stage: those that it holds longest between forward and
    backward."""
    held: dict[int, list[tuple[float, float, int]]] = {}
    begun: dict[tuple[int, int], float] = {}
    for rank, i in clock.order:
        for item in schedule.ranks[rank][i]:
            stage, number = item.stage, schedule.number(item)
            if item.kind.is_forward:
                begun[stage, number] = clock.end[rank][i]
            elif item.kind.is_backward:
                life = clock.start[rank][i] - begun[stage, number]
                own = held.setdefault(stage, [])
                own.append((-round(life, 9), len(own) * _GOLDEN % 1.0, number))
    return frozenset(
        (stage, number) for stage, own in held.items() for *_, number in sorted(own)[: round(share * len(own))]
    )


def _refuse(schedule: Schedule, added: set[Kind], chosen: Chosen | None) -> None:
    if twice := sorted(added & schedule.kinds):
        raise ScheduleError(f"{schedule.name} has {' and '.join(twice)} already. Put them into the table without.")
    every = schedule.passes()
    if unknown := sorted(set(chosen or ()) - {(x.stage, schedule.number(x)) for x in every if x.kind.is_forward}):
        stage, number = unknown[0]
        what = "microbatch" if not schedule.cuts else "slice"
        raise ScheduleError(f"{schedule.name} has no {what} {number} on stage {stage}.")


@dataclass(frozen=True)
class _Copy:
    """The way of a microbatch, or slice, to the host and back, on ranks that may share it.

    Attributes:
        of: its backward.
        rank, out, used: its rank, and the steps of its forward and of its backward there.
        ready, due: when the forward ends and the backward starts by the clock without copies.
    """

    of: Pass
    rank: int
    out: int
    used: int
    ready: float
    due: float

    def step(self, kind: Kind) -> Step:
        """Its pass of this kind."""
        return (self.of._replace(kind=kind),)


def _copies(ranks: Sequence[int], schedule: Schedule, clock: Clock, wanted: Chosen) -> list[_Copy]:
    copies = []
    for rank in ranks:
        made: dict[Pass, int] = {}
        for i, x in ((i, x) for i, step in enumerate(schedule.ranks[rank]) for x in step):
            if (x.stage, schedule.number(x)) not in wanted:
                continue
            if x.kind.is_forward:
                made[x] = i
            elif x.kind.is_backward:
                out = made[x._replace(kind=Kind.F)]
                copies.append(_Copy(x, rank, out, i, clock.end[rank][out], clock.start[rank][i]))
    return copies


def _put_copies(
    ranks: Sequence[int], schedule: Schedule, clock: Clock, costs: Costs, wanted: Chosen, *, fixed: bool
) -> dict[int, tuple[Step, ...]]:
    """The rows, with O and L, of ranks with one way to the host. fixed: of all that are wanted, in time or not."""
    of_part = {of: costs.of_slice(schedule.cuts, of).durations(schedule.placement) for of in (*schedule.parts, None)}

    def duration(kind: Kind, copy: _Copy) -> float:
        return of_part[schedule.part(copy.of)][kind][copy.of.stage]

    copies = _copies(ranks, schedule, clock, wanted)
    free, there = 0.0, dict[_Copy, float]()  # when a copy is on the host
    for copy in sorted(copies, key=lambda copy: copy.ready):
        there[copy] = free = max(free, copy.ready) + duration(Kind.O, copy)
    behind: dict[int, dict[int, list[Step]]] = {rank: {} for rank in ranks}
    places = {rank: _Places(schedule.ranks[rank], clock.end[rank]) for rank in ranks}
    back = inf  # when the next copy on the way back must begin
    # Backwards that take no time may be due at once: the last in the row has the last way back.
    for copy in sorted(copies, key=lambda copy: (-copy.due, copy.rank, -copy.used)):
        begin = min(back, copy.due) - duration(Kind.L, copy)
        if begin < there[copy] * (1 - 1e-9) and not fixed:
            del there[copy]
            continue
        back = begin
        at = max(min(places[copy.rank].before(begin), copy.used - 1), copy.out)
        behind[copy.rank].setdefault(at, []).insert(0, copy.step(Kind.L))
    out: dict[int, dict[int, list[Step]]] = {rank: {} for rank in ranks}
    for copy in there:
        out[copy.rank].setdefault(copy.out, []).append(copy.step(Kind.O))
    return {
        rank: tuple(
            x
            for i, step in enumerate(schedule.ranks[rank])
            for x in (step, *out[rank].get(i, ()), *behind[rank].get(i, ()))
        )
        for rank in ranks
    }


class _Places:
    """The ends of a row's compute passes, in order."""

    def __init__(self, row: Sequence[Step], end: Sequence[float]) -> None:
        self._steps = [i for i, step in enumerate(row) if step[0].kind.traits.lane is Lane.COMPUTE]
        self._ends = [end[i] * (1 - 1e-9) for i in self._steps]

    def before(self, time: float) -> int:
        """The last step that ends by then: a copy behind it is early rather than late. -1: there is none."""
        at = bisect_right(self._ends, time)
        return self._steps[at - 1] if at else -1
