"""The clock: when every pass runs, what each rank holds, what it waits for.

Every step starts as soon as its rank has finished the step before and every input has arrived. This one clock judges a
schedule (`simulate`), finds what blocks it (`verify`) and orders its messages (`lower`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from math import inf

from megapipe.errors import ScheduleError
from megapipe.schedule.costs import UNIT, Costs
from megapipe.schedule.passes import Kind, Pass, Schedule, Step

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
        curves=memory_curves(schedule, costs, clock),
        sent=tuple(sent),
        parameters=tuple(len(place.stages_on(r)) * place.num_ranks / place.chain for r in range(place.num_ranks)),
    )


def run_clock(schedule: Schedule, costs: Costs = UNIT) -> Clock:
    """Start and end of every step, in time linear in the number of passes."""
    place, m, rows = schedule.placement, schedule.num_microbatches, schedule.ranks
    rank_of = place.rank_of
    first, last = ([ends(s) for s in range(place.num_stages)] for ends in (place.is_first, place.is_last))
    lag = [costs.comm if a != b else 0.0 for a, b in pairwise(rank_of)]
    duration = costs.durations(place)
    pairs: dict[tuple[Kind | int, ...], float] = {}
    # When the output of an F and the gradient of a B are there, by stage * m + microbatch: neighbours lie m apart.
    forward: dict[int, float] = {}
    backward: dict[int, float] = {}

    def arrival(kind: Kind, stage: int, microbatch: int) -> float:
        key = stage * m + microbatch
        if kind is Kind.F:
            return 0.0 if first[stage] else forward.get(key - m, inf) + lag[stage - 1]
        if kind is Kind.W:
            return backward.get(key, inf)
        own = forward.get(key, inf)
        return own if last[stage] else max(own, backward.get(key + m, inf) + lag[stage])

    def length(step: Step) -> float:
        kind, stage, _ = step[0]
        if len(step) == 1:
            return duration[kind][stage]
        key = (kind, stage, step[1].kind, step[1].stage)
        if key not in pairs:
            pairs[key] = costs.of_step(step, place)
        return pairs[key]

    clock = Clock([[] for _ in rows], [[] for _ in rows], [])
    ready, is_ready = list(reversed(range(len(rows)))), [True] * len(rows)
    while ready:
        rank = ready.pop()
        is_ready[rank] = False
        steps, starts, ends = rows[rank], clock.start[rank], clock.end[rank]
        now = ends[-1] if ends else 0.0
        for i in range(len(ends), len(steps)):
            step = steps[i]
            now = max(now, max([arrival(*item) for item in step]))
            if now == inf:
                break
            clock.order.append((rank, i))
            starts.append(now)
            now += length(step)
            ends.append(now)
            for kind, stage, microbatch in step:
                if kind is Kind.W:
                    continue
                is_forward = kind is Kind.F
                (forward if is_forward else backward)[stage * m + microbatch] = now
                if not (last if is_forward else first)[stage]:
                    waiting = rank_of[stage + 1 if is_forward else stage - 1]
                    if not is_ready[waiting] and waiting != rank:
                        is_ready[waiting] = True
                        ready.append(waiting)
    stuck = [(r, len(clock.end[r])) for r in range(len(rows)) if len(clock.end[r]) < len(rows[r])]
    if stuck:
        raise ScheduleError(f"{schedule.name} cannot proceed:" + "".join(_waits(schedule, clock, stuck)))
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


def memory_curves(schedule: Schedule, costs: Costs, clock: Clock) -> tuple[tuple[tuple[float, float], ...], ...]:
    """For each rank (time, activation held from then on), in order of time."""
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
