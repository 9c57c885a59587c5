"""The clock: when every pass runs, what each rank holds, what it waits for.

Every step starts as soon as its rank has finished the step before and every input has arrived. This one clock judges a
schedule (`simulate`), finds what blocks it (`verify`) and orders its messages (`lower`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

from megapipe.schedule.costs import UNIT, Costs
from megapipe.schedule.passes import Kind, Pass, Schedule, ScheduleError

__all__ = ["Clock", "Costs", "Timeline", "run_clock", "simulate"]


@dataclass(frozen=True)
class Timeline:
    """What a schedule does under given costs. Times and memory are in the units of the costs.

    Attributes:
        start, end: of every pass; both passes of an overlapped pair have the pair's.
        busy: time each rank computes.
        span: each rank's time from its first start to its last end.
        curves: for each rank (time, activation held from then on), in order of time.
        sent: tensors each rank sends to another rank.
        parameters: each rank's parameters in device shares (1/P of the model each).
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
        """Longest span: the time of an iteration when iterations follow each other without a barrier."""
        return max(self.span)

    @property
    def bubble(self) -> float:
        """The papers' bubble: the most any rank waits between its first and its last pass."""
        return max(span - busy for span, busy in zip(self.span, self.busy, strict=True))

    @property
    def idle(self) -> tuple[float, ...]:
        """Time each rank does not compute, until the last rank is done."""
        return tuple(self.makespan - busy for busy in self.busy)

    @cached_property
    def peak(self) -> tuple[float, ...]:
        """Most activation each rank holds at once."""
        return tuple(max((held for _, held in curve), default=0.0) for curve in self.curves)


@dataclass(frozen=True)
class Clock:
    """Start and end of every step, [rank][step], and one order of all (rank, step) in which each follows its inputs."""

    start: list[list[float]]
    end: list[list[float]]
    order: list[tuple[int, int]]


def simulate(schedule: Schedule, costs: Costs = UNIT) -> Timeline:
    """Play a schedule under costs.

    Raises: ScheduleError if ranks wait for each other for ever, saying which rank waits where and for what.
    """
    clock = run_clock(schedule, costs)
    place = schedule.placement
    start: dict[Pass, float] = {}
    end: dict[Pass, float] = {}
    sent = [0] * len(schedule.ranks)
    for rank, steps in enumerate(schedule.ranks):
        for step, begin, finish in zip(steps, clock.start[rank], clock.end[rank], strict=True):
            for item in step:
                start[item], end[item] = begin, finish
                consumer = place.consumer(item)
                sent[rank] += consumer is not None and place.rank_of[consumer] != rank
    ends = [(s[0], e[-1]) if s else (0.0, 0.0) for s, e in zip(clock.start, clock.end, strict=True)]
    return Timeline(
        start,
        end,
        busy=tuple(sum(e - s for s, e in zip(*both, strict=True)) for both in zip(clock.start, clock.end, strict=True)),
        span=tuple(last - first for first, last in ends),
        makespan=max(last for _, last in ends),
        curves=_curves(schedule, costs, clock),
        sent=tuple(sent),
        parameters=tuple(len(place.stages_on(r)) * place.num_ranks / place.chain for r in range(place.num_ranks)),
    )


