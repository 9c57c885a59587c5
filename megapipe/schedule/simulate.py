"""The clock: when every pass runs, how much each rank holds, and what it waits for.

A step starts once its rank has finished the step before and every input has arrived. The same clock
evaluates a schedule (`simulate`), finds deadlocks (`verify`) and orders messages (`lower`).
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import product
from math import inf
from typing import NamedTuple

from megapipe.errors import ScheduleError
from megapipe.schedule.costs import UNIT, Costs
from megapipe.schedule.dependencies import Dependencies, beyond_microbatch, is_beyond
from megapipe.schedule.kinds import COPIES, Kind, Lane, Made, Where
from megapipe.schedule.memory.held import memory_steps as memory_steps
from megapipe.schedule.passes import Pass, Placement, Schedule, Step


@dataclass(frozen=True)
class Timeline:
    """The simulated times and memory of a schedule, in the units of the costs.

    `period` is the largest `span`. `idle` and `peak` are each rank's idle time and activation.

    Attributes:
        start, end: times of every pass; both passes of an overlapped pair have the pair's times.
        busy: time each rank computes, without copies and collectives on other streams.
        span: each rank's time from its first start to its last end.
        makespan: the last end of any rank.
        curves: for each rank, (time, activation held from then on) in order of time.
        sent: number of tensors each rank sends to another rank.
        parameters: each rank's parameters, in units of 1/p of the model on p ranks.
    """

    start: Mapping[Pass, float]
    end: Mapping[Pass, float]
    busy: tuple[float, ...]
    span: tuple[float, ...]
    makespan: float
    curves: tuple[tuple[tuple[float, float], ...], ...]
    sent: tuple[int, ...]
    parameters: tuple[float, ...]

    @property
    def period(self) -> float:
        """Return the longest span of a rank: a step's time without a barrier between steps."""
        return max(self.span)

    @property
    def bubble(self) -> float:
        """Return the papers' bubble as a time: the longest idle time of a rank within its span."""
        return max(map(_left, self.span, self.busy))

    @property
    def idle(self) -> tuple[float, ...]:
        """Return each rank's idle time from time 0 to the makespan."""
        return tuple(_left(self.makespan, busy) for busy in self.busy)

    @cached_property
    def peak(self) -> tuple[float, ...]:
        """Return, for each rank, the most activation that it holds at any time."""
        return tuple(max((held for _, held in curve), default=0.0) for curve in self.curves)

    def __repr__(self) -> str:
        peaks = " ".join(f"{held:g}" for held in self.peak)
        return f"Timeline(makespan {self.makespan:g}, bubble {self.bubble:g}, peak by rank {peaks})"


def _left(time: float, busy: float) -> float:
    """Return time - busy; 0 if the difference is only rounding of the sums."""
    left = time - busy
    if left > 1e-9 * time:
        return left
    return 0.0


@dataclass(frozen=True)
class SimulatedTimes:
    """The times at which the steps of a table begin and end in a simulation.

    Attributes:
        start, end: times of every step, [rank][step].
        order: all steps as (rank, step), in an order in which each step follows its inputs.
    """

    start: list[list[float]]
    end: list[list[float]]
    order: list[tuple[int, int]]


@contextmanager
def uncollected() -> Iterator[None]:
    """Disable the garbage collector within a `with` block.

    A table has many small tuples and no cycles. The collector would take two fifths of the time.
    """
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()


