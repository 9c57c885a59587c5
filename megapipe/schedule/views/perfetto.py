"""A schedule as a Chrome trace, for ui.perfetto.dev or chrome://tracing."""

from __future__ import annotations

import json
from collections.abc import Iterator

from megapipe.schedule.costs import UNIT, Costs
from megapipe.schedule.passes import Pass, Schedule
from megapipe.schedule.simulate import Timeline
from megapipe.schedule.views.scene import LANES, Scene, scene_of

_MICROSECONDS = 1000.0
"""Microseconds of one unit of cost, which is shown as a millisecond."""

Event = dict[str, object]


def to_perfetto(schedule: Schedule, costs: Costs = UNIT) -> str:
    """Return a trace of a simulated schedule: tracks of ranks, arrows of messages, activation.

    One unit of cost becomes one millisecond. The passes of an overlapped pair have equal start and
    end, and a viewer draws one inside the other. If passes have communication, a rank has two more
    tracks, for arithmetic and for communication.

    Returns: JSON in Chrome's trace event format, events "M", "X", "s"/"f" and "C".
    Raises: ScheduleError if the schedule cannot proceed.
    """
    scene = scene_of(schedule, costs)
    events = [*_tracks(scene), *_arrows(schedule, scene.time), *_counters(scene)]
    # A line for each event, so that a diff of two traces shows what moved.
    lines = ",\n".join(json.dumps(event, separators=(",", ":")) for event in events)
    return f'{{"displayTimeUnit":"ms","traceEvents":[\n{lines}\n]}}\n'


def _tracks(scene: Scene) -> Iterator[Event]:
    yield {"ph": "M", "pid": 0, "name": "process_name", "args": {"name": scene.schedule.name}}
    for index, track in enumerate(scene.tracks):
        # The compute stream's thread is the rank, which `_arrows` and `_counters` use too.
        thread = track.rank + LANES.index(track.stream) * len(scene.schedule.ranks)
        name = track.name
        if track.stream != LANES[0]:
            name = f"rank {track.rank} {track.stream}"
        yield {"ph": "M", "pid": 0, "tid": thread, "name": "thread_name", "args": {"name": name}}
        # Viewers sort by name without it, rank 10 before rank 2.
        yield {
            "ph": "M",
            "pid": 0,
            "tid": thread,
            "name": "thread_sort_index",
            "args": {"sort_index": index},
        }
        for box in track.boxes:
            item = box.item
            # The viewer colours by category: passes by their kind, parts of passes by their stream.
            about = _about(item, scene.chunk[item.stage])
            category: str = item.kind.value
            if track.within:
                about = {"pass": str(item)}
                category = track.stream
            yield {
                **_at(thread, box.start),
                "ph": "X",
                "dur": (box.end - box.start) * _MICROSECONDS,
                "name": f"{item.kind.value}{item.of}",
                "cat": category,
                "args": about,
            }


def _about(item: Pass, chunk: int) -> Event:
    about: Event = {"pass": str(item), "stage": item.stage, "microbatch": item.microbatch}
    if item.slice is not None:
        about["slice"] = item.slice
    about["chunk"] = chunk
    return about


def _arrows(schedule: Schedule, time: Timeline) -> Iterator[Event]:
    """Yield two events for each message: an arrow from its sender's pass to the receiver's pass.

    Args:
        time: the timeline of the table.
    """
    rank_of = schedule.placement.rank_of
    links = schedule.links
    # (result, stage that makes it, microbatch, slice, rank that takes it) -> the first pass there.
    takes = {(*s, *x[2:], rank_of[x.stage]): x for x in time.start for s in links[x[:2]].takes}
    sent = []
    for item in time.start:
        sent += [(item, rank_of[item.stage], dst) for dst in links[item[:2]].sends]
    for number, (item, src, dst) in enumerate(sent):
        taker = takes[item.kind.traits.makes[0], *item[1:], dst]
        # An arrow belongs to the slice that is open at its time. A slice is closed at its end.
        leaves = time.end[item] - 0.01 * (time.end[item] - time.start[item])
        common = {"name": "message", "cat": "message", "id": number}
        yield {**_at(src, leaves), **common, "ph": "s"}
        yield {**_at(dst, time.start[taker]), **common, "ph": "f", "bp": "e"}


def _counters(scene: Scene) -> Iterator[Event]:
    """Yield an event for each change of a rank's memory.

    The viewer draws a step curve from them.
    """
    for rank, curve in enumerate(scene.curves):
        for at, held in curve.items():
            yield {
                **_at(rank, at),
                "ph": "C",
                "name": f"activation of rank {rank}",
                "args": {"held": held},
            }


def _at(rank: int, moment: float) -> Event:
    return {"pid": 0, "tid": rank, "ts": moment * _MICROSECONDS}
