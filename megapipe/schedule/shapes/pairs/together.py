"""Simulations in which each rank runs overlapped whatever is ready; `pairs` chooses among them.

There is no fixed order of steps. A rank takes the next forward and the next backward of its own
orders when both have their inputs and it has the memory. This cannot deadlock if the table itself
can run within the memory.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from heapq import heapify, heappop, heappush
from math import inf
from random import Random

from megapipe.schedule.costs import Costs
from megapipe.schedule.kinds import Kind
from megapipe.schedule.passes import Pass, Schedule, Step
from megapipe.schedule.shapes.pairs.manner import GRID, PairingPolicy, changed
from megapipe.schedule.shapes.pairs.played import Rows, compiled_play
from megapipe.schedule.simulate import run_clock, simulate, uncollected

_SMALL = 1e-9  # rounding


@uncollected()
def best_play(
    schedule: Schedule, costs: Costs, limits: list[float], tries: int, *, split: bool = False
) -> tuple[float, Schedule] | None:
    """Return (makespan, table) of the best policy for choosing overlapped pairs.

    Returns None if ranks deadlock with every policy. A `PairingPolicy` says how ranks choose among
    passes that have their inputs. A grid of policies is tried first. Then policies near the best
    are changed at random.

    Args:
        schedule: the table without pairs.
        limits: limit on each rank's activation, in the unit of the costs.
        tries: number of policies to try.
        split: split a backward that is not in a pair into B and W, even if the table has it fused.
    """
    timed = compiled_play(schedule, costs, limits, split)
    if timed is None:
        timed = Play(schedule, costs, limits, split).timed
    random = Random(0)
    # Later ranks leave more memory free, so their warm-ups are shorter, as the rule of pairs asks.
    ramp = tuple(range(len(limits)))
    grid = [*GRID, *(replace(manner, spare=ramp) for manner in GRID[::4])]
    best: tuple[float, float, Schedule] | None = None
    near: tuple[float, PairingPolicy] | None = None
    for n in range(tries):
        # The grid first, then a random walk. A step of the walk may be 0.3% longer, so that it
        # leaves a policy that no single change improves.
        worse = 1.0
        if n < len(grid):
            manner = grid[n]
        elif near is None:
            break
        else:
            manner = changed(near[1], len(limits), random)
            worse = 1.003
        played = timed(manner)
        if played is None:
            continue
        # Rounded, so that Python and C choose the same table.
        makespan = float(f"{played[0]:.12g}")
        # Memory decides among equal times, so only the best tables are simulated for it.
        if best is None or makespan <= best[0]:
            table = replace(schedule, ranks=played[1]())
            held = float(f"{sum(simulate(table, costs).peak):.9g}")
            if best is None or (makespan, held) < best[:2]:
                best = makespan, held, table
        if near is None or makespan < near[0] * worse:
            near = makespan, manner
    if best is None:
        return None
    return best[0], best[2]


@dataclass
class _Row:
    """The state of a rank during the simulation.

    Attributes:
        forwards, backwards: the rank's forwards and backwards to come, in their order.
        room: memory left, in the unit of the costs.
        owed: W that are pending because their B has run.
        free: when the rank's last step ends.
        out: the steps that the rank has run.
    """

    forwards: list[Pass]
    backwards: list[Pass]
    room: float
    owed: list[Pass] = field(default_factory=list)
    free: float = 0.0
    out: list[Step] = field(default_factory=list)


class Play:
    """A simulation in which ranks choose, by a policy, which passes to run and which two together.

    `timed` returns the makespan under a policy, and `run` returns each rank's steps.

    Args:
        schedule: the table that gives the order of each stage's microbatches.
        limits: limit on each rank's activation, in the unit of the costs.
        split: split a backward that is not in a pair into B and W, even if the table has it fused.
    """

    def __init__(self, schedule: Schedule, costs: Costs, limits: list[float], split: bool) -> None:
        self.schedule = schedule
        self.costs = costs
        self.limits = limits
        self.place = schedule.placement
        self.split = split or any(kind.is_split for kind in schedule.kinds)
        self.held, self.owes = costs.memory(self.place)
        durations = costs.durations(self.place)
        self.forward = max(durations[Kind.F])
        # The time of a step by kinds and stages: it is asked for every microbatch.
        self.length: dict[tuple[tuple[Kind, int], ...], float] = {}
        self.forwards: list[list[Pass]] = []
        self.backwards: list[list[Pass]] = []
        for row in schedule.ranks:
            passes = [x for step in row for x in step]
            self.forwards.append([x for x in passes if x.kind.is_forward])
            # B stands for any backward. Its step decides whether it is split.
            backwards = [x for x in passes if x.kind.is_backward]
            self.backwards.append([x._replace(kind=Kind.B) for x in backwards])

    def timed(self, manner: PairingPolicy) -> tuple[float, Callable[[], Rows]] | None:
        """Return (makespan, function that returns each rank's steps) under a policy.

        `manner` is the policy. Returns None if ranks deadlock.
        """
        rows = self.run(manner)
        if rows is None:
            return None
        clock = run_clock(replace(self.schedule, ranks=rows), self.costs)
        return max(ends[-1] for ends in clock.end if ends), lambda: rows

    def run(self, manner: PairingPolicy) -> Rows | None:
        """Return each rank's steps under a policy, with all passes of the table.

        `manner` is the policy. Returns None if ranks deadlock.
        """
        self.manner = manner
        self.wait = manner.wait * self.forward
        spare = manner.spare or (0,) * len(self.limits)
        self.rows = []
        for rank, (limit, n) in enumerate(zip(self.limits, spare, strict=True)):
            largest = max(self.held[stage] for stage in self.place.stages_on(rank))
            room = limit * (1 + _SMALL) - n * largest
            self.rows.append(_Row([*self.forwards[rank]], [*self.backwards[rank]], room))
        # When the input of a pass arrives. The data of the first stage is there from the start.
        self.there = {x: 0.0 for row in self.forwards for x in row if self.place.is_first(x.stage)}
        self.events = [(0.0, rank) for rank in range(len(self.rows))]
        heapify(self.events)
        while self.events:
            now, first = heappop(self.events)
            due = {first}
            # First collect all events of this time, then let the ranks choose.
            while self.events and self.events[0][0] <= now * (1 + _SMALL):
                due.add(heappop(self.events)[1])
            for rank in sorted(due):
                row = self.rows[rank]
                if row.free > now * (1 + _SMALL):
                    continue
                step = self._next(row, rank, now)
                if step:
                    self._do(rank, row, step, now)
        if any(row.forwards or row.backwards for row in self.rows):
            return None
        # W that found no partner and no wait end the row.
        for row in self.rows:
            row.out += [(w,) for w in row.owed]
        return tuple(tuple(row.out) for row in self.rows)

    def _next(self, row: _Row, rank: int, now: float) -> Step | None:
        """Return the step that a rank starts at time `now`; None if it waits.

        Args:
            row: the rank's state.
            rank: the rank's number.
        """
        # Events of one time differ by rounding.
        late = now * (1 + _SMALL) + _SMALL * self.forward
        f_comes, f = self._first(row.forwards, late)
        b_comes, b = self._first(row.backwards, late)
        full = f is not None and self.held[f.stage] > row.room
        if full:
            f = None
            f_comes = inf
        # In a pair W too hides communication of the forward, so the backward is fused.
        if f is not None and b is not None and max(f_comes, b_comes) <= late:
            return f, b._replace(kind=Kind.BW)
        # One is ready, and its partner comes soon: wake this rank when it does.
        for mine, other in ((b_comes, f_comes), (f_comes, b_comes)):
            if mine <= late < other <= late + self.wait:
                heappush(self.events, (other, rank))
                return None
        if b is not None and b_comes <= late:
            return self._backward(row, b, late)
        if f is not None and f_comes <= late:
            return self._forward(row, f, late)
        # Neither is ready, so a W fills the wait. Some W are kept for partners, unless they hold
        # the memory that the next forward needs.
        kept = self.manner.keep
        if full or not row.backwards:
            kept = 0
        if len(row.owed) > kept:
            w = row.owed[0]
            # A W that would delay the next pass by more than half of itself does not start.
            if min(f_comes, b_comes) >= now + self._length((w,)) / 2:
                return (w,)
        return None

    def _backward(self, row: _Row, b: Pass, late: float) -> Step:
        """Return a step for a backward: together with a second backward, or with a W, or alone.

        Args:
            row: the rank's state.
            b: the backward, whose input has arrived.
            late: the present time, with a margin for rounding.
        """
        if self.manner.backwards:
            comes, other = self._first(row.backwards, late, b)
            if other is not None and comes <= late:
                kind = self._kind(row, self._owed(b) + self._owed(other))
                return b._replace(kind=kind), other._replace(kind=kind)
        alone = b._replace(kind=self._kind(row, self._owed(b)))
        if row.owed:
            return alone, row.owed[0]
        return (alone,)

    def _owed(self, b: Pass) -> float:
        """Return how much memory grows if the backward `b` runs and its W stays pending.

        Only a backward that recomputes activations makes it grow; otherwise the result is 0 or
        less.
        """
        return self.owes[b.stage] - self.held[b.stage]

    def _kind(self, row: _Row, owed: float) -> Kind:
        """Return the kind of a backward that runs without a forward: B, or BW.

        B needs split backwards, and memory for a pending W.

        Args:
            row: the rank's state.
            owed: how much the memory grows if the backward runs and its W stays pending.
        """
        # Where activations are recomputed, a deferred W holds more than its backward frees. When
        # only forwards were asked whether they fit, a plan held 72.0 GiB where 67.6 were allowed.
        if self.split and owed <= row.room:
            return Kind.B
        return Kind.BW

    def _forward(self, row: _Row, f: Pass, late: float) -> Step:
        """Return a step for a forward: together with another forward, or with a W, or alone.

        Args:
            row: the rank's state.
            f: the forward, whose input has arrived.
            late: the present time, with a margin for rounding.
        """
        if f.microbatch >= self.manner.forwards:
            comes, other = self._first(row.forwards, late, f)
            if other is not None and comes <= late:
                together = self.held[f.stage] + self.held[other.stage]
                if together <= row.room:
                    return f, other
        if row.owed and self.manner.weights:
            return f, row.owed[0]
        return (f,)

    def _first(
        self, order: list[Pass], late: float, but: Pass | None = None
    ) -> tuple[float, Pass | None]:
        """Return (when the input arrives, pass) for the first pass in `order` that can run.

        Only the first pass of each stage is a candidate. If no input has arrived yet, the pass
        whose input will arrive first is returned; (inf, None) if no arrival is known.

        Args:
            late: the present time, with a margin for rounding.
            but: a pass to leave out, or None.
            order: passes in the order in which they are preferred.
        """
        best: tuple[float, Pass | None] = inf, None
        stages: set[int] = set()
        for item in order[: self.manner.reach + (but is not None)]:
            if item == but or item.stage in stages:
                continue
            stages.add(item.stage)
            comes = self.there.get(item, inf)
            if comes <= late:
                return comes, item
            if comes < best[0]:
                best = comes, item
        return best

    def _do(self, rank: int, row: _Row, step: Step, now: float) -> None:
        """Start a step at time `now`, and record when its results arrive at other ranks.

        Args:
            row: the rank's state.
        """
        end = now + self._length(step)
        row.free = end
        row.out.append(step)
        heappush(self.events, (end, rank))
        for item in step:
            kind, stage, microbatch, _ = item
            if kind is Kind.W:
                row.owed.remove(item)
                row.room += self.owes[stage]
                continue
            if kind.is_forward:
                row.forwards.remove(item)
                row.room -= self.held[stage]
                made = Kind.F
                to = self.place.next(stage)
                # At the loss the backward follows the forward of its own stage.
                if to is None:
                    self.there[Pass(Kind.B, stage, microbatch)] = end
            else:
                row.backwards.remove(item._replace(kind=Kind.B))
                freed = self.held[stage]
                if kind is Kind.B:
                    freed -= self.owes[stage]
                    row.owed.append(Pass(Kind.W, stage, microbatch))
                row.room += freed
                made = Kind.B
                to = self.place.prev(stage)
            if to is not None:
                there = self.place.rank_of[to]
                comes = end + self.costs.lag(rank, there, len(self.rows))
                self.there[Pass(made, to, microbatch)] = comes
                heappush(self.events, (comes, there))

    def _length(self, step: Step) -> float:
        """Return the time of a step, one pass or an overlapped pair, in the unit of the costs."""
        key = tuple([(x.kind, x.stage) for x in step])
        if key not in self.length:
            self.length[key] = self.costs.of_step(step, self.place)
        return self.length[key]
