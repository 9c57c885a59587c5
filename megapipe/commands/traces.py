"""One Perfetto file of all ranks on one clock, the predicted timeline beside the measured one, idle time; a figure too.

megapipe traces runs/quickstart/torch_profile --output merged.json.gz
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from megapipe.commands.main import tell
from megapipe.data.files import file_problems, write_complete
from megapipe.errors import ConfigError, DataError, UserError
from megapipe.flags.parse import parse
from megapipe.schedule import Placement, Schedule, Timeline
from megapipe.schedule.kinds import Lane
from megapipe.schedule.measured.traces import (
    RankSummary,
    RankTrace,
    merge,
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
    """Flags of this tool."""

    traces: str | None = None
    """Folder with rank-N.json.gz of all ranks."""
    output: str | None = None
    """File to write, .json or .json.gz; none for the summary alone."""
    json: str | None = None
    """Write the summary to this file too; - prints it alone."""


def main(argv: Sequence[str]) -> None:
    # The folder may come first without its flag.
    flags = parse(Flags, ["--traces", *argv] if argv and not argv[0].startswith("-") else argv)
    if flags.traces is None:
        raise ConfigError(
            "the folder of traces is missing: megapipe traces runs/quickstart/torch_profile"
        )
    outputs = {
        "--output": flags.output,
        "--json": flags.json,
        **flags.by_flag,
    }
    if problems := list(file_problems(outputs)):
        raise ConfigError(problems)
    paths = sorted(Path(flags.traces).glob("rank-*.json*"))
    if not paths:
        raise DataError(
            f"{flags.traces} holds no rank-N.json.gz. --profile --use-pytorch-profiler writes them"
        )
    flags.check()
    events: list[dict[str, Any]] = []
    drawn: list[tuple[list[Track], Placement]] = []
    about: list[str] = []
    text: list[str] = []
    numbers: list[dict[str, Any]] = []
    for number, ranks in enumerate(pipelines([read(path) for path in paths])):
        try:
            schedule, predicted = predict(ranks)
        except UserError as error:
            raise DataError(f"{flags.traces}, pipeline {number}: {error}") from None
        rows = summarise(ranks, schedule, predicted)
        text += [f"pipeline {number}: {len(ranks)} ranks, {schedule.num_microbatches} microbatches"]
        text += ["rank   step ms   busy ms    idle  predicted ms    idle"]
        text += [
            f"{row.rank:4d} {row.step_ms:9.1f} {row.busy_ms:9.1f} {row.bubble:6.1%} "
            f"{row.predicted_step_ms:13.1f} {row.predicted_bubble:6.1%}"
            for row in rows
        ]
        numbers += [{"pipeline": number} | asdict(row) for row in rows]
        events += merge(ranks, schedule, predicted)
        if flags.named:
            drawn.append((_one_step(ranks, schedule, predicted), schedule.placement))
            about.append(_caption(number, schedule, max(rows, key=lambda row: row.bubble)))
    if not events:
        raise DataError(
            f"{flags.traces}: no trace holds a pass such as 0F0; widen the profiler's window"
        )
    tell("\n".join(text), numbers, flags.json)
    if flags.output is not None:
        merged = json.dumps({"displayTimeUnit": "ms", "traceEvents": events}).encode()
        write_complete(
            flags.output, gzip.compress(merged) if flags.output.endswith(".gz") else merged
        )
        print(f"Wrote {flags.output}; open it in https://ui.perfetto.dev")
    for path, content in (draw(drawn, flags, " ".join(about), "ms") if flags.named else {}).items():
        write_complete(path, content)
        print(f"Wrote {path}")


def _caption(number: int, schedule: Schedule, worst: RankSummary) -> str:
    """worst: of the rank that is idle most."""
    return (
        f"Pipeline {number}, {schedule.num_microbatches} microbatches: a step of median length, {worst.step_ms:.0f} "
        f"ms, rank {worst.rank} idle {worst.bubble:.1%}. Below each rank what its passes' median times predict, with "
        f"free messages: {worst.predicted_step_ms:.0f} ms, {worst.predicted_bubble:.1%}."
    )


def _one_step(ranks: Sequence[RankTrace], schedule: Schedule, predicted: Timeline) -> list[Track]:
    """Each rank's step of median length, in ms from the first pass of any; below it the prediction."""
    spans = [
        span([trace.steps[n] for trace in ranks])
        for n in range(min(len(trace.steps) for trace in ranks))
    ]
    chosen = sorted(range(len(spans)), key=lambda n: spans[n][1] - spans[n][0])[
        (len(spans) - 1) // 2
    ]
    begin, below = spans[chosen][0], tracks_of(schedule, predicted)
    lines: list[Track] = []
    for place, trace in enumerate(ranks):
        for lane in dict.fromkeys(item.lane for item in trace.steps[chosen]):
            steps = [
                (
                    Box(
                        item.label,
                        (item.start + item.waited - begin) / 1000,
                        (item.end - begin) / 1000,
                    ),
                )
                for item in trace.steps[chosen]
                if item.lane is lane
            ]
            name = f"rank {trace.rank}" if lane is Lane.COMPUTE else lane.value
            lines.append(Track(name, steps, apart=lane is Lane.COMPUTE))
        own = (line for line in below if line.rank == place)
        lines += [
            replace(line, name="predicted") if line.lane == Lane.COMPUTE.value else line
            for line in own
        ]
    return lines
