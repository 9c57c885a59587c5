"""Embedding and head shared by all ranks of the pipeline, as passes of any table (Yeung et al. 2024, arXiv 2411.05288).

Per microbatch every rank looks up its rows (E), whose sum is the first stage's input; the last hidden states reach all
ranks, each makes its part of the softmax and of the input gradient (S), and the last stage combines them (C), after
which the gradients of the rows wait like W (T, EW). One barrier: B of the last stage follows C.
"""

from __future__ import annotations

from bisect import insort
from collections import Counter, deque
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from heapq import heappop, heappush
from math import inf
from typing import Self

from megapipe.errors import ScheduleError
from megapipe.schedule.costs import UNIT, Costs
from megapipe.schedule.dependencies import Dependencies
from megapipe.schedule.kinds import Kind
from megapipe.schedule.passes import Pass, Schedule, Step, unpaired
from megapipe.schedule.simulate import Timeline, simulate

AHEAD = 2
"""Microbatches that lookups are ahead of the first stage of a chain."""


def with_vocabulary(schedule: Schedule, costs: Costs = UNIT) -> Schedule:
    """The table of one step with the passes of the vocabulary's shares.

    Forwards keep their order, backwards with their weight passes too, but these stand up to a microbatch later between
    those: while ranks are busy with S, the last stage goes on with the next forward, and where that is not there yet a
    backward goes first. Of the delays and numbers of T that may wait, the best by the clock of `costs`, with at most
    one microbatch more activation on any rank.

    Raises: ScheduleError for a table that has such passes, or passes of a stage as a whole, or a rank without a stage
        in each chain.
    """
    place = replace(schedule.placement, vocabulary=True)
    if schedule.placement.vocabulary or schedule.cuts or any(kind.traits.per_stage for kind in schedule.kinds):
        raise ScheduleError(
            f"{schedule.name}: vocabulary passes are put into a table of F, B, W and BW of whole microbatches alone."
        )
    if any(len(place.shares(first)) < place.num_ranks for first in range(0, place.num_stages, place.chain)):
        raise ScheduleError(
            f"{schedule.name}: to share the vocabulary every rank must have a stage of each chain. "
            "Leave out --vocab-parallel-pipeline or take another schedule."
        )
    before, plain = simulate(schedule, costs), replace(schedule, placement=place)
    held = costs.memory(place)[0]
    room = [peak + sum(held[s] for s in place.stages_on(r)) for r, peak in enumerate(before.peak)]
    best: tuple[float, Schedule] | None = None
    for delay in range(1 + -(-place.num_stages // place.num_ranks)):
        # Few trials decide what no rule does: how many forwards a backward may overtake, how many T may wait.
        for waiting in (1, 2, 3):
            merged = _Merge(unpaired(plain) if delay else plain, costs, delay, waiting).run()
            if merged is None:
                continue
            table = replace(plain, ranks=merged)
            time = simulate(table, costs)
            fits = all(now <= most * (1 + 1e-9) for now, most in zip(activation(table, costs, time), room, strict=True))
            if (best is None or time.makespan < best[0] * (1 - 1e-9)) and (fits or not delay):
                best = time.makespan, table
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
    due: dict[Kind, list[tuple[float, Pass]]] = field(default_factory=lambda: {kind: [] for kind in Kind})
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
    """A play of the table in which each rank takes what is due: S first, T where it waits or has too many."""

    def __init__(self, schedule: Schedule, costs: Costs, delay: int, waiting: int) -> None:
        self.place, self.costs, self.delay, self.waiting = schedule.placement, costs, delay, waiting
        self.ranks = [_Rank.of(row) for row in schedule.ranks]
        self.length = costs.durations(self.place)
        self.pairs = {step: costs.of_step(step, self.place) for row in schedule.ranks for step in row if len(step) > 1}
        orders = _first_forwards(schedule)
        self.lookups = [
            [[Pass(Kind.E, s, x.microbatch) for x in order
              for s in self.place.shares(x.stage) if self.place.rank_of[s] == rank] for order in orders]
            for rank in range(len(self.ranks))
        ]  # fmt: skip
        self.begun = Counter[int]()
        shared = [step for steps in _all_shared(schedule) for step in steps]
        full = replace(schedule, ranks=(*schedule.ranks, tuple(shared)))
        needs = Dependencies(full)
        self.needs = {x: needs.of(x) for row in full.ranks for step in row for x in step}
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
        stuck = any(self.lacks.values())  # what is left of a row begins with a pass that lacks something
        return None if stuck else tuple(tuple(rank.out) for rank in self.ranks)

    def _next(self, number: int, rank: _Rank, now: float) -> Step | None:
        for chain, own in sorted(enumerate(self.lookups[number]), key=lambda pair: rank.lookups[pair[0]]):
            if rank.lookups[chain] < min(len(own), self.begun[chain] + AHEAD):
                rank.lookups[chain] += 1
                return (own[rank.lookups[chain] - 1],)
        # Before the row: these are short, and the loss of a microbatch waits for C, which waits for every rank's S.
        for kind in (Kind.C, Kind.EW, Kind.S):
            if rank.due[kind] and rank.due[kind][0][0] <= now:
                return (rank.due[kind].pop(0)[1],)
        ready = rank.due[Kind.T] and rank.due[Kind.T][0][0] <= now
        if not (ready and len(rank.due[Kind.T]) > self.waiting):
            for step in rank.next(self.delay):
                comes = max([inf if self.lacks[x] and self._open(x, step) else self.arrival[x] for x in step])
                if comes <= now:
                    rank.take(step)
                    return step
                # Half of T's time: a pass of the row that comes that soon is waited for, else T would hold it up.
                if ready and comes < now + self.length[Kind.T][rank.due[Kind.T][0][1].stage] / 2:
                    return None
        return (rank.due[Kind.T].pop(0)[1],) if ready else None

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
                    if taker.kind.traits.at:
                        insort(self.ranks[there].due[taker.kind], (self.arrival[taker], taker))
                    heappush(self.events, (self.arrival[taker], there))


def _first_forwards(schedule: Schedule) -> list[list[Pass]]:
    """The first forwards of each chain, in their order."""
    passes = [x for row in schedule.ranks for step in row for x in step if x.kind.is_forward]
    firsts = range(0, schedule.placement.num_stages, schedule.placement.chain)
    return [[x for x in passes if x.stage == first] for first in firsts]


def _all_shared(schedule: Schedule) -> Iterator[list[Step]]:
    place = schedule.placement
    for microbatch in range(schedule.num_microbatches):
        first = schedule.chain_of(microbatch) * place.chain
        yield [(Pass(k, s, microbatch),) for k in Kind if k.traits.at for s in place.meant(first, k.traits.at)]
