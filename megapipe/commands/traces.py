"""Merge the traces of all ranks into one Perfetto file, next to the predicted timeline.

It also prints how long each rank is idle, measured and predicted, and can draw a figure.

megapipe traces runs/quickstart/torch_profile --output merged.json.gz
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from megapipe.commands.main import tell
from megapipe.data.files import file_problems, write_complete
from megapipe.errors import ConfigError, DataError, UserError
from megapipe.flags.parse import parse
from megapipe.schedule import Placement, Schedule, Timeline
from megapipe.schedule.kinds import Lane
from megapipe.schedule.measured.merged import merge
from megapipe.schedule.measured.traces import (
    RankSummary,
    RankTrace,
    pipelines,
    predict,
    read,
    span,
    summarise,
)
from megapipe.schedule.views.figure import Files
from megapipe.schedule.views.scene import Box, Track, tracks_of
from megapipe.schedule.views.timeline import draw


@dataclass(frozen=True)
class Flags(Files):
    """Merge the traces of all ranks, and report how long each rank is idle."""

    traces: str | None = None
    """Folder with rank-N.json.gz of all ranks."""
    output: str | None = None
    """File to write, .json or .json.gz. Default: none, the summary is only printed."""
    json: str | None = None
    """Write the summary to this file too; - prints it alone."""


@dataclass
class _Results:
    """The results of all pipelines, in their order. A pipeline is the ranks of one replica.

    Attributes:
        text: lines of the summary.
        numbers: a JSON object for each rank of each pipeline: its row of the summary.
        events: the events of the merged file.
        panels: (tracks, placement) of each panel of the figure. The placement says which of its
            rank's stages a pass belongs to, and so its colour.
        captions: a text for each panel.
    """

    text: list[str] = field(default_factory=list)
    numbers: list[dict[str, Any]] = field(default_factory=list)
    events: list[dict[str, Any]] = field(default_factory=list)
    panels: list[tuple[list[Track], Placement]] = field(default_factory=list)
    captions: list[str] = field(default_factory=list)


def main(argv: Sequence[str]) -> None:
    """Print the summary, and write the files that the flags name.

    Raises: ConfigError for wrong flags, DataError for a folder without usable traces.
    """
    # The folder may come first without its flag.
    if argv and not argv[0].startswith("-"):
        argv = ["--traces", *argv]
    flags = parse(Flags, argv)
    if flags.traces is None:
        raise ConfigError(
            "the folder of traces is missing: megapipe traces runs/quickstart/torch_profile"
        )
    outputs = {"--output": flags.output, "--json": flags.json, **flags.by_flag}
    if problems := list(file_problems(outputs)):
        raise ConfigError(problems)
    paths = sorted(Path(flags.traces).glob("rank-*.json*"))
    if not paths:
        raise DataError(
            f"{flags.traces} holds no rank-N.json.gz. --profile --use-pytorch-profiler writes them"
        )
    # Without matplotlib a figure is refused now, and not after all traces have been read.
    flags.check()
    found = _Results()
    # With data or tensor parallelism there are several pipelines, and each has its own summary.
    for number, ranks in enumerate(pipelines([read(path) for path in paths])):
        try:
            schedule, predicted = predict(ranks)
        # `predict` knows the ranks alone; the user must know which files they came from.
        except UserError as error:
            raise DataError(f"{flags.traces}, pipeline {number}: {error}") from None
        rows = summarise(ranks, predicted)
        found.text += _lines(number, schedule, rows)
        found.numbers += [{"pipeline": number} | asdict(row) for row in rows]
        found.events += merge(ranks, schedule, predicted)
        # A figure shows one step: passes of a whole trace would be too narrow to see.
        if flags.named:
            panel = (_one_step(ranks, schedule, predicted), schedule.placement)
            worst = max(rows, key=lambda row: row.bubble)
            found.panels.append(panel)
            found.captions.append(_caption(number, schedule, worst))
    if not found.events:
        raise DataError(
            f"{flags.traces}: no trace holds a pass such as 0F0; widen the profiler's window"
        )
    tell("\n".join(found.text), found.numbers, flags.json)
    if flags.output is not None:
        _write_merged(flags.output, found.events)
    if flags.named:
        figures = draw(found.panels, flags, " ".join(found.captions), "ms")
        for path, content in figures.items():
            write_complete(path, content)
            print(f"Wrote {path}")


def _lines(number: int, schedule: Schedule, rows: Sequence[RankSummary]) -> list[str]:
    """Return the lines of the summary of a pipeline: a headline, then a line for each rank.

    Args:
        number: the number of the pipeline.
        rows: the summary of each rank.
    """
    lines = [
        f"pipeline {number}: {len(rows)} ranks, {schedule.num_microbatches} microbatches",
        "rank   step ms   busy ms    idle  predicted ms    idle",
    ]
    for row in rows:
        measured = f"{row.rank:4d} {row.step_ms:9.1f} {row.busy_ms:9.1f} {row.bubble:6.1%}"
        lines.append(f"{measured} {row.predicted_step_ms:13.1f} {row.predicted_bubble:6.1%}")
    return lines


def _write_merged(file: str, events: Sequence[dict[str, Any]]) -> None:
    """Write the events as Chrome's trace format, which Perfetto reads, and print the file."""
    merged = json.dumps({"displayTimeUnit": "ms", "traceEvents": events}).encode()
    if file.endswith(".gz"):
        merged = gzip.compress(merged)
    write_complete(file, merged)
    print(f"Wrote {file}; open it in https://ui.perfetto.dev")


