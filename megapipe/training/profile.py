"""A window of steps recorded by torch's profiler: one Perfetto-readable trace per rank, its passes labelled."""

from __future__ import annotations

import os
from pathlib import Path

from torch.profiler import profile

from megapipe.config import LogConfig


def trace_path(log: LogConfig, rank: int) -> Path:
    """torch_profile/rank-N.json.gz beside the TensorBoard folder, as Megatron-LM writes it."""
    beside = Path(log.tensorboard_dir).parent if log.tensorboard_dir else Path()
    return beside / "torch_profile" / f"rank-{rank}.json.gz"


class Profiler:
    """Opens and closes the window of --profile-step-start and --profile-step-end. Idle on ranks not asked for."""

    def __init__(self, log: LogConfig, rank: int) -> None:
        self._log, self._rank = log, rank
        self._wanted = log.profile and log.use_pytorch_profiler and (not log.profile_ranks or rank in log.profile_ranks)
        self._open: profile | None = None

    def before(self, iteration: int) -> None:
        """Call with the number of finished steps before each step."""
        if (
            self._wanted
            and self._open is None
            and self._log.profile_step_start <= iteration < self._log.profile_step_end
        ):
            shapes, lines = self._log.pytorch_profiler_collect_shapes, self._log.pytorch_profiler_collect_callstack
            self._open = profile(record_shapes=shapes, with_stack=lines)  # of everything this build of torch can record
            self._open.start()

    def after(self, iteration: int) -> None:
        """Call with the number of finished steps after each step; the window closes at its end."""
        if iteration >= self._log.profile_step_end:
            self.close()

    def close(self) -> None:
        """Write the trace, also where the run ends inside the window."""
        if self._open is None:
            return
        self._open.stop()
        path = trace_path(self._log, self._rank)
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_name(f"{path.name[: -len('.json.gz')]}.partial.json.gz")
        self._open.export_chrome_trace(str(partial))
        os.replace(partial, path)
        self._open = None
        self._wanted = False