@uncollected()
def simulate(
    schedule: Schedule, costs: Costs = UNIT, took: Mapping[Pass, float] | None = None
) -> Timeline:
    """Return the times and memory of a schedule under these costs.

    Args:
        took: {pass: measured duration with overhead}, which replaces the costs of these passes; or
            None.
    Raises: ScheduleError if ranks deadlock, with each waiting rank, its step and what it lacks.
    TypeError for a name in place of a schedule, or numbers in place of costs.
    """
    if not isinstance(schedule, Schedule):
        raise TypeError(f'simulate takes a Schedule, such as build("zb-v", 4, 8), not {schedule!r}')
    if not isinstance(costs, Costs):
        raise TypeError(f"simulate takes Costs, such as Costs(f=10, b=11, w=8), not {costs!r}")
    clock = run_clock(schedule, costs, took)
    start: dict[Pass, float] = {}
    end: dict[Pass, float] = {}
    busy: list[float] = []
    span: list[float] = []
    sent: list[int] = []
    makespan = 0.0
    for steps, starts, ends in zip(schedule.ranks, clock.start, clock.end, strict=True):
        computed = []
        messages = 0
        for step, begin, finish in zip(steps, starts, ends, strict=True):
            # Copies and collectives run while the rank computes. They fill no bubble.
            if step[0].kind.traits.lane is Lane.COMPUTE:
                computed.append(finish - begin)
            for item in step:
                start[item] = begin
                end[item] = finish
                messages += len(schedule.links[item[:2]].sends)
        busy.append(sum(computed))
        sent.append(messages)
        span.append(max(ends) - min(starts) if ends else 0.0)
        makespan = max([makespan, *ends])
    place = schedule.placement
    curves = []
    # A Timeline is by pass and time. The steps that changed the memory are left out.
    for curve in memory_steps(schedule, costs, clock):
        curves.append(tuple(moment[:2] for moment in curve))
    chunks = [len(place.stages_on(rank)) for rank in range(place.num_ranks)]
    return Timeline(
        start,
        end,
        busy=tuple(busy),
        span=tuple(span),
        makespan=makespan,
        curves=tuple(curves),
        sent=tuple(sent),
        parameters=tuple(count * place.num_ranks / place.chain for count in chunks),
    )


def run_clock(
    schedule: Schedule, costs: Costs, took: Mapping[Pass, float] | None = None
) -> SimulatedTimes:
    """Return start and end of every step, in time linear in the number of passes.

    Each rank advances until a step lacks an input. The pass that produces the input then wakes it.

    Args:
        took: {pass: measured duration}, which replaces the costs of these passes; or None.
    Raises: ScheduleError if ranks deadlock.
    """
    rows = schedule.ranks
    n = len(schedule.cuts)
    at, each = _places(schedule)
    lane_of, needs, makes, others, waiters = _wire(schedule, costs)
    length = _lengths(costs, schedule.placement, schedule.cuts, schedule.documents)
    if took is not None:
        by_kind = length

        def length(step: Step) -> float:
            return took[step[0]] if step[0] in took else by_kind(step)

    done: dict[Pass, float] = {}

    def after_others(item: Pass) -> float:
        return max([done.get(x, inf) + lag for x, lag in others[item]])

    clock = SimulatedTimes([[] for _ in rows], [[] for _ in rows], [])
    free = [[0.0] * len(_LANES) for _ in rows]
    # Ranks that may advance, the one woken last first. A dict as an ordered set: a rank that is
    # woken twice is visited once.
    ready = dict.fromkeys(reversed(range(len(rows))))
    while ready:
        rank = next(reversed(ready))
        steps = rows[rank]
        starts = clock.start[rank]
        ends = clock.end[rank]
        lanes = free[rank]
        for i in range(len(ends), len(steps)):
            step = steps[i]
            lane = lane_of[step[0][0]]
            # Inlined, with local names: this loop runs for each pass of each table of a search.
            now = lanes[lane]
            if lane and step[0][0] in _POSTED:  # not before the compute pass ahead of it in the row
                now = max(now, lanes[_COMPUTE])
            for item in step:
                kind, stage, microbatch, piece = item
                key = stage * each + (microbatch if piece is None else at[microbatch * n + piece])
                for made, shift, lag in needs[kind][stage]:
                    there = made.get(key + shift, inf) + lag
                    if there > now:
                        now = there
                if others and item in others:
                    now = max(now, after_others(item))
            # An input does not exist yet: leave the rank until the producer of the input wakes it.
            if now == inf:
                break
            clock.order.append((rank, i))
            starts.append(now)
            lanes[lane] = now = now + length(step)
            ends.append(now)
            for item in step:
                kind, stage, microbatch, piece = item
                key = stage * each + (microbatch if piece is None else at[microbatch * n + piece])
                for made, waiting in makes[kind][stage]:
                    made[key] = now
                    ready[waiting] = None
                if others:
                    done[item] = now
                    ready.update(dict.fromkeys(waiters.get(item, ())))
        del ready[rank]
    stuck = [(r, len(clock.end[r])) for r in range(len(rows)) if len(clock.end[r]) < len(rows[r])]
    if stuck:
        waits = "".join(_waits(schedule, clock, stuck))
        raise ScheduleError(f"{schedule.name} cannot proceed:{waits}")
    return clock


