"""Traces of all ranks on one clock, with the predicted timeline beside the measured one.

Everything is read off the profiler's labels: which rank ran which pass when, and how long it stood waiting for a
message inside it. The table of the schedule, the costs of its passes and the bubble follow from those. What runs on
another lane than computation is seen from its label to the end of the wait for it: it took at most so long.
"""

from __future__ import annotations

import gzip
import json
import re
import zlib
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from megapipe.errors import DataError
from megapipe.schedule import Costs, Kind, Pass, Placement, Schedule, Timeline, simulate
from megapipe.schedule.kinds import Lane
from megapipe.schedule.views.scene import tracks

Event = dict[str, Any]
_PASS = re.compile(rf"^(\d+)({'|'.join(Kind)})(\d+)(?:\.(\d+))?$")
_MESSAGE = re.compile(r"^(recv|send) ")
_ANNOTATIONS = ("gpu_user_annotation", "user_annotation")
"""Annotations: where a GPU ran the passes its own times count, not the host's."""


@dataclass(frozen=True)
class Slice:
    """A pass as it ran. Times in microseconds on the common clock; `waited` of them inside it for a message."""

    label: Pass
    start: float
    end: float
    waited: float

    @property
    def busy(self) -> float:
        return self.end - self.start - self.waited

    @property
    def lane(self) -> Lane:
        return self.label.kind.traits.lane


@dataclass(frozen=True)
class RankTrace:
    """One rank's file: its events on the common clock, and its passes, one list per training step."""

    rank: int
    events: list[Event]
    steps: list[list[Slice]]


@dataclass(frozen=True)
class RankSummary:
    """Milliseconds of one rank, median over steps: computing, not computing while the step runs, and the same as the
    simulator predicts it from the measured passes. A bubble is idle time / step."""

    rank: int
    step_ms: float
    busy_ms: float
    bubble: float
    predicted_step_ms: float
    predicted_bubble: float


def read(path: Path) -> RankTrace:
    """Read rank-N.json or rank-N.json.gz as torch's profiler wrote it. Raises: DataError."""
    number = re.match(r"rank-(\d+)\.json(\.gz)?$", path.name)
    if number is None:
        raise DataError(
            f"{path}: a trace is called rank-N.json or rank-N.json.gz, as --use-pytorch-profiler names it"
        )
    try:
        data = path.read_bytes()
        content = json.loads(gzip.decompress(data) if path.suffix == ".gz" else data)
        base = content["baseTimeNanoseconds"] / 1000
        events: list[Event] = list(content["traceEvents"])
    except (
        OSError,
        ValueError,
        EOFError,
        KeyError,
        TypeError,
        OverflowError,
        RecursionError,
        zlib.error,
    ) as error:
        raise DataError(f"{path} is not a trace of torch's profiler: {error}") from None
    if odd := [event for event in events if not _is_event(event)]:
        raise DataError(
            f"{path}: {json.dumps(odd[0])[:100]} is no event with name, ts and dur of torch's profiler."
        )
    events = [event | {"ts": event["ts"] + base} if "ts" in event else event for event in events]
    return RankTrace(int(number[1]), events, _steps(_slices(events)))


def _is_event(event: object) -> bool:
    """Is it an event? Those without a duration are too, and are kept as they are."""
    if not isinstance(event, dict):
        return False
    times = [event.get(name, 0.0) for name in ("ts", "dur")]
    numbers = all(isinstance(x, int | float) and abs(x) < 1e18 for x in times)
    return (
        numbers
        and isinstance(event.get("name", ""), str)
        and ("dur" not in event or {"name", "ts"} <= event.keys())
    )


