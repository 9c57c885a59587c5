"""One trace of a whole pipeline: the events of all ranks, with the predicted passes above them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from megapipe.schedule import Pass, Schedule, Timeline
from megapipe.schedule.kinds import Lane
from megapipe.schedule.measured.traces import Event, RankTrace, span


def merge(
    pipeline: Sequence[RankTrace], schedule: Schedule, predicted: Timeline
) -> Iterator[Event]:
    """Yield the events of one trace file with the measured and the predicted passes of a pipeline.

    Each rank is a process of the trace, and the prediction is one more. The predicted passes of a
    step start with its first measured pass.

    Args:
        pipeline: the traces of the pipeline's ranks.
        schedule: the table that they ran.
        predicted: the timeline simulated with the measured costs, in milliseconds.
    """
    for trace in pipeline:
        yield from _process(trace.rank, f"rank {trace.rank}", trace.rank)
        # Every rank's profiler names its processes and threads by itself. They become threads of
        # one process, and their own names (events "M") are left out.
        for event in trace.events:
            if event.get("ph") != "M":
                yield event | {"pid": trace.rank, "tid": f"{event.get('pid')}/{event.get('tid')}"}
        for item in (x for step in trace.steps for x in step):
            lane = item.stream
            if lane is not Lane.COMPUTE:
                yield _event(trace.rank, lane.value, item.label, lane.value, item.start, item.end)
    # A number that is no rank's. Its sort index puts the prediction above all ranks.
    pid = 1_000_000 + pipeline[0].rank
    yield from _process(pid, "predicted from the measured passes", -1)
    threads = {track: number for number, track in enumerate(schedule.streams)}
    for (rank, lane), thread in threads.items():
        name = f"rank {pipeline[rank].rank}"
        if lane is not Lane.COMPUTE:
            name += f" {lane.value}"
        yield {"ph": "M", "pid": pid, "tid": thread, "name": "thread_name", "args": {"name": name}}
    for n in range(min(len(t.steps) for t in pipeline)):
        begin, _ = span([trace.steps[n] for trace in pipeline])
        for label, start in predicted.start.items():
            thread = threads[schedule.placement.rank_of[label.stage], label.kind.traits.lane]
            until = begin + predicted.end[label] * 1000
            yield _event(pid, thread, label, "predicted", begin + start * 1000, until)


def _process(pid: int, name: str, place: int) -> Iterator[Event]:
    """Yield the trace events that set a process's name and its position from the top in the viewer.

    Args:
        pid: the process's number in the trace.
        place: the position, 0 for the top.
    """
    yield {"ph": "M", "pid": pid, "name": "process_name", "args": {"name": name}}
    yield {"ph": "M", "pid": pid, "name": "process_sort_index", "args": {"sort_index": place}}


def _event(pid: int, tid: int | str, label: Pass, category: str, start: float, end: float) -> Event:
    return {
        "ph": "X",
        "pid": pid,
        "tid": tid,
        "name": str(label),
        "cat": category,
        "ts": start,
        "dur": end - start,
    }