_LANES = tuple(Lane)
_COMPUTE = _LANES.index(Lane.COMPUTE)  # 0
_POSTED = {kind for kind in Kind if kind.traits.posted}
_Arrival = tuple[dict[int, float], int, float]
"""(times of a result by key, shift of the key, time of its message), see `_places` for the key."""


def _places(schedule: Schedule) -> tuple[list[int], int]:
    """Return (index of each slice of microbatch 0, then of 1 and so on; number of indices).

    The clock stores a result of a stage under the key stage * number of indices + index. An unused
    index follows each document, so that no slice finds a neighbour in another document. If
    microbatches are not cut, the list is empty, and a microbatch's own number is its index.
    """
    # Two microbatches of three slices, where slices 0 and 1 are a document. Dots are empty places.
    #
    #     slice  0.0  0.1   .   0.2   .   1.0  1.1   .   1.2   .
    #     place   0    1    2    3    4    5    6    7    8    9
    at: list[int] = []
    end = 0
    for microbatch, piece in product(range(schedule.all_microbatches), range(len(schedule.cuts))):
        at.append(end)
        end += 1
        if piece == schedule.document(Pass(Kind.F, 0, microbatch, piece))[-1]:
            end += 1
    return at, end or schedule.all_microbatches


class _Wires(NamedTuple):
    """The dependencies of a table, prepared for the clock's inner loop.

    Attributes:
        lane_of: {kind of pass: index of the stream on which it runs}.
        needs: needs[kind][stage] lists the results of the same microbatch that a pass waits for.
        makes: makes[kind][stage] lists the results of a pass: (dict to which the clock adds the
            time when it is there, the rank that may wait for it).
        others: {pass: [(pass of another microbatch that it waits for, time of the message)]}.
        waiters: {pass in a value of `others`: the ranks that may wait for it}.
    """

    lane_of: dict[Kind, int]
    needs: dict[Kind, list[list[_Arrival]]]
    makes: dict[Kind, list[list[tuple[dict[int, float], int]]]]
    others: dict[Pass, list[tuple[Pass, float]]]
    waiters: dict[Pass, set[int]]