def _slices(events: Sequence[Event]) -> list[Slice]:
    """The labelled passes in order of time."""
    for category in _ANNOTATIONS:
        spans = [
            (e["name"], e["ts"], e["ts"] + e["dur"])
            for e in events
            if e.get("cat") == category and "dur" in e
        ]
        messages = sorted((begin, end) for name, begin, end in spans if _MESSAGE.match(name))
        passes = [(m, begin, end) for name, begin, end in spans if (m := _PASS.match(name))]
        if passes:
            break
    else:
        return []
    waits = sorted((begin, end, name) for name, begin, end in spans if name.startswith("wait "))
    rows: list[Slice] = []
    beside: list[Slice] = []
    begun: list[float] = []  # which says their place in the row
    for m, begin, end in sorted(passes, key=lambda row: row[1]):
        label = Pass(Kind[m[2]], int(m[1]), int(m[3]), None if m[4] is None else int(m[4]))
        if label.kind.traits.lane is not Lane.COMPUTE:
            ended = next((b for a, b, name in waits if a >= end and name == f"wait {label}"), end)
            begun.append(begin)
            # One of a lane after the other, however early it was begun.
            begin = min(
                max([begin, *(x.end for x in beside if x.lane is label.kind.traits.lane)]), ended
            )
            beside.append(Slice(label, begin, ended, 0.0))
            continue
        waited = sum(b - a for a, b in messages if begin <= a and b <= end)
        if (
            rows and begin < rows[-1].end
        ):  # an overlapped pair: half of its time each, one after the other
            first = rows.pop()
            end, waited = max(end, first.end), max(waited, first.waited)
            begin, waited = (first.start + end) / 2, waited / 2
            rows.append(Slice(first.label, first.start, begin, waited))
        rows.append(Slice(label, begin, end, waited))
    ordered = [*zip(begun, beside, strict=True), *((item.start, item) for item in rows)]
    return [item for _, item in sorted(ordered, key=lambda pair: pair[0])]


def _steps(slices: Sequence[Slice]) -> list[list[Slice]]:
    """Cut where a pass comes for the second time; without evaluations and what was begun again."""
    steps: list[list[Slice]] = []
    seen: set[Pass] = set()
    for item in slices:
        if item.label in seen or not steps:
            steps.append([])
            seen = set()
        steps[-1].append(item)
        seen.add(item.label)
    return [step for step in steps if len(step) == max(map(len, steps))]


def pipelines(traces: Sequence[RankTrace]) -> list[list[RankTrace]]:
    """The traces of each pipeline: ranks that ran different passes of one table belong together, in rank order."""
    groups: list[tuple[set[Pass], list[RankTrace]]] = []
    for trace in sorted(traces, key=lambda t: t.rank):
        own = {item.label for item in trace.steps[0]} if trace.steps else set()
        if not own:
            continue
        for labels, members in groups:
            if not labels & own:
                labels |= own
                members.append(trace)
                break
        else:
            groups.append((set(own), [trace]))
    return [members for _, members in groups]


def table_of(ranks: Sequence[RankTrace]) -> Schedule:
    """The schedule that the ranks of a pipeline ran. Raises: DataError if their traces do not make one."""
    rows = [[item.label for item in trace.steps[0]] for trace in ranks]
    rank_of = {label.stage: r for r, row in enumerate(rows) for label in row}
    if sorted(rank_of) != list(range(len(rank_of))):
        missing = sorted(set(range(max(rank_of) + 1)) - set(rank_of))
        raise DataError(f"no trace has a pass of stage {missing}; profile all ranks of a pipeline")
    passes = [label for row in rows for label in row if not label.kind.traits.per_stage]
    first = [
        {label.microbatch for label in passes if label.stage == s} for s in (0, len(rank_of) - 1)
    ]
    # Two chains carry different microbatches.
    chain = len(rank_of) if first[0] == first[1] else len(rank_of) // 2
    shared = any(label.kind.traits.at for row in rows for label in row)
    placement = Placement(tuple(rank_of[s] for s in range(len(rank_of))), chain, shared)
    count = len({label.microbatch for row in rows for label in row})
    slices = 1 + max((label.slice for label in passes if label.slice is not None), default=-1)
    table = tuple(tuple((label,) for label in row) for row in rows)
    return Schedule("measured", placement, count, table, cuts=(1.0,) * slices)


def costs_of(ranks: Sequence[RankTrace], schedule: Schedule) -> Costs:
    """Milliseconds of each kind of pass on each stage, median over microbatches and steps."""
    times: dict[tuple[Kind, int], list[float]] = defaultdict(list)
    for item in (item for trace in ranks for step in trace.steps for item in step):
        times[item.label.kind, schedule.placement.position(item.label.stage)].append(
            item.busy / 1000
        )
    chain = range(schedule.placement.chain)

    def column(*kinds: Kind) -> list[float]:
        return [
            median([x for kind in kinds for x in times.get((kind, s), ())] or [0.0]) for s in chain
        ]

    f, b, w, both = (column(kind) for kind in (Kind.F, Kind.B, Kind.W, Kind.BW))
    # A fused pass counts as b + w; where a table has B, BW and W the split ones tell them apart.
    w = [w[s] or max(both[s] - b[s], 0.0) if b[s] else 0.0 for s in chain]
    b = [b[s] or both[s] for s in chain]
    s, t, e, u, v = (tuple(column(Kind(letter))) for letter in "STEUV")
    g, a = tuple(column(Kind.G, Kind.RS)), tuple(column(Kind.A, Kind.AF, Kind.AB))
    return Costs(f=tuple(f), b=tuple(b), w=tuple(w), s=s, t=t, e=e, g=g, u=u, a=a, v=v)


