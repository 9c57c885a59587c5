"""Lowering of a table to programs: where each rank sends and receives.

One clock sorts all passes and messages into a global order, and each rank's program is its part of
that order. Ranks that follow one global order never wait for each other in a circle. So no schedule
deadlocks, even if every send waits for its receive.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import accumulate, count
from typing import NamedTuple

from megapipe.schedule.costs import UNIT, Costs
from megapipe.schedule.families import FAMILIES
from megapipe.schedule.kinds import Lane
from megapipe.schedule.passes import Pass, Schedule, Step
from megapipe.schedule.simulate import SimulatedTimes, run_clock


class Message(NamedTuple):
    """A message from one rank to another: the result of a pass.

    Attributes:
        made_by: the pass whose result is sent.
        src, dst: the sending and the receiving rank.
    """

    made_by: Pass
    src: int
    dst: int

    def __str__(self) -> str:
        return f"{self.made_by}:{self.src}->{self.dst}"


@dataclass(frozen=True)
class Exchange:
    """Messages that one rank posts together, in an order that all ranks have in common.

    Attributes:
        messages: the messages, in that order.
    """

    messages: tuple[Message, ...]


Program = tuple[Step | Exchange, ...]
"""The program of one rank: steps and exchanges, in order."""

_Entry = tuple[int, int, int, int, Step | Message]
"""A step or message with its place in the global order.

The place is (number of V passes before it, tick, number within the tick, 0 for a step or the number
of a message).
"""


def lower(schedule: Schedule, costs: Costs = UNIT) -> tuple[Program, ...]:
    """Return the program of each rank: its steps in order, with exchanges of messages between them.

    A send stands immediately after the pass that makes the tensor. The receive stands in the
    receiver's program before the pass that takes the tensor, at the simulated time at which the
    sender is done. Costs move messages between steps; every choice is correct. Messages with no
    step between them form one exchange. An exchange only posts some messages earlier, which is
    safe.

    1F1B on two ranks with two microbatches. Messages in one cell form one exchange:

        rank 0: 0F0 | 0F0:0->1 | 0F1 | 0F1:0->1 1BW0:1->0 | 0BW0 | 1BW1:1->0 | 0BW1
        rank 1: 0F0:0->1 | 1F0 | 0F1:0->1 | 1BW0 | 1BW0:1->0 | 1F1 | 1BW1 | 1BW1:1->0

    V is the pass that validates an optimizer's update. A tensor that is made before V is received
    before V, and no other tensor is. If V rejects an update, the passes before it run again while
    no message is in flight. All ranks still have messages in one order, because no pass before V
    needs a pass after V (`dependencies.closed_prefix`).

    Raises: ScheduleError if the schedule cannot proceed.
    """
    return lower_timed(schedule, run_clock(schedule, costs))


def lower_timed(schedule: Schedule, clock: SimulatedTimes) -> tuple[Program, ...]:
    """Return each rank's program as `lower` does, given the simulated times.

    Args:
        clock: start and end of every step of the schedule, from `run_clock`.
    """
    # Times that differ only by rounding count as one tick, so that a receive is posted before the
    # step that starts when it arrives.
    ticks = 1e9 / max((end[-1] for end in clock.end if end and end[-1]), default=1.0)
    entries: list[list[_Entry]] = [[] for _ in schedule.ranks]
    computes = {kind for kind in schedule.kinds if kind.traits.lane is Lane.COMPUTE}
    borders = {kind for kind in schedule.kinds if kind.traits.border}
    links = schedule.links
    posted = [0] * len(schedule.ranks)  # where the last compute pass of each rank ends
    passed = [0] * len(schedule.ranks)  # 2 n + 1 at the V of step n, 2 n + 2 after it
    messages = count(1)
    for number, (rank, i) in enumerate(clock.order):
        step = schedule.ranks[rank][i]
        tick = round(clock.start[rank][i] * ticks)
        done = round(clock.end[rank][i] * ticks)
        # A copy or collective is posted at its place in the row. It then waits on its own stream.
        if step[0].kind not in computes:
            tick = done = posted[rank]
        posted[rank] = done
        # V splits the global order: messages made before it sort before it on both ranks, whatever
        # their times.
        bordering = step[0].kind in borders
        if bordering:
            passed[rank] = 2 * step[0].microbatch + 2
        entries[rank].append((passed[rank] - bordering, tick, number, 0, step))
        # A message sorts before every step that starts when it arrives. The message of a pass of no
        # duration sorts immediately after the pass. In the clock's order that is after the pass's
        # inputs and before its receiver.
        within = number if done == tick else -1
        for item in step:
            for dst in links[item[:2]].sends:
                message = Message(item, rank, dst)
                entry = (passed[rank], done, within, next(messages), message)
                entries[rank].append(entry)
                entries[dst].append(entry)
    return tuple(_program(own) for own in entries)


def most_in_flight(schedule: Schedule, clock: SimulatedTimes) -> tuple[int, ...]:
    """Return, for each rank, the most messages at one time that it has sent and nobody has taken.

    Args:
        clock: start and end of every step, from `run_clock`.
    """
    links = schedule.links
    # In the clock's order a result is made before it is taken, and a rank is visited in row order.
    steps = []
    for rank, i in clock.order:
        for item in schedule.ranks[rank][i]:
            steps.append((rank, item, clock.start[rank][i], clock.end[rank][i]))
    taken = {}
    for rank, item, start, _ in steps:
        for made, stage in links[item[:2]].takes:
            taken[made, stage, *item[2:], rank] = start
    changes: list[list[tuple[float, int]]] = [[] for _ in schedule.ranks]
    for rank, item, _, end in steps:
        made = item.kind.traits.makes[0]
        for dst in links[item[:2]].sends:
            # A message counts -1, so that at equal times messages made sort before messages taken.
            changes[rank].append((end, -1))
            changes[rank].append((taken[made, *item[1:], dst], 1))
    most = []
    for own in changes:
        most.append(max(accumulate((-less for _, less in sorted(own)), initial=0)))
    return tuple(most)


def forward_only(schedule: Schedule) -> Schedule:
    """Return the table of an evaluation: only forwards and the passes that forwards need.

    Modules of multi-token prediction are left out.

    Args:
        schedule: the table of training.
    """
    place = schedule.placement
    named: dict[Pass, Pass | None] = {}
    for family in FAMILIES:
        named.update(family.evaluated(schedule))

    def evaluated(step: Step) -> Step:
        found = []
        for item in step:
            if place.depth(item.stage):
                continue
            # A family may put another pass in its place, or leave it out.
            usual = item if item.kind.traits.evaluates else None
            other = named.get(item, usual)
            if other is not None:
                found.append(other)
        return tuple(found)

    rows = []
    for row in schedule.ranks:
        steps = map(evaluated, row)
        rows.append(tuple(step for step in steps if step))
    # Only copies share streams, and an evaluation keeps no activations to copy.
    return replace(schedule, ranks=tuple(rows), shared=())


def _program(entries: list[_Entry]) -> Program:
    """Return a rank's program: its entries sorted, adjacent messages joined in one exchange.

    Args:
        entries: steps and messages of the rank, each with its place in the order that all ranks
            have in common.
    """
    entries.sort()
    program: list[Step | Exchange] = []
    together: list[Message] = []
    for *_, item in entries:
        # Posted together, sends and receives overlap, and NCCL starts one kernel for all of them.
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
