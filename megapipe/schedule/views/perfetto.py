"""A schedule as a Chrome trace, for ui.perfetto.dev or chrome://tracing."""

from __future__ import annotations

import json
from collections.abc import Iterator

from megapipe.schedule.costs import UNIT, Costs
from megapipe.schedule.kinds import Lane
from megapipe.schedule.passes import Schedule
from megapipe.schedule.simulate import Timeline, simulate
from megapipe.schedule.views.draw import chunks, tracks
from megapipe.schedule.views.lanes import ARITHMETIC, LINK, communicates, stretches

_MICROSECONDS = 1000.0
"""Microseconds of one unit of cost: it reads as a millisecond."""

Event = dict[str, object]


def to_perfetto(schedule: Schedule, costs: Costs = UNIT) -> str:
    """A trace of a simulated schedule: a track per rank, an arrow per message, a counter of activation per rank.

    One unit of cost becomes one millisecond. The passes of an overlapped pair are nested slices of the same time. Where
    costs say that passes have communication a rank has two tracks more, of their arithmetic and of their communication.

    Returns: JSON in Chrome's trace event format, events "M", "X", "s"/"f" and "C".
    Raises: ScheduleError if the schedule cannot proceed.
    """
    time = simulate(schedule, costs)
    events = [*_tracks(schedule), *_slices(schedule, time), *_arrows(schedule, time), *_counters(time)]
    if communicates(costs):
        events += _lanes(schedule, costs, time)
    lines = ",\n".join(json.dumps(event, separators=(",", ":")) for event in events)
    return f'{{"displayTimeUnit":"ms","traceEvents":[\n{lines}\n]}}\n'


def _tracks(schedule: Schedule) -> Iterator[Event]:
    yield {"ph": "M", "pid": 0, "name": "process_name", "args": {"name": schedule.name}}
    for index, (rank, lane) in enumerate(tracks(schedule)):
        name = f"rank {rank}" if lane is Lane.COMPUTE else f"rank {rank} {lane.value}"
        thread = _thread(schedule, rank, lane)
        yield {"ph": "M", "pid": 0, "tid": thread, "name": "thread_name", "args": {"name": name}}
        yield {"ph": "M", "pid": 0, "tid": thread, "name": "thread_sort_index", "args": {"sort_index": index}}


def _lanes(schedule: Schedule, costs: Costs, time: Timeline) -> Iterator[Event]:
    ranks = len(schedule.ranks)
    threads = {lane: (len(Lane) + n) * ranks for n, lane in enumerate((ARITHMETIC, LINK))}
    for rank in range(ranks):
        for lane, first in threads.items():
            yield {
                "ph": "M",
                "pid": 0,
                "tid": first + rank,
                "name": "thread_name",
                "args": {"name": f"rank {rank} {lane}"},
            }
            yield {"ph": "M", "pid": 0, "tid": first + rank, "name": "thread_sort_index", "args": {"sort_index": rank}}
        for item, lane, start, end in stretches(schedule, costs, time, rank):
            event = {**_at(threads[lane] + rank, start), "ph": "X", "dur": (end - start) * _MICROSECONDS}
            yield {**event, "name": f"{item.kind.value}{item.of}", "cat": lane, "args": {"pass": str(item)}}


def _thread(schedule: Schedule, rank: int, lane: Lane) -> int:
    return rank + list(Lane).index(lane) * len(schedule.ranks)


def _slices(schedule: Schedule, time: Timeline) -> Iterator[Event]:
    chunk = chunks(schedule.placement)
    for rank, row in enumerate(schedule.ranks):
        for item in (item for step in row for item in step):
            yield {
                **_at(_thread(schedule, rank, item.kind.traits.lane), time.start[item]),
                "ph": "X",
                "dur": (time.end[item] - time.start[item]) * _MICROSECONDS,
                "name": f"{item.kind.value}{item.of}",
                "cat": item.kind.value,
                "args": {
                    "pass": str(item),
                    "stage": item.stage,
                    "microbatch": item.microbatch,
                    **({} if item.slice is None else {"slice": item.slice}),
                    "chunk": chunk[item.stage],
                },
            }


def _arrows(schedule: Schedule, time: Timeline) -> Iterator[Event]:
    """Arrows from each pass whose result another rank takes to the pass that takes it."""
    rank_of, links = schedule.placement.rank_of, schedule.links
    takes = {(*s, *x[2:], rank_of[x.stage]): x for x in time.start for s in links[x[:2]].takes}
    sent = [(item, rank_of[item.stage], dst) for item in time.start for dst in links[item[:2]].sends]
    for number, (item, src, dst) in enumerate(sent):
        taker = takes[item.kind.traits.makes[0], *item[1:], dst]
        # An arrow binds to the slice open at its time, and a slice is no longer open at its end.
        leaves = time.end[item] - 0.01 * (time.end[item] - time.start[item])
        common = {"name": "message", "cat": "message", "id": number}
        yield {**_at(src, leaves), **common, "ph": "s"}
        yield {**_at(dst, time.start[taker]), **common, "ph": "f", "bp": "e"}


def _counters(time: Timeline) -> Iterator[Event]:
    for rank, curve in enumerate(time.curves):
        for at, held in dict(curve).items():
            yield {**_at(rank, at), "ph": "C", "name": f"activation of rank {rank}", "args": {"held": held}}


def _at(rank: int, moment: float) -> Event:
    return {"pid": 0, "tid": rank, "ts": moment * _MICROSECONDS}