def summarise(
    ranks: Sequence[RankTrace], schedule: Schedule, predicted: Timeline
) -> list[RankSummary]:
    """One row per rank of a pipeline."""
    rows = []
    spans = [
        span([trace.steps[n] for trace in ranks]) for n in range(min(len(t.steps) for t in ranks))
    ]
    for r, trace in enumerate(ranks):
        busy = [
            sum(item.busy for item in step if item.lane is Lane.COMPUTE)
            for step, _ in zip(trace.steps, spans, strict=False)
        ]
        step_ms = median(end - start for start, end in spans) / 1000
        bubble = median(1 - b / (end - start) for b, (start, end) in zip(busy, spans, strict=True))
        rows.append(
            RankSummary(
                trace.rank,
                step_ms,
                median(busy) / 1000,
                bubble,
                predicted.makespan,
                1 - predicted.busy[r] / predicted.makespan,
            )
        )
    return rows


def merge(
    pipeline: Sequence[RankTrace], schedule: Schedule, predicted: Timeline
) -> Iterator[Event]:
    """All events of a pipeline's ranks, each rank a process of the trace, and the prediction of each step.

    The predicted passes of a step start with its first measured one; they lie in a process of their own.
    """
    for trace in pipeline:
        yield {
            "ph": "M",
            "pid": trace.rank,
            "name": "process_name",
            "args": {"name": f"rank {trace.rank}"},
        }
        yield {
            "ph": "M",
            "pid": trace.rank,
            "name": "process_sort_index",
            "args": {"sort_index": trace.rank},
        }
        for event in trace.events:
            if event.get("ph") != "M":
                yield event | {"pid": trace.rank, "tid": f"{event.get('pid')}/{event.get('tid')}"}
        for item in (
            item for step in trace.steps for item in step if item.lane is not Lane.COMPUTE
        ):
            yield _event(
                trace.rank, item.lane.value, item.label, item.lane.value, item.start, item.end
            )
    pid = 1_000_000 + pipeline[0].rank
    yield {
        "ph": "M",
        "pid": pid,
        "name": "process_name",
        "args": {"name": "predicted from the measured passes"},
    }
    yield {"ph": "M", "pid": pid, "name": "process_sort_index", "args": {"sort_index": -1}}
    threads = {track: number for number, track in enumerate(tracks(schedule))}
    for (rank, lane), thread in threads.items():
        name = f"rank {pipeline[rank].rank}" + (
            f" {lane.value}" if lane is not Lane.COMPUTE else ""
        )
        yield {"ph": "M", "pid": pid, "tid": thread, "name": "thread_name", "args": {"name": name}}
    for n in range(min(len(t.steps) for t in pipeline)):
        begin, _ = span([trace.steps[n] for trace in pipeline])
        for label, start in predicted.start.items():
            thread = threads[schedule.placement.rank_of[label.stage], label.kind.traits.lane]
            yield _event(
                pid,
                thread,
                label,
                "predicted",
                begin + start * 1000,
                begin + predicted.end[label] * 1000,
            )


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


def predict(ranks: Sequence[RankTrace]) -> tuple[Schedule, Timeline]:
    """The table that the ranks ran, and its timeline under their own measured costs with free messages."""
    schedule, times = table_of(ranks), defaultdict[Pass, list[float]](list)
    # A trace does not say how long slices are: each has its own time.
    for item in (item for trace in ranks for step in trace.steps for item in step if schedule.cuts):
        times[item.label].append(item.busy / 1000)
    took = {label: median(each) for label, each in times.items()}
    return schedule, simulate(schedule, costs_of(ranks, schedule), took or None)


def span(rows: Sequence[Sequence[Slice]]) -> tuple[float, float]:
    """The span from the first start to the last end of one step's rows."""
    return min(row[0].start for row in rows), max(item.end for row in rows for item in row)
