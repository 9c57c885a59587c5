"""Add passes to the rows of a table: of a shared vocabulary and of multi-token prediction.

The table is simulated. Each rank first runs the added passes that are due, then continues its row.
The forwards of the row keep their order, and so do its other passes. So a paper's table keeps its
pattern, and the added passes stand where the simulation has time for them.
"""

from __future__ import annotations

from bisect import insort
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from heapq import heappop, heappush
from itertools import count, islice
from math import inf
from typing import Self

from megapipe.schedule.costs import Costs
from megapipe.schedule.dependencies import Dependencies
from megapipe.schedule.kinds import Kind
from megapipe.schedule.memory.limits import within
from megapipe.schedule.passes import Pass, Schedule, Step, unpaired
from megapipe.schedule.simulate import Timeline, simulate

AHEAD = 2
"""Number of microbatches by which lookups precede the first stage of a chain."""
FIRST = Kind.C, Kind.EW, Kind.B, Kind.BW, Kind.S, Kind.F
"""Added kinds that run before the row continues, in this order.

They are short, or other ranks wait for them.
"""
LATER = Kind.T, Kind.W
"""Added kinds that run where a rank would wait, or if too many of them are pending."""


def merged(table: Schedule, added: Sequence[Pass], costs: Costs, room: Sequence[float]) -> Schedule:
    """Return the table with further passes in its rows.

    The forwards of a row keep their order among themselves, and so do its other passes. A forward
    may overtake other passes, so that a rank does not wait for the added passes of other ranks: F B
    F may become F F B. Several limits on this delay, and on the number of W and T (W of a shared
    head) that are put off, are tried. The fastest table is returned.

    Args:
        table: the table without the added passes.
        added: the passes to add, of a shared vocabulary or of multi-token prediction.
        costs: costs under which the orders are simulated and compared.
        room: limit on each rank's activation, in the unit of the costs, without the memory of a
            shared vocabulary. This limit may be exceeded if the order of the rows requires it.
    """
    needs = _needs(table, added)
    best: tuple[float, Schedule] | None = None
    for delay in range(1 + -(-table.placement.num_stages // len(room))):
        # A pair that comes later would change the order of the forwards.
        alone = table
        if delay:
            alone = unpaired(table)
        # No rule says how many forwards a backward may wait for, or how many T may be pending.
        for waiting in (1, 2, 3):
            rows = _Merge(alone, added, needs, costs, delay, waiting).run()
            if rows is None:
                continue
            found = replace(table, ranks=rows)
            time = simulate(found, costs)
            fits = within(activation(found, costs, time), room)
            faster = best is None or time.makespan < best[0] * (1 - 1e-9)
            # Without a delay the order of the table is kept, whatever it holds.
            if faster and (fits or not delay):
                best = time.makespan, found
    assert best is not None, "the order of the table itself can always be kept"
    return best[1]


def activation(schedule: Schedule, costs: Costs, time: Timeline) -> tuple[float, ...]:
    """Return the largest activation of layers that each rank holds, in the unit of the costs.

    The memory of a vocabulary that ranks share is not counted.

    Args:
        time: the simulated times and memory of the table under `costs`.
    """
    if not costs.mem_s:
        return time.peak
    return simulate(schedule, replace(costs, mem_s=0.0)).peak


@dataclass
class _Rank:
    """The state of one rank while passes are added to its row.

    `of` makes the state from the rank's row. `next` returns the steps of the row that may follow,
    `take` removes one of them.

    Attributes:
        forwards: forwards left in the row.
        others: other steps left in the row, each with the number of forwards after it in the row.
        free: when its last step ends.
        lookups: {chain: number of E done}. E looks up the rank's rows of the embedding. A chain is
            one copy of the model.
        due: {kind: added passes that have all inputs}. Each is (time of its last input, counter,
            pass). The counter decides between equal times.
        out: the merged row so far.
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
        """Return the rank that has all steps of this row left.

        Args:
            row: the rank's steps in the given table, in order.
        """
        forwards: deque[Step] = deque()
        others: deque[tuple[int, Step]] = deque()
        # From the end, so that the forwards found so far are those after the step.
        for step in reversed(row):
            if len(step) == 1 and step[0].kind.is_forward:
                forwards.appendleft(step)
            else:
                others.appendleft((len(forwards), step))
        return cls(forwards, others)

    def next(self, delay: int) -> list[Step]:
        """Return the steps of the row that may come next, the first choice first.

        Args:
            delay: the number of forwards that may overtake each other step of the row.
        """
        forward = [*islice(self.forwards, 1)]
        if not self.others:
            return forward
        left, other = self.others[0]
        overtaken_by = left - len(self.forwards)
        # Forwards that stand before the other step in the row come before it.
        if overtaken_by < 0:
            return forward
        if overtaken_by >= delay:
            return [other]
        return [*forward, other]

    def take(self, step: Step) -> None:
        """Remove a step, which `next` has returned, from the row."""
        if self.forwards and self.forwards[0] is step:
            self.forwards.popleft()
        else:
            self.others.popleft()


class _Merge:
    """A simulation in which each rank runs its row together with the added passes.

    Added passes of the kinds in FIRST run as soon as they can, because other ranks wait for them.
    Passes of the kinds in LATER, T and W, run where the rank would wait. `run` returns the merged
    rows.

    Args:
        schedule: the table without the added passes.
        added: the passes to add.
        needs: what each pass of the table and each added pass waits for.
        costs: costs under which the simulation runs.
        delay: the number of forwards that may overtake each other step of a row.
        waiting: number of passes of one kind in LATER that may be pending on a rank.
    """

    def __init__(
        self,
        schedule: Schedule,
        added: Sequence[Pass],
        needs: dict[Pass, list[Pass]],
        costs: Costs,
        delay: int,
        waiting: int,
    ) -> None:
        self.place = schedule.placement
        self.costs = costs
        self.delay = delay
        self.waiting = waiting
        self.ranks = [_Rank.of(row) for row in schedule.ranks]
        self.length = costs.durations(self.place)
        pairs = [step for step in schedule.steps() if len(step) > 1]
        self.pairs = {step: costs.of_step(step, self.place) for step in pairs}
        self.lookups = self._lookups(schedule)
        self.begun = Counter[int]()
        self.turns = count()
        # Lookups have an order of their own.
        self.added = {x for x in added if x.kind is not Kind.E}
        self.needs = needs
        self.lacks = {x: len(wanted) for x, wanted in self.needs.items()}
        self.takers: dict[Pass, list[Pass]] = {}
        for x, wanted in self.needs.items():
            for maker in wanted:
                self.takers.setdefault(maker, []).append(x)
        self.arrival = dict.fromkeys(self.needs, 0.0)
        self.events = [(0.0, rank) for rank in range(len(self.ranks))]

    def _lookups(self, schedule: Schedule) -> list[list[list[Pass]]]:
        """Return the passes E of each rank, [rank][chain], in the order in which they will run.

        E looks up a rank's rows of a vocabulary that all ranks share. A chain is one copy of the
        model. The forwards of a chain's first stage need the results of the lookups, so the lookups
        have the order of these forwards.

        Args:
            schedule: the table without the added passes.
        """
        orders = _first_forwards(schedule)
        found: list[list[list[Pass]]] = [[] for _ in self.ranks]
        for rank, own in enumerate(found):
            for order in orders:
                lookups = []
                for x in order:
                    for stage in self.place.shares(x.stage):
                        if self.place.rank_of[stage] == rank:
                            lookups.append(Pass(Kind.E, stage, x.microbatch))
                own.append(lookups)
        return found

    def run(self) -> tuple[tuple[Step, ...], ...] | None:
        """Return each rank's steps with the added passes.

        Returns None if a row gets stuck: an input of its next pass never comes.
        """
        while self.events:
            now, number = heappop(self.events)
            rank = self.ranks[number]
            while rank.free <= now:
                step = self._next(number, rank, now)
                if step is None:
                    break
                self._do(number, rank, step, now)
        # The rest of a stuck row begins with a pass that lacks an input.
        if any(self.lacks.values()):
            return None
        return tuple(tuple(rank.out) for rank in self.ranks)

    def _next(self, number: int, rank: _Rank, now: float) -> Step | None:
        """Return the step that a rank starts at time `now`; None if it waits.

        Args:
            number: the number of the rank.
            rank: the rank's state.
        """
        # Chains take turns. When the lookups of the first chain always went first, Chimera on 4
        # ranks could not be merged for 12 microbatches.
        chains = enumerate(self.lookups[number])
        for chain, own in sorted(chains, key=lambda pair: rank.lookups[pair[0]]):
            if rank.lookups[chain] < min(len(own), self.begun[chain] + AHEAD):
                rank.lookups[chain] += 1
                return (own[rank.lookups[chain] - 1],)
        for kind in FIRST:
            if rank.due[kind] and rank.due[kind][0][0] <= now:
                return (rank.due[kind].pop(0)[-1],)
        waits = min((rank.due[kind] for kind in LATER if rank.due[kind]), default=[])
        ready = bool(waits) and waits[0][0] <= now
        # Pending LATER passes hold memory, so with too many of them the row waits.
        if not (ready and len(waits) > self.waiting):
            for step in rank.next(self.delay):
                comes = self._arrival(step)
                if comes <= now:
                    rank.take(step)
                    return step
                if not ready:
                    continue
                # A step of the row that comes within half of the LATER pass's time goes first,
                # because the LATER pass would delay it.
                later = waits[0][-1]
                if comes < now + self.length[later.kind][later.stage] / 2:
                    return None
        if not ready:
            return None
        return (waits.pop(0)[-1],)

    def _arrival(self, step: Step) -> float:
        """Return when the last input of a step arrives; inf if one is not computed yet."""
        comes = 0.0
        for x in step:
            lacks = self.lacks[x]
            # The second pass of a pair may need the first.
            if lacks and lacks > sum(other in self.needs[x] for other in step):
                return inf
            comes = max(comes, self.arrival[x])
        return comes

    def _do(self, number: int, rank: _Rank, step: Step, now: float) -> None:
        """Start a step at time `now`, and record when its results arrive where they are needed.

        Args:
            number: the number of the rank.
            rank: the rank's state.
        """
        first = step[0]
        length = self.length[first.kind][first.stage]
        if len(step) > 1:
            length = self.pairs[step]
        rank.out.append(step)
        rank.free = now + length
        heappush(self.events, (rank.free, number))
        for item in step:
            if item.kind.is_forward and self.place.is_first(item.stage):
                self.begun[item.stage // self.place.chain] += 1
                # Every rank looks up this microbatch, so wake all of them.
                for other in range(len(self.ranks)):
                    heappush(self.events, (now, other))
            for taker in self.takers.get(item, ()):
                there = self.place.rank_of[taker.stage]
                comes = rank.free + self.costs.lag(number, there, len(self.ranks))
                self.arrival[taker] = max(self.arrival[taker], comes)
                self.lacks[taker] -= 1
                if self.lacks[taker]:
                    continue
                if taker in self.added:
                    # Passes due at one time run in the order in which their inputs were made:
                    # depths read in the order of the loss.
                    turn = 0
                    if not taker.kind.traits.at:
                        turn = next(self.turns)
                    due = self.ranks[there].due[taker.kind]
                    insort(due, (self.arrival[taker], turn, taker))
                heappush(self.events, (self.arrival[taker], there))


def _needs(schedule: Schedule, added: Sequence[Pass]) -> dict[Pass, list[Pass]]:
    """Return {pass of a table, or added pass: the passes that it waits for}."""
    # Needs follow from the passes that a table has. In which row they are makes no difference.
    full = replace(schedule, ranks=(*schedule.ranks, tuple((x,) for x in added)))
    needs = Dependencies(full)
    return {x: needs.of(x) for x in full.passes()}


def _first_forwards(schedule: Schedule) -> list[list[Pass]]:
    """Return the forwards of each chain's first stage, [chain], in the order of its rank's row.

    A chain is one copy of the model; DualPipe has two.
    """
    passes = [x for x in schedule.passes() if x.kind.is_forward]
    found = []
    for first in range(0, schedule.placement.num_stages, schedule.placement.chain):
        found.append([x for x in passes if x.stage == first])
    return found
