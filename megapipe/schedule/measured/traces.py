"""Read the traces of all ranks on one clock, and compare the measured with a predicted timeline.

Everything is read from the profiler's labels: which rank ran which pass when, and how long it
waited for a message inside the pass. The table, the costs of its passes and the bubble follow from
these. A copy or collective is seen from its label to the end of the wait for it. That is an upper
bound of its duration.
"""

from __future__ import annotations

import gzip
import json
import re
import zlib
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from megapipe.errors import DataError
from megapipe.schedule import Costs, Kind, Pass, Placement, Schedule, Timeline, simulate
from megapipe.schedule.kinds import LAYERS, Lane

Event = dict[str, Any]
_PASS = re.compile(rf"^(\d+)({'|'.join(Kind)})(\d+)(?:\.(\d+))?$")
_MESSAGE = re.compile(r"^(recv|send) ")
_ANNOTATIONS = ("gpu_user_annotation", "user_annotation")
"""Categories of labels, the best first: a GPU's own times, then the host's."""


@dataclass(frozen=True)
class Slice:
    """A measured pass: one slice of time in the trace, not a slice of a sequence.

    Times are in microseconds on the clock that all ranks share.

    `busy` is its duration without waits. `stream` says what it runs on: compute, collectives or
    copies.

    Attributes:
        label: the pass.
        start, end: when it ran.
        waited: time inside the pass that it waited for a message.
    """

    label: Pass
    start: float
    end: float
    waited: float

    @property
    def busy(self) -> float:
        return self.end - self.start - self.waited

    @property
    def stream(self) -> Lane:
        return self.label.kind.traits.lane


@dataclass(frozen=True)
class RankTrace:
    """The profiler's trace of one rank.

    Attributes:
        events: the rank's events, with times on the clock that all ranks share.
        steps: the rank's measured passes, a list for each training step.
    """

    rank: int
    events: list[Event]
    steps: list[list[Slice]]


@dataclass(frozen=True)
class RankSummary:
    """Where the step time of one rank goes, as medians over steps.

    Attributes:
        step_ms: milliseconds from the first start to the last end of any rank.
        busy_ms: milliseconds in which this rank computes.
        bubble: the share of the step in which the rank does not compute.
        predicted_step_ms, predicted_bubble: the same, simulated with the measured passes.
    """

    rank: int
    step_ms: float
    busy_ms: float
    bubble: float
    predicted_step_ms: float
    predicted_bubble: float