def _wire(schedule: Schedule, costs: Costs) -> _Wires:
    place = schedule.placement
    at, m = _places(schedule)
    tables: dict[Made, dict[int, float]] = {made: {} for made in Made}
    needs: dict[Kind, list[list[_Arrival]]] = {}
    # The rank that may wait for a result: another rank than its own, if there is one.
    waits: dict[tuple[Made, int], int] = {}
    beyond = bool(schedule.shared)
    for kind, rows in schedule.needs.items():
        needs[kind] = [[] for _ in place.rank_of]
        within = [need for need in rows if not is_beyond(kind, need)]
        beyond = beyond or len(within) < len(rows)
        # One integer is the key of a result, so another stage or slice is a constant shift and the
        # inner loop builds no tuple. Neighbouring stages differ by m, slices by 1.
        for need, (stage, rank) in product(within, enumerate(place.rank_of)):
            aside = _ASIDE.get(need.where, 0)
            for other in place.needed(stage, need):
                src = place.rank_of[other]
                lag = costs.lag(src, rank, place.num_ranks)
                needs[kind][stage].append((tables[need.made], (other - stage) * m + aside, lag))
                # The rank itself also reads its results, but it is awake when it makes them.
                if rank != src or (need.made, other) not in waits:
                    waits[need.made, other] = rank
    # The first slice of a document needs nothing before it, the last nothing after it. So results
    # at the empty places have been there since time 0.
    used = {stage * m + slot for stage in range(place.num_stages) for slot in at}
    gaps = [-1, *{*range(place.num_stages * m)} - used]
    for rows in schedule.needs.values():
        for need in rows:
            if need.where in _ASIDE:
                tables[need.made].update(dict.fromkeys(gaps, 0.0))
    makes: dict[Kind, list[list[tuple[dict[int, float], int]]]] = {}
    for kind in schedule.kinds:
        makes[kind] = []
        for stage in range(place.num_stages):
            waited = [made for made in kind.traits.makes if (made, stage) in waits]
            makes[kind].append([(tables[made], waits[made, stage]) for made in waited])
    others: dict[Pass, list[tuple[Pass, float]]] = {}
    waiters: dict[Pass, set[int]] = {}
    if beyond:
        for item, wanted in beyond_microbatch(schedule).items():
            others[item] = [(maker, _travels(maker, item, place, costs)) for maker in wanted]
            for maker in wanted:
                waiters.setdefault(maker, set()).add(place.rank_of[item.stage])
    lane_of = {kind: _LANES.index(kind.traits.lane) for kind in schedule.kinds}
    return _Wires(lane_of, needs, makes, others, waiters)


def _travels(maker: Pass, item: Pass, place: Placement, costs: Costs) -> float:
    """Return the time from the end of the pass `maker` to the earliest start of the pass `item`."""
    # Two copies that follow each other on a shared stream exchange no message.
    if maker.kind.traits.lane is item.kind.traits.lane in COPIES:
        return 0.0
    return costs.lag(place.rank_of[maker.stage], place.rank_of[item.stage], place.num_ranks)


_ASIDE = {Where.EARLIER: -1, Where.LATER: 1}


@lru_cache(maxsize=8)  # a search simulates many tables under the same costs
def _lengths(
    costs: Costs, place: Placement, cuts: tuple[float, ...], documents: tuple[tuple[int, ...], ...]
) -> Callable[[Step], float]:
    """Return a function from a step to its duration.

    Args:
        cuts: lengths of the slices of a microbatch; () if microbatches are not cut.
        documents: slices that begin a document, as in `Schedule.documents`.
    """
    # An empty table, which only answers how its microbatches are cut.
    like = Schedule("", place, len(documents) or 1, (), cuts=cuts, documents=documents)
    parts = (*like.parts, None)
    duration = {part: costs.of_slice(cuts, part).durations(place) for part in parts}
    whole = duration[None]
    pairs: dict[tuple[object, ...], float] = {}

    def length(step: Step) -> float:
        kind, stage, _, piece = step[0]
        if len(step) == 1:
            if piece is None:
                return whole[kind][stage]
            return duration[like.part(step[0])][kind][stage]
        key = tuple((x.kind, x.stage, like.part(x)) for x in step)
        if key not in pairs:
            pairs[key] = costs.of_step(step, place, like)
        return pairs[key]

    return length


def _waits(schedule: Schedule, clock: SimulatedTimes, waiting: list[tuple[int, int]]) -> list[str]:
    """Return a line for each pass that a deadlocked rank waits for.

    Args:
        waiting: (rank, index of its first step that could not run) of each deadlocked rank.
    """
    needs = Dependencies(schedule)
    # A rank ran its row up to where it is stuck. What it never reached is what others wait for.
    done = set()
    for row, ends in zip(schedule.ranks, clock.end, strict=True):
        done |= {item for step in row[: len(ends)] for item in step}
    lines = []
    for rank, i in waiting:
        for item in schedule.ranks[rank][i]:
            missing = [need for need in needs.of(item) if need not in done]
            lines += [f"\n  rank {rank} waits at step {i}, {item}, for {need}" for need in missing]
    return lines
