"""From a table to programs: where each rank sends and receives.

One clock sorts all passes and messages; each rank's program is its own slice of that one order. Whoever follows one
global order cannot meet another rank in the opposite one, so no schedule deadlocks even if every send waits for its
receive.
"""

from __future__ import annotations

from itertools import groupby

from megapipe.schedule.costs import UNIT, Costs
from megapipe.schedule.passes import Exchange, Kind, Message, Pass, Program, Schedule, Step
from megapipe.schedule.simulate import run_clock

_Key = tuple[int, int, int, int]
"""Tick, level within the tick, message (0) before step (1), number: a place in the global order."""


def lower(schedule: Schedule, costs: Costs = UNIT) -> tuple[Program, ...]:
    """The program of each rank: its steps in order, and exchanges of messages between them.

    A send stands right behind the pass that made it; its receive, in the receiver's program, where the sender is done
    by the clock, before the pass that takes it. Costs move messages between steps; every choice is correct. Messages
    with no step between them form one exchange. That is safe: it only posts a message earlier, and what follows waits
    for the same set.

    Raises: ScheduleError if the schedule cannot proceed.
    """
    entries: list[list[tuple[_Key, Step | Message]]] = [[] for _ in schedule.ranks]
    clock = run_clock(schedule, costs)
    # Times that differ by rounding count as one, so that a receive is posted before the step that starts with it.
    ticks = 1e9 / max((end[-1] for end in clock.end if end), default=1.0) if any(clock.end) else 1.0
    place, m = schedule.placement, schedule.num_microbatches
    made: dict[tuple[bool, int], tuple[int, int]] = {}
    behind: list[tuple[int, int]] = [(-1, 0)] * len(schedule.ranks)
    for number, (rank, i) in enumerate(clock.order):
        step = schedule.ranks[rank][i]
        tick, done = round(clock.start[rank][i] * ticks), round(clock.end[rank][i] * ticks)
        # Passes may take no time; levels then keep what follows from what apart within a tick.
        before, depth = behind[rank]
        level = depth + 1 if before == tick else 0
        for item in step:
            arrived = made.get(_input(item, m))
            if arrived is not None and arrived[0] == tick:
                level = max(level, arrived[1])
        behind[rank] = tick, level
        entries[rank].append(((tick, level, 1, i), step))
        for j, item in enumerate(step):
            consumer = place.consumer(item)
            if consumer is None:
                continue
            at = done, level + 1 if done == tick else 0
            made[item.kind is Kind.F, item.stage * m + item.microbatch] = at
            dst = place.rank_of[consumer]
            if dst != rank:
                entry = (*at, 0, 2 * number + j), Message(item, rank, dst)
                entries[rank].append(entry)
                entries[dst].append(entry)
    return tuple(_program(own) for own in entries)


def forward_only(schedule: Schedule) -> Schedule:
    """The same table with only its forwards, for evaluation."""
    rows = [[tuple(x for x in step if x.kind is Kind.F) for step in row] for row in schedule.ranks]
    kept = tuple(tuple(step for step in row if step) for row in rows)
    return Schedule(schedule.name, schedule.placement, schedule.num_microbatches, kept)


def _input(item: Pass, m: int) -> tuple[bool, int]:
    """What a pass takes from another stage (of the same chain, if there is one), as (is forward, key)."""
    key = item.stage * m + item.microbatch
    return (True, key - m) if item.kind is Kind.F else (False, key + m)


def _program(entries: list[tuple[_Key, Step | Message]]) -> Program:
    entries.sort(key=lambda entry: entry[0])
    program: list[Step | Exchange] = []
    for is_message, group in groupby((item for _, item in entries), key=lambda item: isinstance(item, Message)):
        if is_message:
            program.append(Exchange(tuple(x for x in group if isinstance(x, Message))))
        else:
            program.extend(x for x in group if not isinstance(x, Message))
    return tuple(program)
