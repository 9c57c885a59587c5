"""A table with passes put beside its rows: a play in which each rank takes what is due there before its row goes on.

Passes of the vocabulary's shares and of multi-token prediction come in so. Whatever the rows say stays in order.
"""

from __future__ import annotations

from bisect import insort
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from heapq import heappop, heappush
from itertools import count
from math import inf
from typing import Self

from megapipe.schedule.costs import Costs
from megapipe.schedule.dependencies import Dependencies
from megapipe.schedule.kinds import Kind
from megapipe.schedule.passes import Pass, Schedule, Step, unpaired
from megapipe.schedule.simulate import Timeline, simulate

AHEAD = 2
"""Microbatches that lookups are ahead of the first stage of a chain."""
FIRST = Kind.C, Kind.EW, Kind.B, Kind.BW, Kind.S, Kind.F
"""Kinds beside a row that run before it goes on, in this order: they are short, or other ranks wait for them."""
LATER = Kind.T, Kind.W
"""Kinds that run where a rank waits otherwise, or has too many of them."""


def merged(
    table: Schedule, beside: Sequence[Pass], costs: Costs, room: Sequence[float]
) -> Schedule:
    """The table with passes that stand beside its rows.

    Forwards keep their order, backwards with their weight passes too, but these stand up to a microbatch later between
    those: while others are busy with what is beside, a rank goes on with the next forward, and where that is not there
    yet a backward goes first. Of the delays and numbers of late passes that may wait, the best by the clock of `costs`.

    Args:
        room: what each rank may hold of activations, what the shares of the vocabulary hold left out; more if the order
            of the rows asks for it.
    """
    best: tuple[float, Schedule] | None = None
    for delay in range(1 + -(-table.placement.num_stages // table.placement.num_ranks)):
        # Few trials decide what no rule does: how many forwards a backward may overtake, how many T may wait.
        for waiting in (1, 2, 3):
            rows = _Merge(unpaired(table) if delay else table, beside, costs, delay, waiting).run()
            if rows is None:
                continue
            found = replace(table, ranks=rows)
            time = simulate(found, costs)
            fits = all(
                now <= most * (1 + 1e-9)
                for now, most in zip(activation(found, costs, time), room, strict=True)
            )
            if (best is None or time.makespan < best[0] * (1 - 1e-9)) and (fits or not delay):
                best = time.makespan, found
    assert best is not None, "the order of the table itself can always be kept"
    return best[1]


def activation(schedule: Schedule, costs: Costs, time: Timeline) -> tuple[float, ...]:
    """Most activation of layers that each rank holds, what the shares of the vocabulary hold left out."""
    return time.peak if not costs.mem_s else simulate(schedule, replace(costs, mem_s=0.0)).peak


@dataclass
class _Rank:
    """One rank while its row is merged.

    Attributes:
        forwards, others: what is left of the row; others with the number of forwards behind them there.
        lookups: those done, by chain.
        due: what is due beside the row, in the order in which it became so.
    """

    forwards: deque[Step]
    others: deque[tuple[int, Step]]
    free: float = 0.0
    lookups: Counter[int] = field(default_factory=Counter)
    due: dict[Kind, list[tuple[float, int, Pass]]] = field(
        default_factory=lambda: {kind: [] for kind in Kind}
    )
    out: list[Step] = field(default_factory=list)

    @classmethod
    def of(cls, row: tuple[Step, ...]) -> Self:
        left = [len(step) == 1 and step[0].kind.is_forward for step in row]
        others = deque((sum(left[i:]), step) for i, step in enumerate(row) if not left[i])
        return cls(deque(step for i, step in enumerate(row) if left[i]), others)

    def next(self, delay: int) -> list[Step]:
        """Steps of the row that may come next, the first choice first."""
        forward = [self.forwards[0]] if self.forwards else []
        left, other = self.others[0] if self.others else (-1, ())
        if left < len(self.forwards):
            return forward
        return [*forward, other] if left < len(self.forwards) + delay else [other]

    def take(self, step: Step) -> None:
        """Take the step off the row."""
        (self.forwards if self.forwards and self.forwards[0] is step else self.others).popleft()


class _Merge:
    """A play of the table in which each rank takes what is due: FIRST before the row, LATER where it waits."""

    def __init__(
        self, schedule: Schedule, beside: Sequence[Pass], costs: Costs, delay: int, waiting: int
    ) -> None:
        self.place, self.costs, self.delay, self.waiting = schedule.placement, costs, delay, waiting
        self.ranks = [_Rank.of(row) for row in schedule.ranks]
        self.length = costs.durations(self.place)
        self.pairs = {
            step: costs.of_step(step, self.place) for step in schedule.steps() if len(step) > 1
        }
        orders = _first_forwards(schedule)
        self.lookups = [
            [[Pass(Kind.E, s, x.microbatch) for x in order
              for s in self.place.shares(x.stage) if self.place.rank_of[s] == rank] for order in orders]
            for rank in range(len(self.ranks))
        ]  # fmt: skip
        self.begun, self.turns = Counter[int](), count()
        self.beside = {
            x for x in beside if x.kind is not Kind.E
        }  # lookups have an order of their own
        full = replace(schedule, ranks=(*schedule.ranks, tuple((x,) for x in beside)))
        needs = Dependencies(full)
        self.needs = {x: needs.of(x) for x in full.passes()}
        self.lacks = {x: len(wanted) for x, wanted in self.needs.items()}
        self.takers: dict[Pass, list[Pass]] = {}
        for x, wanted in self.needs.items():
            for maker in wanted:
                self.takers.setdefault(maker, []).append(x)
        self.arrival = dict.fromkeys(self.needs, 0.0)
        self.events = [(0.0, rank) for rank in range(len(self.ranks))]

    def run(self) -> tuple[tuple[Step, ...], ...] | None:
        """Rows with all passes, None if the order of the row cannot be kept."""
        while self.events:
            now, number = heappop(self.events)
            rank = self.ranks[number]
            while rank.free <= now and (step := self._next(number, rank, now)) is not None:
                self._do(number, rank, step, now)
        stuck = any(
            self.lacks.values()
        )  # what is left of a row begins with a pass that lacks something
        return None if stuck else tuple(tuple(rank.out) for rank in self.ranks)

    def _next(self, number: int, rank: _Rank, now: float) -> Step | None:
        for chain, own in sorted(
            enumerate(self.lookups[number]), key=lambda pair: rank.lookups[pair[0]]
        ):
            if rank.lookups[chain] < min(len(own), self.begun[chain] + AHEAD):
                rank.lookups[chain] += 1
                return (own[rank.lookups[chain] - 1],)
        for kind in FIRST:
            if rank.due[kind] and rank.due[kind][0][0] <= now:
                return (rank.due[kind].pop(0)[-1],)
        waits = min((rank.due[kind] for kind in LATER if rank.due[kind]), default=[])
        ready = waits and waits[0][0] <= now
        if not (ready and len(waits) > self.waiting):
            for step in rank.next(self.delay):
                comes = max(
                    [
                        inf if self.lacks[x] and self._open(x, step) else self.arrival[x]
                        for x in step
                    ]
                )
                if comes <= now:
                    rank.take(step)
                    return step
                # Half its time: a pass of the row that comes that soon is waited for, else this one would hold it up.
                if ready and comes < now + self.length[waits[0][-1].kind][waits[0][-1].stage] / 2:
                    return None
        return (waits.pop(0)[-1],) if ready else None

    def _open(self, item: Pass, step: Step) -> bool:
        """Does it lack more than what stands in its own step?"""
        return self.lacks[item] > sum(x in self.needs[item] for x in step)

    def _do(self, number: int, rank: _Rank, step: Step, now: float) -> None:
        length = self.pairs[step] if len(step) > 1 else self.length[step[0].kind][step[0].stage]
        rank.out.append(step)
        rank.free = now + length
        heappush(self.events, (rank.free, number))
        for item in step:
            if item.kind.is_forward and self.place.is_first(item.stage):
                self.begun[item.stage // self.place.chain] += 1
                for other in range(len(self.ranks)):
                    # Every rank looks up the microbatch that begins here: each is to see at once that it may.
                    heappush(self.events, (now, other))
            for taker in self.takers.get(item, ()):
                there = self.place.rank_of[taker.stage]
                comes = rank.free + self.costs.lag(number, there, len(self.ranks))
                self.arrival[taker] = max(self.arrival[taker], comes)
                self.lacks[taker] -= 1
                if not self.lacks[taker]:
                    if taker in self.beside:
                        # What is ready at once stands as its needs were done: depths read in the order of the loss.
                        turn = 0 if taker.kind.traits.at else next(self.turns)
                        insort(
                            self.ranks[there].due[taker.kind], (self.arrival[taker], turn, taker)
                        )
                    heappush(self.events, (self.arrival[taker], there))


def _first_forwards(schedule: Schedule) -> list[list[Pass]]:
    """The first forwards of each chain, in their order."""
    passes = [x for x in schedule.passes() if x.kind.is_forward]
    firsts = range(0, schedule.placement.num_stages, schedule.placement.chain)
    return [[x for x in passes if x.stage == first] for first in firsts]
