"""Lowering of a table to programs: where each rank sends and receives.

One clock sorts all passes and messages; each rank's program is its own slice of that one order. Whoever follows one
global order cannot meet another rank in the opposite one, so no schedule deadlocks even if every send waits for its
receive.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import accumulate, count
from typing import NamedTuple

from megapipe.schedule.costs import UNIT, Costs
from megapipe.schedule.families import FAMILIES
from megapipe.schedule.kinds import Lane
from megapipe.schedule.passes import Pass, Schedule, Step
from megapipe.schedule.simulate import Clock, run_clock


class Message(NamedTuple):
    """A message: the result of a pass, on its way from rank src to rank dst."""

    made_by: Pass
    src: int
    dst: int

    def __str__(self) -> str:
        return f"{self.made_by}:{self.src}->{self.dst}"


@dataclass(frozen=True)
class Exchange:
    """Messages that one rank posts together, in the one global order."""

    messages: tuple[Message, ...]


Program = tuple[Step | Exchange, ...]
"""The program of one rank: steps and exchanges, in order."""

_Entry = tuple[int, int, int, int, Step | Message]
"""A place in the global order (which V stand before it, tick, number within the tick, 0 for a step or the number of a
message), and what stands there."""


def lower(schedule: Schedule, costs: Costs = UNIT) -> tuple[Program, ...]:
    """The program of each rank: its steps in order, and exchanges of messages between them.

    A send stands right behind the pass that made it; its receive, in the receiver's program, where the sender is done
    by the clock, before the pass that takes it. Costs move messages between steps; every choice is correct. Messages
    with no step between them form one exchange. That is safe: it only posts a message earlier, and what follows waits
    for the same set.

    What is made before V is received before V, and nothing else is: where V says that what stands before it must run
    again, no message is half way. As V stands behind a closed prefix, this too is one global order.

    Raises: ScheduleError if the schedule cannot proceed.
    """
    return lower_timed(schedule, run_clock(schedule, costs))


def lower_timed(schedule: Schedule, clock: Clock) -> tuple[Program, ...]:
    """`lower` by a clock that has run already."""
    # Times that differ by rounding count as one, so that a receive is posted before the step that starts with it.
    ticks = 1e9 / max((end[-1] for end in clock.end if end and end[-1]), default=1.0)
    entries: list[list[_Entry]] = [[] for _ in schedule.ranks]
    computes = {kind for kind in schedule.kinds if kind.traits.lane is Lane.COMPUTE}
    borders = {kind for kind in schedule.kinds if kind.traits.border}
    links = schedule.links
    posted = [0] * len(schedule.ranks)  # where the last pass of the compute lane ends
    passed = [0] * len(schedule.ranks)  # behind the V of step n it is 2 n + 2, V itself in between
    messages = count(1)
    for number, (rank, i) in enumerate(clock.order):
        step = schedule.ranks[rank][i]
        tick, done = round(clock.start[rank][i] * ticks), round(clock.end[rank][i] * ticks)
        if step[0].kind not in computes:  # posted in its place of the row; it waits on its own lane
            tick = done = posted[rank]
        posted[rank] = done
        # V is a border of the global order: messages made before it sort before it on both ranks, whatever their
        # times.
        bordering = step[0].kind in borders
        if bordering:
            passed[rank] = 2 * step[0].microbatch + 2
        entries[rank].append((passed[rank] - bordering, tick, number, 0, step))
        # Before all that starts when it is there; of a pass that takes no time, right behind it: by the clock's order
        # that is behind what it takes and before who takes it.
        within = number if done == tick else -1
        for item in step:
            for dst in links[item[:2]].sends:
                entry = (passed[rank], done, within, next(messages), Message(item, rank, dst))
                entries[rank].append(entry)
                entries[dst].append(entry)
    return tuple(_program(own) for own in entries)


def most_in_flight(schedule: Schedule, clock: Clock) -> tuple[int, ...]:
    """The most messages of each rank that are made and not yet taken at one time by the clock."""
    links = schedule.links
    steps = [
        (rank, p, clock.start[rank][i], clock.end[rank][i]) for rank, i in clock.order for p in schedule.ranks[rank][i]
    ]
    taken = {(made, stage, *p[2:], rank): start for rank, p, start, _ in steps for made, stage in links[p[:2]].takes}
    changes: list[list[tuple[float, int]]] = [[] for _ in schedule.ranks]
    for rank, p, _, end in steps:
        for dst in links[p[:2]].sends:
            # Negative, so that of two at one time the one that is made counts before the one that is taken.
            changes[rank] += (end, -1), (taken[p.kind.traits.makes[0], *p[1:], dst], 1)
    return tuple(max(accumulate((-less for _, less in sorted(own)), initial=0)) for own in changes)


def forward_only(schedule: Schedule) -> Schedule:
    """Return a table with what an evaluation does: its forwards, without those of multi-token prediction, and what
    these need."""
    place = schedule.placement
    named: dict[Pass, Pass | None] = {}
    for family in FAMILIES:
        named.update(family.evaluated(schedule))

    def evaluated(step: Step) -> Step:
        usual = ((x, x if x.kind.traits.evaluates else None) for x in step if not place.depth(x.stage))
        found = (named.get(x, other) for x, other in usual)
        return tuple(x for x in found if x is not None)

    rows = (map(evaluated, row) for row in schedule.ranks)
    return replace(schedule, ranks=tuple(tuple(step for step in row if step) for row in rows), shared=())


def _program(entries: list[_Entry]) -> Program:
    entries.sort()
    program: list[Step | Exchange] = []
    together: list[Message] = []
    for *_, item in entries:
        if isinstance(item, Message):
            together.append(item)
            continue
        if together:
            program.append(Exchange(tuple(together)))
            together = []
        program.append(item)
    if together:
        program.append(Exchange(tuple(together)))
    return tuple(program)
