"""Megatron-LM's timers (megatron/core/timers.py), of the passes and updates that every step is timed by anyway.

`forward-backward` is a rank's step from its first question for an input to its last pass; `optimizer` what follows:
what is left to reduce, norm, clipping and update. `forward-compute` and `backward-compute` are its passes;
`forward-recv` and `backward-recv` are its waits for messages; `batch-generator` its waits for samples, which stand
between passes and count in none of the others' times but `forward-backward`.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from megapipe.config import LogConfig
from megapipe.distributed.mesh import ProcessMesh
from megapipe.pipeline_parallel.stopwatch import Stopwatch
from megapipe.schedule.measured.costs import Ran, in_turn

READS = "batch-generator"
_NAMES = {
    0: (),
    1: ("forward-backward", "optimizer"),
    2: ("forward-backward", "optimizer", READS, "forward-compute", "backward-compute", "forward-recv", "backward-recv"),
}
_HEADS = {
    "max": "max time across ranks (ms):",
    "minmax": "(min, max) time across ranks (ms):",
    "all": "times across ranks (ms):",
}


class Timers:
    """Timers of one rank, means over the steps since `restart`; without --timing-log-level nothing is kept."""

    def __init__(self, log: LogConfig, mesh: ProcessMesh) -> None:
        self._names, self._mesh = _NAMES[log.timing_log_level], mesh
        self._open: list[tuple[Stopwatch, Any]] = []
        self.restart()

    def restart(self) -> None:
        """Forget the steps so far."""
        self._sums, self._steps = defaultdict[str, float](float), 0

    def wait(self, seconds: float) -> None:
        """Count the time in which this rank has waited for the samples of a step."""
        self._sums[READS] += seconds

    def add(self, watch: Stopwatch) -> None:
        """The host is through with a step; the device is with those before."""
        if self._names and watch.passes:
            self._close()
            self._open.append((watch, watch.mark()))

    def read(self) -> dict[str, list[float]]:
        """Seconds a step on each rank of the world, by name; of what took time on one of them. The device is through
        with all steps. Collective with --timing-log-level, else empty."""
        self._close()
        if not self._names:
            return {}
        mine = [self._sums[name] / max(1, self._steps) for name in self._names]
        rows = self._mesh.world.all_gather(torch.tensor([mine], dtype=torch.float64, device=self._mesh.device))
        return {name: of for name, of in zip(self._names, rows.T.tolist(), strict=True) if any(of)}

    def _close(self) -> None:
        for watch, end in self._open:
            for name, seconds in of_step(watch.ran(self._mesh.pp.rank), watch.seconds(end)).items():
                self._sums[name] += seconds
            self._steps += 1
        self._open.clear()


def of_step(row: Sequence[Ran], end: float) -> dict[str, float]:
    """Seconds by name. row: a rank's passes in their order. end: of its update."""
    found = defaultdict[str, float](float)
    for group in in_turn(row):
        for x in group:
            traits = x.item.kind.traits
            way = "forward" if traits.evaluates else "backward"
            found["optimizer" if traits.per_stage else f"{way}-compute"] += (x.end - x.begin) / len(group)
            found[f"{way}-recv"] += x.waited / len(group)
    last = max(x.end for x in row)
    found["forward-backward"] = last - row[0].begin + row[0].waited - found["optimizer"]
    found["optimizer"] += max(0.0, end - last)
    return found


def text(times: Mapping[str, Sequence[float]], option: str) -> str:
    """Megatron-LM's lines, in ms; ranks without such a time are left out. option: --timing-log-option."""
    lines = [_HEADS[option]]
    for name, seconds in times.items():
        there = {rank: s * 1e3 for rank, s in enumerate(seconds) if s > 0}
        label = f"    {name} ".ljust(52, ".")
        if option == "all":
            lines += [f"  {name}:", *(f"     rank {rank:2d}: {ms:.2f}" for rank, ms in there.items())]
        elif option == "max":
            lines.append(f"{label}: {max(there.values()):.2f}")
        else:
            lines.append(f"{label}: ({min(there.values()):.2f}, {max(there.values()):.2f})")
    return "\n".join(lines)
