"""One Perfetto file of all ranks on one clock, the predicted timeline beside the measured one, and idle time per rank.

python tools/merge_traces.py runs/quickstart/torch_profile --output merged.json.gz
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megapipe.errors import ConfigError, DataError, UserError
from megapipe.flags.parse import parse, run
from megapipe.schedule.measured.traces import merge, pipelines, predict, read, summarise


@dataclass(frozen=True)
class Flags:
    """Flags of this tool."""

    traces: str | None = None
    """Folder with rank-N.json.gz of all ranks."""
    output: str | None = None
    """File to write, .json or .json.gz; none for the summary alone."""


def main(argv: Sequence[str]) -> None:
    # The folder may come first without its flag.
    flags = parse(Flags, ["--traces", *argv] if argv and not argv[0].startswith("-") else argv)
    if flags.traces is None:
        raise ConfigError("--traces is missing: python tools/merge_traces.py runs/quickstart/torch_profile")
    paths = sorted(Path(flags.traces).glob("rank-*.json*"))
    if not paths:
        raise DataError(f"{flags.traces} holds no rank-N.json.gz. --profile --use-pytorch-profiler writes them")
    events: list[dict[str, Any]] = []
    for number, ranks in enumerate(pipelines([read(path) for path in paths])):
        try:
            schedule, predicted = predict(ranks)
        except UserError as error:
            raise DataError(f"{flags.traces}, pipeline {number}: {error}") from None
        print(f"pipeline {number}: {len(ranks)} ranks, {schedule.num_microbatches} microbatches")
        print("rank   step ms   busy ms    idle  predicted ms    idle")
        for row in summarise(ranks, schedule, predicted):
            print(
                f"{row.rank:4d} {row.step_ms:9.1f} {row.busy_ms:9.1f} {row.bubble:6.1%} "
                f"{row.predicted_step_ms:13.1f} {row.predicted_bubble:6.1%}"
            )
        events += merge(ranks, schedule, predicted)
    if not events:
        raise DataError(f"{flags.traces}: no trace holds a pass such as 0F0; widen the profiler's window")
    if flags.output is not None:
        text = json.dumps({"displayTimeUnit": "ms", "traceEvents": events}).encode()
        Path(flags.output).write_bytes(gzip.compress(text) if flags.output.endswith(".gz") else text)
        print(f"Wrote {flags.output}; open it in https://ui.perfetto.dev")


def command() -> None:
    """This command, as a shell runs it."""
    run(main)