def _caption(number: int, schedule: Schedule, worst: RankSummary) -> str:
    """Return the caption of a pipeline's panel.

    Args:
        number: the number of the pipeline.
        worst: the summary of the rank that is idle most.
    """
    return (
        f"Pipeline {number}, {schedule.num_microbatches} microbatches: a step of median length, "
        f"{worst.step_ms:.0f} ms, rank {worst.rank} idle {worst.bubble:.1%}. Below each rank what "
        "its passes' median times predict, with free messages: "
        f"{worst.predicted_step_ms:.0f} ms, {worst.predicted_bubble:.1%}."
    )


def _one_step(ranks: Sequence[RankTrace], schedule: Schedule, predicted: Timeline) -> list[Track]:
    """Return the tracks of the step of median duration, with times in ms from the first pass.

    A rank's measured tracks are followed by its predicted ones.

    Args:
        ranks: the traces of the pipeline's ranks.
        predicted: the simulated step.
    """
    # A rank whose profiler stopped sooner has fewer steps.
    count = min(len(trace.steps) for trace in ranks)
    spans = [span([trace.steps[n] for trace in ranks]) for n in range(count)]
    by_length = sorted(range(count), key=lambda n: spans[n][1] - spans[n][0])
    # Of an even number of steps, the shorter of the two in the middle.
    chosen = by_length[(count - 1) // 2]
    begin, _ = spans[chosen]
    below = tracks_of(schedule, predicted)
    tracks: list[Track] = []
    for rank, trace in enumerate(ranks):
        boxes: dict[Lane, list[tuple[Box, ...]]] = {}
        for item in trace.steps[chosen]:
            # The trace has microseconds. A pass first waits for its input, which is not drawn.
            start = (item.start + item.waited - begin) / 1000
            box = Box(item.label, start, (item.end - begin) / 1000)
            boxes.setdefault(item.stream, []).append((box,))
        for lane, steps in boxes.items():
            computes = lane is Lane.COMPUTE
            name = f"rank {trace.rank}" if computes else lane.value
            tracks.append(Track(name, steps, gap=computes))
        for track in below:
            if track.rank != rank:
                continue
            # Copies and collectives keep the names of their streams.
            if track.stream == Lane.COMPUTE.value:
                track = replace(track, name="predicted")
            tracks.append(track)
    return tracks
