"""Offload and recomputation as passes of any table: O and L copy out and back, R recomputes.

An O follows its forward directly. An L stands where its copy returns just in time for the backward.
Here each copy takes as long as two passes:

    compute           F0  F1  F2  F3  B3  B2  B1  B0
    device to host        O0 ---
    host to device                        L0 ---

An R stands directly before the backward, and uses the wait for its gradient if there is one. (Wan
et al. 2025, PipeOffload, arXiv 2503.01328.) Slices of a microbatch are moved one by one. Keys and
values, which other slices read, go with the last slice of their document: its forward is the last
to read them before a backward does.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from math import inf

from megapipe.errors import ScheduleError
from megapipe.schedule.costs import UNIT, Costs
from megapipe.schedule.kinds import COPIES, Kind, Lane
from megapipe.schedule.passes import Pass, Schedule, Shared, Step, with_steps
from megapipe.schedule.simulate import SimulatedTimes, run_clock

Chosen = Collection[tuple[int, int]]
"""(stage, microbatch), or (stage, number of the slice among all slices)."""
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
    """Return the table with O and L, which copy activations to the host and back.

    Args:
        share: the fraction of each stage's microbatches to copy. The ones held longest are taken,
            spread evenly among ones held equally long. A copy that would not return in time is left
            out.
        chosen: copy these (stage, microbatch or slice), even if some return late; None to copy a
            share.
        stages: with a share, copy only for these stages; None for all.
        switches: groups of ranks that share one stream of copies in each direction. Copies on it
            run in the order of the simulated times.
    Raises: ScheduleError for a table that has O or L, or lacks a forward in `chosen`.
    """
    _refuse(schedule, {Kind.O, Kind.L}, chosen)
    # All places follow from the clock without copies: copies in time leave it as it is.
    clock = run_clock(schedule, costs)
    if chosen is None:
        by_share = longest(schedule, clock, share)
        wanted = frozenset(x for x in by_share if stages is None or x[0] in stages)
    else:
        wanted = frozenset(chosen)
    # A rank without a switch of its own group shares its copies with nobody.
    groups = [tuple(group) for group in switches]
    grouped = {rank for group in groups for rank in group}
    alone = [(rank,) for rank in range(len(schedule.ranks)) if rank not in grouped]
    rows: dict[int, tuple[Step, ...]] = {}
    for group in (*groups, *alone):
        rows |= _put_copies(group, schedule, clock, costs, wanted, fixed=chosen is not None)
    table = replace(schedule, ranks=tuple(rows[rank] for rank in sorted(rows)))
    return sharing(table, costs, groups)


def with_recompute(
    schedule: Schedule, costs: Costs = UNIT, *, share: float = 1.0, chosen: Chosen | None = None
) -> Schedule:
    """Return the table with R, the recomputation of a forward, before some backwards.

    Args:
        share: the fraction of each stage's microbatches to recompute. The ones held longest are
            taken.
        chosen: recompute these (stage, microbatch or slice); None to recompute a share.
    Raises: ScheduleError for a table that has R, or lacks a forward in `chosen`.
    """
    _refuse(schedule, {Kind.R}, chosen)
    if chosen is None:
        wanted = longest(schedule, run_clock(schedule, costs), share)
    else:
        wanted = frozenset(chosen)

    # Directly before the backward: what R makes is held for the shortest time, and the rank may
    # wait for the gradient there anyway.
    def again(step: Step) -> list[Step]:
        back = (x for x in step if x.kind.is_backward and (x.stage, schedule.number(x)) in wanted)
        return [(x._replace(kind=Kind.R),) for x in back]

    return schedule.map(lambda step: (*again(step), step))


def sharing(schedule: Schedule, costs: Costs, groups: Sequence[tuple[int, ...]]) -> Schedule:
    """Return the table with streams of copies that several ranks share.

    Args:
        groups: the ranks of each group. A group has one stream in each direction. The group's
            copies run in the order in which the ranks post them under `costs`.
    """
    if not groups:
        return schedule
    # The order is by the time at which each copy is posted in its row. Rows and needs follow the
    # clock too, so ranks cannot wait in a circle.
    clock = run_clock(schedule, costs)
    posted = [0.0] * len(schedule.ranks)
    at: list[tuple[float, int, Pass]] = []
    for number, (rank, i) in enumerate(clock.order):
        step = schedule.ranks[rank][i]
        if step[0].kind.traits.lane is Lane.COMPUTE:
            posted[rank] = clock.end[rank][i]
        at += [(posted[rank], number, x) for x in step]
    order = [x for *_, x in sorted(at)]
    rank_of = schedule.placement.rank_of
    shared = []
    for group in groups:
        for lane in Lane:
            if lane in COPIES:
                own = (x for x in order if x.kind.traits.lane is lane)
                passes = tuple(x for x in own if rank_of[x.stage] in group)
                shared.append(Shared(lane, group, passes))
    return replace(schedule, shared=(*schedule.shared, *shared))


def longest(schedule: Schedule, clock: SimulatedTimes, share: float) -> frozenset[tuple[int, int]]:
    """Return each (stage, microbatch or slice) held longest between forward and backward.

    Args:
        clock: start and end of each step of the table.
        share: the fraction of each stage's microbatches or slices to return.
    """
    held: dict[int, list[tuple[float, float, int]]] = {}
    begun: dict[tuple[int, int], float] = {}
    for rank, i in clock.order:
        for item in schedule.ranks[rank][i]:
            stage = item.stage
            number = schedule.number(item)
            if item.kind.is_forward:
                begun[stage, number] = clock.end[rank][i]
            # B ends the life as BW does: W needs only mem_w, which nothing copies.
            elif item.kind.is_backward:
                life = clock.start[rank][i] - begun[stage, number]
                own = held.setdefault(stage, [])
                # Multiples of the golden ratio modulo 1 spread equal microbatches evenly.
                own.append((-round(life, 9), len(own) * _GOLDEN % 1.0, number))
    found = set()
    for stage, own in held.items():
        for *_, number in sorted(own)[: round(share * len(own))]:
            found.add((stage, number))
    return frozenset(found)


def _refuse(schedule: Schedule, added: set[Kind], chosen: Chosen | None) -> None:
    """Refuse a table that already has some of these kinds of pass, or an impossible choice.

    Args:
        added: the kinds to be added.
        chosen: each (stage, microbatch or slice) to offload or recompute; None for a share of all.
            A choice is impossible if the table lacks its forward.
    Raises: ScheduleError that names the kinds, or the choice.
    """
    twice = sorted(added & schedule.kinds)
    if twice:
        raise ScheduleError(
            f"{schedule.name} has {' and '.join(twice)} already. Put them into the table without."
        )
    forwards = (x for x in schedule.passes() if x.kind.is_forward)
    unknown = sorted(set(chosen or ()) - {(x.stage, schedule.number(x)) for x in forwards})
    if unknown:
        stage, number = unknown[0]
        what = "microbatch"
        if schedule.cuts:
            what = "slice"
        raise ScheduleError(f"{schedule.name} has no {what} {number} on stage {stage}.")


@dataclass(frozen=True)
class _Copy:
    """The two copies, to the host and back, of activations of one stage and microbatch or slice.

    O is the copy to the host, L the copy back. `step` returns the step with one of them.

    Attributes:
        of: the backward that uses the activations.
        rank: the rank of the stage.
        out, used: indices in the rank's row of the steps of its forward and its backward.
        ready, due: when the forward ends and the backward starts in a table without copies.
    """

    of: Pass
    rank: int
    out: int
    used: int
    ready: float
    due: float

    def step(self, kind: Kind) -> Step:
        """Return the step with the copy out or back.

        Args:
            kind: O or L.
        """
        return (self.of._replace(kind=kind),)


def _copies(
    ranks: Sequence[int], schedule: Schedule, clock: SimulatedTimes, wanted: Chosen
) -> list[_Copy]:
    """Return a `_Copy` for each chosen activation of some ranks.

    Args:
        ranks: the ranks.
        clock: start and end of each step of the table without copies.
        wanted: each (stage, microbatch or slice) to copy.
    """
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
    ranks: Sequence[int],
    schedule: Schedule,
    clock: SimulatedTimes,
    costs: Costs,
    wanted: Chosen,
    *,
    fixed: bool,
) -> dict[int, tuple[Step, ...]]:
    """Return {rank: row with O and L} for ranks that share one stream of copies each way.

    O are copies to the host, L copies back.

    Args:
        ranks: the ranks that share the streams.
        schedule: the table without copies.
        clock: start and end of each step of the table without copies.
        wanted: each (stage, microbatch or slice) to copy.
        fixed: copy all that are wanted, even if they return late.
    """
    of_part = {}
    for part in (*schedule.parts, None):
        of_part[part] = costs.of_slice(schedule.cuts, part).durations(schedule.placement)

    def duration(kind: Kind, copy: _Copy) -> float:
        return of_part[schedule.part(copy.of)][kind][copy.of.stage]

    copies = _copies(ranks, schedule, clock, wanted)

    # Out, in the order of the forwards: each copy starts when its forward has ended and the stream
    # is free.
    there: dict[_Copy, float] = {}  # when a copy is on the host
    free = 0.0
    for copy in sorted(copies, key=lambda copy: copy.ready):
        free = max(free, copy.ready) + duration(Kind.O, copy)
        there[copy] = free

    # Back, as late as possible, so that the memory stays free for longest.
    after: dict[int, dict[int, list[Step]]] = {rank: {} for rank in ranks}
    places = {rank: _Places(schedule.ranks[rank], clock.end[rank]) for rank in ranks}
    latest = inf  # when the next copy back must start
    # From the last copy back to the first. Backwards of no duration may be due at one time; then
    # the last in the row has the last copy.
    for copy in sorted(copies, key=lambda copy: (-copy.due, copy.rank, -copy.used)):
        begin = min(latest, copy.due) - duration(Kind.L, copy)
        # It would be late, and its backward would wait. It stays on the device.
        if begin < there[copy] * (1 - 1e-9) and not fixed:
            del there[copy]
            continue
        latest = begin
        # Between its forward and its backward, whatever the times say.
        at = max(min(places[copy.rank].before(begin), copy.used - 1), copy.out)
        after[copy.rank].setdefault(at, []).insert(0, copy.step(Kind.L))
    # A copy out stands before all copies back that follow the same step.
    for copy in reversed(there):
        after[copy.rank].setdefault(copy.out, []).insert(0, copy.step(Kind.O))
    return {rank: with_steps(schedule.ranks[rank], after[rank]) for rank in ranks}


class _Places:
    """The places in a rank's row where a copy may be inserted: after each of its compute passes.

    `before` returns the last compute step that ends by a given time.

    Args:
        row: the steps of the row.
        end: end of each step of the row.
    """

    def __init__(self, row: Sequence[Step], end: Sequence[float]) -> None:
        self._steps = [i for i, step in enumerate(row) if step[0].kind.traits.lane is Lane.COMPUTE]
        self._ends = [end[i] * (1 - 1e-9) for i in self._steps]

    def before(self, time: float) -> int:
        """Return the index of the last compute step that ends by `time`, -1 for none.

        A copy inserted after this step may start too early, but never late.
        """
        at = bisect_right(self._ends, time)
        if at == 0:
            return -1
        return self._steps[at - 1]


def copied(plain: Schedule, costs: Costs, chunks: int | None, switch: int | None) -> Schedule:
    """Return the table with offload of each activation that can be back in time for its backward.

    Stages whose value in a tuple `costs.mem_o` is 0 have no copies.

    Args:
        plain: the table without copies.
        chunks: number of a rank's first stages to copy for; None for all.
        switch: number of neighbouring ranks that share one connection to the host; None for no
            sharing.
    """
    place = plain.placement
    goes = costs.mem_o if isinstance(costs.mem_o, tuple) else ()
    stages = set()
    for rank in range(place.num_ranks):
        for stage in place.stages_on(rank)[:chunks]:
            if not goes or goes[place.position(stage)]:
                stages.add(stage)
    groups = []
    if switch:
        firsts = range(0, place.num_ranks, switch)
        groups = [range(first, min(first + switch, place.num_ranks)) for first in firsts]
    return with_offload(plain, costs, stages=stages, switches=groups)