def read(path: Path) -> RankTrace:
    """Read rank-N.json or rank-N.json.gz as torch's profiler wrote it.

    Raises: DataError for a file of another name or content.
    """
    number = re.match(r"rank-(\d+)\.json(\.gz)?$", path.name)
    if number is None:
        raise DataError(
            f"{path}: a trace is called rank-N.json or rank-N.json.gz, "
            "as --use-pytorch-profiler names it"
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
    odd = [event for event in events if not _is_event(event)]
    if odd:
        start = json.dumps(odd[0])[:100]
        raise DataError(f"{path}: {start} is no event with name, ts and dur of torch's profiler.")
    # Ranks have different base times. Their sum with `ts` is the time of the host's clock.
    moved = []
    for event in events:
        if "ts" in event:
            event = event | {"ts": event["ts"] + base}
        moved.append(event)
    return RankTrace(int(number[1]), moved, _steps(_slices(moved)))


def _is_event(event: object) -> bool:
    """Return whether parsed JSON is an event of the trace. An event may have no duration."""
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
    """Return the measured passes that a rank's events show, in the order of their starts.

    An event is a measured pass if its label is a pass.
    """
    # Times of the GPU if the trace has any. The host's labels end when a kernel is launched.
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
    others: list[Slice] = []  # copies and collectives
    begun: list[float] = []  # when each of them was posted, for its place in the row
    for m, begin, end in sorted(passes, key=lambda row: row[1]):
        label = _label(m)
        if label.kind.traits.lane is not Lane.COMPUTE:
            # The label itself covers only the call that posts it.
            ended = next((b for a, b, name in waits if a >= end and name == f"wait {label}"), end)
            begun.append(begin)
            # Passes of one stream run one after another, however early they are posted.
            free = [x.end for x in others if x.stream is label.kind.traits.lane]
            begin = min(max([begin, *free]), ended)
            others.append(Slice(label, begin, ended, 0.0))
            continue
        waited = sum(b - a for a, b in messages if begin <= a and b <= end)
        # An overlapped pair counts as two passes in sequence, half of its time each.
        if rows and begin < rows[-1].end:
            first = rows.pop()
            end = max(end, first.end)
            begin = (first.start + end) / 2
            waited = max(waited, first.waited) / 2
            rows.append(Slice(first.label, first.start, begin, waited))
        rows.append(Slice(label, begin, end, waited))
    ordered = [*zip(begun, others, strict=True), *((item.start, item) for item in rows)]
    return [item for _, item in sorted(ordered, key=lambda pair: pair[0])]


def _label(match: re.Match[str]) -> Pass:
    """Return the pass that a label such as "1F0" names: the inverse of `str(pass)`.

    Args:
        match: the match of a label's regular expression.
    """
    piece = None
    if match[4] is not None:
        piece = int(match[4])
    return Pass(Kind[match[2]], int(match[1]), int(match[3]), piece)


def _steps(slices: Sequence[Slice]) -> list[list[Slice]]:
    """Return the measured passes grouped into training steps.

    A step ends before a pass that has already run in it. Evaluations and interrupted steps are
    shorter, and are left out.

    Args:
        slices: all measured passes of a rank, in the order of their starts.
    """
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
    """Return the traces grouped into replicas of the pipeline, each in rank order.

    Ranks that ran the same passes are in different replicas. If ranks 0 and 2 both ran stage 0,
    rank 0 is in the first replica and rank 2 in the second. Ranks without a complete step are left
    out.
    """
    groups: list[tuple[set[Pass], list[RankTrace]]] = []
    # Replicas of a pipeline run the same passes, and one pipeline runs each pass once. The ranks of
    # a pipeline ascend, so the first group without this rank's passes is its own.
    for trace in sorted(traces, key=lambda t: t.rank):
        if not trace.steps:
            continue
        own = {item.label for item in trace.steps[0]}
        for labels, members in groups:
            if not labels & own:
                labels |= own
                members.append(trace)
                break
        else:
            groups.append((set(own), [trace]))
    return [members for _, members in groups]


def table_of(ranks: Sequence[RankTrace]) -> Schedule:
    """Return the schedule that the ranks of a pipeline ran.

    Args:
        ranks: the traces of one pipeline, in rank order.
    Raises: DataError if a stage has no trace.
    """
    # All steps that `_steps` keeps have the same passes, so the first one stands for all.
    firsts = [trace.steps[0] for trace in ranks]
    rows = [[item.label for item in step] for step in firsts]
    rank_of = {label.stage: r for r, row in enumerate(rows) for label in row}
    if sorted(rank_of) != list(range(len(rank_of))):
        missing = sorted(set(range(max(rank_of) + 1)) - set(rank_of))
        raise DataError(f"no trace has a pass of stage {missing}; profile all ranks of a pipeline")
    labels = [label for row in rows for label in row]
    passes = [label for label in labels if not label.kind.traits.per_stage]
    through: dict[int, set[int]] = {stage: set() for stage in rank_of}
    for label in passes:
        through[label.stage].add(label.microbatch)
    # Two chains carry different microbatches.
    chain = len(rank_of)
    if through[0] != through[chain - 1]:
        chain //= 2
    shared = any(label.kind.traits.at for label in labels)
    placement = Placement(tuple(rank_of[s] for s in range(len(rank_of))), chain, shared)
    count = len({label.microbatch for label in labels})
    slices = 1 + max((label.slice for label in passes if label.slice is not None), default=-1)
    table = [tuple(zip(row, strict=True)) for row in rows]
    return Schedule("measured", placement, count, tuple(table), cuts=(1.0,) * slices)


def costs_of(ranks: Sequence[RankTrace], schedule: Schedule) -> Costs:
    """Return measured costs in milliseconds, for each stage of one copy of the model.

    Each cost is the median over microbatches and steps.

    Args:
        ranks: the traces of one pipeline, in rank order.
        schedule: the table that they ran.
    """
    times: dict[tuple[Kind, int], list[float]] = defaultdict(list)
    for item in _items(ranks):
        at = schedule.placement.position(item.label.stage)
        times[item.label.kind, at].append(item.busy / 1000)
    positions = range(schedule.placement.chain)

    def column(*kinds: Kind) -> list[float]:
        """Return the median time of these kinds at each position, 0 where none ran."""
        found = []
        for at in positions:
            seconds = [x for kind in kinds for x in times.get((kind, at), ())]
            found.append(median(seconds or [0.0]))
        return found

    f, b, w, both = map(column, LAYERS)
    # BW is b + w. In a table with B, BW and W the split passes divide it.
    for at in positions:
        if not b[at]:
            b[at] = both[at]
            w[at] = 0.0
        elif not w[at]:
            w[at] = max(both[at] - b[at], 0.0)
    s, t, e, u, v = (tuple(column(Kind(letter))) for letter in "STEUV")
    g = tuple(column(Kind.G, Kind.RS))
    a = tuple(column(Kind.A, Kind.AF, Kind.AB))
    return Costs(f=tuple(f), b=tuple(b), w=tuple(w), s=s, t=t, e=e, g=g, u=u, a=a, v=v)


def summarise(ranks: Sequence[RankTrace], predicted: Timeline) -> list[RankSummary]:
    """Return the summary of each rank of a pipeline.

    Args:
        ranks: the traces of the pipeline, in rank order.
        predicted: the timeline simulated with the measured costs, in milliseconds.
    """
    rows = []
    # Ranks may have stopped profiling at different steps. zip ends with the shortest.
    steps = [*zip(*(trace.steps for trace in ranks), strict=False)]
    spans = [*map(span, steps)]
    for r, trace in enumerate(ranks):
        busy = []
        for step in trace.steps[: len(steps)]:
            busy.append(sum(item.busy for item in step if item.stream is Lane.COMPUTE))
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


def predict(ranks: Sequence[RankTrace]) -> tuple[Schedule, Timeline]:
    """Return the table that the ranks ran, and its timeline in milliseconds by measured costs.

    Messages take no time.

    Args:
        ranks: the traces of one pipeline, in rank order.
    """
    schedule = table_of(ranks)
    took: dict[Pass, float] | None = None
    # A trace does not have the lengths of slices, so each slice has its own time.
    if schedule.cuts:
        times = defaultdict[Pass, list[float]](list)
        for item in _items(ranks):
            times[item.label].append(item.busy / 1000)
        took = {label: median(each) for label, each in times.items()}
    return schedule, simulate(schedule, costs_of(ranks, schedule), took)


def _items(ranks: Iterable[RankTrace]) -> Iterator[Slice]:
    """Yield the measured passes of all steps of these ranks."""
    for trace in ranks:
        for step in trace.steps:
            yield from step


def span(rows: Sequence[Sequence[Slice]]) -> tuple[float, float]:
    """Return the first start and the last end of one step, in microseconds.

    Args:
        rows: for each rank, its measured passes of the step.
    """
    return min(row[0].start for row in rows), max(item.end for row in rows for item in row)
