"""Megatron-LM's timers (megatron/core/timers.py), computed from the times that every step records.

- `forward-backward`: from the first question of a rank for an input to the end of its last pass.
- `optimizer`: the remaining reductions, norm, clipping and update after that.
- `forward-compute`, `backward-compute`: the passes.
- `forward-recv`, `backward-recv`: waits for messages.
- `batch-generator`: waits for samples. They lie between passes and count in `forward-backward`.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from megapipe.config import LogConfig
from megapipe.distributed.mesh import ProcessMesh
from megapipe.pipeline_parallel.stopwatch import Stopwatch
from megapipe.schedule.measured.costs import MeasuredPass, in_turn

READS = "batch-generator"
_NAMES = {
    0: (),
    1: ("forward-backward", "optimizer"),
    2: (
        "forward-backward",
        "optimizer",
        READS,
        "forward-compute",
        "backward-compute",
        "forward-recv",
        "backward-recv",
    ),
}
"""The timers of each --timing-log-level."""
_HEADS = {
    "max": "max time across ranks (ms):",
    "minmax": "(min, max) time across ranks (ms):",
    "all": "times across ranks (ms):",
}


class Timers:
    """Megatron-LM's timers of one rank: means over the steps since `restart`.

    `add` counts a step and `wait` a wait for samples; `read` returns the means of all ranks.
    Without --timing-log-level nothing is recorded.
    """

    def __init__(self, log: LogConfig, mesh: ProcessMesh) -> None:
        self._names = _NAMES[log.timing_log_level]
        self._mesh = mesh
        # Steps whose times on the device may not be known yet, with a mark of their end.
        self._open: list[tuple[Stopwatch, Any]] = []
        self.restart()

    def restart(self) -> None:
        """Forget all steps so far; the next means are of later steps."""
        self._sums = defaultdict[str, float](float)
        self._steps = 0

    def wait(self, seconds: float) -> None:
        """Count time in which this rank waited for samples.

        Args:
            seconds: the time.
        """
        self._sums[READS] += seconds

    def add(self, watch: Stopwatch) -> None:
        """Count a step whose passes were all launched; the device has finished all earlier steps.

        watch: the times of the step's passes.
        """
        if self._names and watch.passes:
            self._close()
            # Read at the next step, when the device has passed the mark: to read now would wait for
            # it.
            self._open.append((watch, watch.mark()))

    def read(self) -> dict[str, list[float]]:
        """Return {name of a timer: mean seconds of a step on each rank of the world}.

        Timers that are 0 on all ranks are left out. The device must have finished all steps.
        Collective over the world with --timing-log-level; empty without it.
        """
        self._close()
        if not self._names:
            return {}
        # Every rank sends all names, so that rows have one length.
        mine = [self._sums[name] / max(1, self._steps) for name in self._names]
        row = torch.tensor([mine], dtype=torch.float64, device=self._mesh.device)
        columns = self._mesh.world.all_gather(row).T.tolist()
        by_name = dict(zip(self._names, columns, strict=True))
        return {name: seconds for name, seconds in by_name.items() if any(seconds)}

    def _close(self) -> None:
        """Add the times of steps that the device has finished to the sums."""
        for watch, end in self._open:
            times = of_step(watch.ran(self._mesh.pp.rank), watch.seconds(end))
            for name, seconds in times.items():
                self._sums[name] += seconds
            self._steps += 1
        self._open.clear()


def of_step(row: Sequence[MeasuredPass], end: float) -> dict[str, float]:
    """Return {name of a timer: seconds of one step on one rank}.

    Args:
        row: the rank's measured passes in the order in which they ran.
        end: the time at which the update ended, in seconds.
    """
    found = defaultdict[str, float](float)
    for group in in_turn(row):
        for x in group:
            traits = x.item.kind.traits
            direction = "forward" if traits.evaluates else "backward"
            name = "optimizer" if traits.per_stage else f"{direction}-compute"
            # Overlapped passes share their time.
            found[name] += (x.end - x.begin) / len(group)
            found[f"{direction}-recv"] += x.waited / len(group)
    last = max(x.end for x in row)
    # Updates are passes of the table. Megatron-LM's timer ends before them.
    found["forward-backward"] = last - row[0].begin + row[0].waited - found["optimizer"]
    # After the last pass come the sums and updates that no pass does.
    found["optimizer"] += max(0.0, end - last)
    return found


def text(times: Mapping[str, Sequence[float]], option: str) -> str:
    """Return Megatron-LM's lines of the timers, in ms.

    Args:
        times: {name of the timer: seconds of each rank}. A rank with 0 is left out.
        option: --timing-log-option: max, minmax or all.
    """
    lines = [_HEADS[option]]
    for name, seconds in times.items():
        by_rank = {rank: s * 1e3 for rank, s in enumerate(seconds) if s > 0}
        label = f"    {name} ".ljust(52, ".")
        if option == "all":
            lines.append(f"  {name}:")
            lines += [f"     rank {rank:2d}: {ms:.2f}" for rank, ms in by_rank.items()]
        elif option == "max":
            lines.append(f"{label}: {max(by_rank.values()):.2f}")
        else:
            lines.append(f"{label}: ({min(by_rank.values()):.2f}, {max(by_rank.values()):.2f})")
    return "\n".join(lines)