def run_clock(schedule: Schedule, costs: Costs = UNIT) -> Clock:
    """Start and end of every step. Linear in the number of passes."""
    place, m, rows = schedule.placement, schedule.num_microbatches, schedule.ranks
    duration = costs.durations(place)
    rank_of, stages = place.rank_of, range(place.num_stages)
    # A pass's result is known by stage * m + microbatch; its neighbours' results lie m before and m behind.
    into = [place.consumer(Pass(Kind.F, s, 0)) for s in stages]
    first, last = [place.is_first(s) for s in stages], [place.is_last(s) for s in stages]
    lag = [costs.comm if rank_of[a] != rank_of[b] else 0.0 for a, b in pairwise(stages)]
    from_prev, from_next = [0.0, *lag], [*lag, 0.0]
    forward: dict[int, float] = {}
    backward: dict[int, float] = {}
    clock = Clock([[] for _ in rows], [[] for _ in rows], [])
    ready, blocked = list(reversed(range(len(rows)))), [False] * len(rows)
    while ready:
        rank = ready.pop()
        blocked[rank] = False
        steps, starts, ends = rows[rank], clock.start[rank], clock.end[rank]
        now = ends[-1] if ends else 0.0
        while len(ends) < len(steps):
            step = steps[len(ends)]
            length = 0.0
            for kind, stage, microbatch in step:
                key = stage * m + microbatch
                arrival: float | None = 0.0
                if kind is Kind.F:
                    if not first[stage]:
                        arrival = forward.get(key - m)
                        lag_in = from_prev[stage]
                    else:
                        lag_in = 0.0
                elif kind is Kind.W:
                    arrival, lag_in = backward.get(key), 0.0
                else:
                    arrival, lag_in = forward.get(key), 0.0
                    if arrival is not None and not last[stage]:
                        arrival, lag_in = backward.get(key + m), from_next[stage]
                if arrival is None:
                    break
                now = max(now, arrival + lag_in)
                length += duration[kind][stage]
            else:
                if len(step) > 1:
                    length -= costs.saved(step, place)
                clock.order.append((rank, len(ends)))
                starts.append(now)
                now += length
                ends.append(now)
                for kind, stage, microbatch in step:
                    if kind is Kind.W:
                        continue
                    if kind is Kind.F:
                        forward[stage * m + microbatch] = now
                        consumer = into[stage]
                    else:
                        backward[stage * m + microbatch] = now
                        consumer = None if first[stage] else stage - 1
                    if consumer is not None and blocked[rank_of[consumer]]:
                        blocked[rank_of[consumer]] = False
                        ready.append(rank_of[consumer])
                continue
            blocked[rank] = True
            break
    waiting = [(r, len(clock.end[r])) for r in range(len(rows)) if len(clock.end[r]) < len(rows[r])]
    if waiting:
        raise ScheduleError(f"{schedule.name} cannot proceed:" + "".join(_waits(schedule, clock, waiting)))
    return clock


def _waits(schedule: Schedule, clock: Clock, waiting: list[tuple[int, int]]) -> list[str]:
    """One line for each rank that is stuck: where, and for which pass."""
    fused = {(x.stage, x.microbatch) for row in schedule.ranks for step in row for x in step if x.kind is Kind.BW}
    done = {x for rank, row in enumerate(schedule.ranks) for step in row[: len(clock.end[rank])] for x in step}

    def inputs(item: Pass) -> list[Pass]:
        kind, stage, microbatch = item
        place = schedule.placement
        if kind is Kind.F:
            before = place.prev(stage)
            return [] if before is None else [Pass(Kind.F, before, microbatch)]
        if kind is Kind.W:
            return [Pass(Kind.B, stage, microbatch)]
        after = place.next(stage)
        own = [Pass(Kind.F, stage, microbatch)]
        if after is None:
            return own
        return [*own, Pass(Kind.BW if (after, microbatch) in fused else Kind.B, after, microbatch)]

    lines = []
    for rank, i in waiting:
        missing = [(item, need) for item in schedule.ranks[rank][i] for need in inputs(item) if need not in done]
        lines += [f"\n  rank {rank} waits at step {i}, {item}, for {need}" for item, need in missing]
    return lines


def _curves(schedule: Schedule, costs: Costs, clock: Clock) -> tuple[tuple[tuple[float, float], ...], ...]:
    hold, keep = costs.memory(schedule.placement)
    curves = []
    for rank, steps in enumerate(schedule.ranks):
        held, curve = 0.0, []
        for step, start, end in zip(steps, clock.start[rank], clock.end[rank], strict=True):
            for kind, stage, _ in step:
                if kind is Kind.F:
                    held += hold[stage]
                    curve.append((start, held))
            for kind, stage, _ in step:
                if kind is not Kind.F:
                    held -= {Kind.B: hold[stage] - keep[stage], Kind.W: keep[stage], Kind.BW: hold[stage]}[kind]
                    curve.append((end, held))
        curves.append(tuple(curve))
    return tuple(curves)
