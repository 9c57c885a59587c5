"""The clock: when every pass runs, what each rank holds, what it waits for.

Every step starts as soon as its rank has finished the step before and every input has arrived. This one clock judges a
schedule (`simulate`), finds what blocks it (`verify`) and orders its messages (`lower`).
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
from megapipe.schedule.dependencies import Dependencies, is_beyond
from megapipe.schedule.kinds import COPIES, Kind, Lane, Made, Where
from megapipe.schedule.memory.held import memory_steps as memory_steps
from megapipe.schedule.passes import Pass, Placement, Schedule, Step


@dataclass(frozen=True)
class Timeline:
    """The course of a schedule under given costs. Times and memory are in the units of the costs.

    Attributes:
        start, end: of every pass; both passes of an overlapped pair have the pair's.
        busy: time each rank computes; what runs on other lanes does not count.
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
        return max(map(_left, self.span, self.busy))

    @property
    def idle(self) -> tuple[float, ...]:
        """Time each rank does not compute, until the last rank is done."""
        return tuple(_left(self.makespan, busy) for busy in self.busy)

    @cached_property
    def peak(self) -> tuple[float, ...]:
        """Most activation each rank holds at once."""
        return tuple(max((held for _, held in curve), default=0.0) for curve in self.curves)

    def __repr__(self) -> str:
        peaks = " ".join(f"{held:g}" for held in self.peak)
        return f"Timeline(makespan {self.makespan:g}, bubble {self.bubble:g}, peak by rank {peaks})"


def _left(time: float, busy: float) -> float:
    """Return what is left of a time: none if the two differ by no more than the rounding of their sums."""
    return time - busy if time - busy > 1e-9 * time else 0.0


@dataclass(frozen=True)
class Clock:
    """Start and end of every step, [rank][step], and one order of all (rank, step) in which each follows its inputs."""

    start: list[list[float]]
    end: list[list[float]]
    order: list[tuple[int, int]]


@contextmanager
def uncollected() -> Iterator[None]:
    """Pause the search for cycles: none of a table's small tuples is in one, and it takes two fifths of the time."""
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()


@uncollected()
def simulate(schedule: Schedule, costs: Costs = UNIT, took: Mapping[Pass, float] | None = None) -> Timeline:
    """Play a schedule under costs.

    Args:
        took: what single passes take, overhead included, in place of what the costs say of their kind.
    Raises: ScheduleError if ranks wait for each other for ever, saying which rank waits where and for what.
        TypeError for a name in place of a schedule, or numbers in place of costs.
    """
    if not isinstance(schedule, Schedule):
        raise TypeError(f'simulate takes a Schedule, such as build("zb-v", 4, 8), not {schedule!r}')
    if not isinstance(costs, Costs):
        raise TypeError(f"simulate takes Costs, such as Costs(f=10, b=11, w=8), not {costs!r}")
    clock = run_clock(schedule, costs, took)
    place, links = schedule.placement, schedule.links
    start: dict[Pass, float] = {}
    end: dict[Pass, float] = {}
    sent = [0] * len(schedule.ranks)
    for rank, steps in enumerate(schedule.ranks):
        for step, begin, finish in zip(steps, clock.start[rank], clock.end[rank], strict=True):
            for item in step:
                start[item], end[item] = begin, finish
                sent[rank] += len(links[item[:2]].sends)
    ends = [(min(s), max(e)) if s else (0.0, 0.0) for s, e in zip(clock.start, clock.end, strict=True)]
    return Timeline(
        start,
        end,
        busy=tuple(
            sum([e - s for step, s, e in zip(*row, strict=True) if step[0].kind.traits.lane is Lane.COMPUTE])
            for row in zip(schedule.ranks, clock.start, clock.end, strict=True)
        ),
        span=tuple(last - first for first, last in ends),
        makespan=max(last for _, last in ends),
        curves=tuple(tuple(x[:2] for x in curve) for curve in memory_steps(schedule, costs, clock)),
        sent=tuple(sent),
        parameters=tuple(len(place.stages_on(r)) * place.num_ranks / place.chain for r in range(place.num_ranks)),
    )


def run_clock(schedule: Schedule, costs: Costs = UNIT, took: Mapping[Pass, float] | None = None) -> Clock:
    """Start and end of every step, in time linear in the number of passes. took: as in `simulate`."""
    rows, n, (at, each) = schedule.ranks, len(schedule.cuts), _places(schedule)
    lane_of, needs, makes, others, waiters = _wire(schedule, costs)
    by_kind = _lengths(costs, schedule.placement, schedule.cuts, schedule.documents)
    length = by_kind if took is None else lambda step: took[step[0]] if step[0] in took else by_kind(step)
    done: dict[Pass, float] = {}

    def after_others(item: Pass) -> float:
        return max([done.get(x, inf) + lag for x, lag in others[item]])

    clock = Clock([[] for _ in rows], [[] for _ in rows], [])
    free = [[0.0] * len(_LANES) for _ in rows]
    # A dict as an ordered set: a rank that is woken twice is looked at once, the one that was woken last first.
    ready = dict.fromkeys(reversed(range(len(rows))))  # ranks that may go on, the last one first
    while ready:
        rank = next(reversed(ready))
        steps, starts, ends, lanes = rows[rank], clock.start[rank], clock.end[rank], free[rank]
        for i in range(len(ends), len(steps)):
            step = steps[i]
            lane = lane_of[step[0][0]]
            # Inlined, with local names: this loop runs once for each pass of each table that a search tries.
            now = lanes[lane]
            if lane and step[0][0] in _POSTED:  # it begins where it stands in the row
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
            # Not made yet: the rank leaves the loop, and whoever makes it wakes the rank.
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
        raise ScheduleError(f"{schedule.name} cannot proceed:" + "".join(_waits(schedule, clock, stuck)))
    return clock


