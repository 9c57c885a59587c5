"""The numbers of our own: a JSON line of every step, and TensorBoard's scalars under one prefix."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from contextlib import suppress
from typing import Any, TextIO

from megapipe.plan import GIB
from megapipe.schedule import Placement
from megapipe.schedule.measured.slow import Slow
from megapipe.training.report.counters import Measured

PREFIX = "megapipe/"


def tags_of(now: Measured | None, place: Placement) -> dict[str, float | None]:
    """What was measured, by tag behind PREFIX."""
    if now is None:
        return {}
    named = {
        "passes-ms": now.passes * 1e3,
        "passes-ms-predicted": now.predicted_passes * 1e3,
        "bubble": now.bubble,
        "bubble-predicted": now.predicted_bubble,
        "bubble-of-table": now.of_table,
        "bubble-of-stages": now.of_stages,
        "bubble-of-host": now.of_host,
        "bubble-of-messages": now.of_messages,
    }
    stages = {
        f"stage-{at}-{name.upper()}-ms": getattr(now.costs, name)[at] * 1e3
        for at in range(place.chain)
        for name in "fbw"
    }
    return {**named, **stages}


def of_passes(now: Measured, place: Placement, slow: list[Slow]) -> dict[str, Any]:
    """What a line of --metrics-file says of the passes."""
    times = {
        name: [{kind: getattr(costs, kind)[at] * 1e3 for kind in "fbw"} for at in range(place.chain)]
        for name, costs in (("stages_ms", now.costs), ("predicted_stages_ms", now.predicted))
    }
    ranks = [
        {
            "busy": r.busy * 1e3,
            "waited": r.waited * 1e3,
            "host": (r.idle - r.waited) * 1e3,
            "makespan": r.makespan * 1e3,
        }
        for r in now.ranks
    ]
    memory = {"peak_gib": now.peak_bytes, "predicted_peak_gib": now.predicted_peaks} if now.peak_bytes else {}
    return {
        "steps": now.steps,
        "passes_ms": now.passes * 1e3,
        "predicted_passes_ms": now.predicted_passes * 1e3,
        "bubble": now.bubble,
        "predicted_bubble": now.predicted_bubble,
        "bubble_parts": {
            "table": now.of_table,
            "stages": now.of_stages,
            "host": now.of_host,
            "messages": now.of_messages,
        },
        **times,
        "ranks_ms": ranks,
        **{name: [x / GIB for x in row] for name, row in memory.items()},
        "slow": [x.text for x in slow],
    }


class MetricsFile:
    """Appends a line for each step. A file that cannot be written costs one warning, never the run."""

    def __init__(self, path: str | None) -> None:
        self._path = path
        self._file: TextIO | None = None

    def write(self, values: Mapping[str, Any]) -> None:
        """One object; what is not finite becomes null."""
        if self._path is None:
            return
        try:
            self._file = self._file or open(self._path, "a", encoding="utf-8")  # noqa: SIM115
            self._file.write(json.dumps(_finite(values)) + "\n")
            self._file.flush()
        except OSError as error:
            print(f"WARNING: no metrics from here on, --metrics-file {self._path}: {error}", flush=True)
            self._path = None

    def close(self) -> None:
        if self._file is not None:
            with suppress(OSError):  # said already: what it still holds could not be written
                self._file.close()


def _finite(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {name: _finite(x) for name, x in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(x) for x in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