_LANES = tuple(Lane)
_COMPUTE = _LANES.index(Lane.COMPUTE)  # 0
_POSTED = {kind for kind in Kind if kind.traits.posted}
_Arrival = tuple[dict[int, float], int, float]
"""The place of a result's time: by stage * microbatches + microbatch, shifted; and how long it travels."""


def _places(schedule: Schedule) -> tuple[list[int], int]:
    """Places of all slices of all microbatches among those times, with a gap behind each document; and how many there
    are, gaps included. Of whole microbatches none are listed: each has its own number."""
    at, end = list[int](), 0
    for microbatch, piece in product(range(schedule.all_microbatches), range(len(schedule.cuts))):
        at.append(end)
        end += 2 if piece == schedule.document(Pass(Kind.F, 0, microbatch, piece))[-1] else 1
    return at, end or schedule.all_microbatches


class _Wires(NamedTuple):
    """The kinds of a table for the clock. `needs` and `makes` by kind and stage, within one microbatch; `others`, of
    each pass, what it needs beyond, and `waiters`, of each of those, the ranks that may wait for it."""

    lane_of: dict[Kind, int]
    needs: dict[Kind, list[list[_Arrival]]]
    makes: dict[Kind, list[list[tuple[dict[int, float], int]]]]
    others: dict[Pass, list[tuple[Pass, float]]]
    waiters: dict[Pass, set[int]]


def _wire(schedule: Schedule, costs: Costs) -> _Wires:
    place, (at, m) = schedule.placement, _places(schedule)
    tables: dict[Made, dict[int, float]] = {made: {} for made in Made}
    needs: dict[Kind, list[list[_Arrival]]] = {}
    waits: dict[tuple[Made, int], int] = {}  # the rank that may wait for it, its own if no other does
    beyond = bool(schedule.shared)
    for kind, rows in schedule.needs.items():
        needs[kind] = [[] for _ in place.rank_of]
        within = [need for need in rows if not is_beyond(kind, need)]
        beyond = beyond or len(within) < len(rows)
        # Results are found by one number, so that a need of another stage is a shift: no tuple is made for a lookup.
        for need, (stage, rank) in product(within, enumerate(place.rank_of)):
            aside = _ASIDE.get(need.where, 0)
            for other in place.needed(stage, need):  # neighbours lie m apart
                src = place.rank_of[other]
                needs[kind][stage].append(
                    (tables[need.made], (other - stage) * m + aside, costs.lag(src, rank, place.num_ranks))
                )
                if rank != src or (need.made, other) not in waits:
                    waits[need.made, other] = rank
    # Nothing is before the first slice of a document and behind the last: it was always there.
    gaps = [-1, *({*range(place.num_stages * m)} - {s * m + x for s in range(place.num_stages) for x in at})]
    for made in {need.made for rows in schedule.needs.values() for need in rows if need.where in _ASIDE}:
        tables[made].update(dict.fromkeys(gaps, 0.0))
    makes = {
        kind: [
            [(tables[made], waits[made, s]) for made in kind.traits.makes if (made, s) in waits]
            for s in range(place.num_stages)
        ]
        for kind in schedule.kinds
    }
    beyond_own = Dependencies(schedule).beyond_microbatch() if beyond else {}
    others = {item: [(x, _travels(x, item, place, costs)) for x in wanted] for item, wanted in beyond_own.items()}
    waiters: dict[Pass, set[int]] = {}
    for item, wanted in others.items():
        for maker, _ in wanted:
            waiters.setdefault(maker, set()).add(place.rank_of[item.stage])
    return _Wires({kind: _LANES.index(kind.traits.lane) for kind in schedule.kinds}, needs, makes, others, waiters)


def _travels(maker: Pass, item: Pass, place: Placement, costs: Costs) -> float:
    if maker.kind.traits.lane is item.kind.traits.lane in COPIES:  # before it on a lane that ranks share
        return 0.0
    return costs.lag(place.rank_of[maker.stage], place.rank_of[item.stage], place.num_ranks)


_ASIDE = {Where.EARLIER: -1, Where.LATER: 1}


@lru_cache(maxsize=8)  # a search plays table after table under the same costs
def _lengths(
    costs: Costs, place: Placement, cuts: tuple[float, ...], documents: tuple[tuple[int, ...], ...]
) -> Callable[[Step], float]:
    like = Schedule("", place, len(documents) or 1, (), cuts=cuts, documents=documents)  # cut as the table is
    duration = {part: costs.of_slice(cuts, part).durations(place) for part in (*like.parts, None)}
    whole = duration[None]
    pairs: dict[tuple[object, ...], float] = {}

    def length(step: Step) -> float:
        kind, stage, _, piece = step[0]
        if len(step) == 1:
            return whole[kind][stage] if piece is None else duration[like.part(step[0])][kind][stage]
        key = tuple((x.kind, x.stage, like.part(x)) for x in step)
        if key not in pairs:
            pairs[key] = costs.of_step(step, place, like)
        return pairs[key]

    return length


def _waits(schedule: Schedule, clock: Clock, waiting: list[tuple[int, int]]) -> list[str]:
    """One line for each rank that is stuck: where, and for which pass."""
    needs = Dependencies(schedule)
    done = {x for rank, row in enumerate(schedule.ranks) for step in row[: len(clock.end[rank])] for x in step}
    lines = []
    for rank, i in waiting:
        missing = [(item, need) for item in schedule.ranks[rank][i] for need in needs.of(item) if need not in done]
        lines += [f"\n  rank {rank} waits at step {i}, {item}, for {need}" for item, need in missing]
    return lines
