"""A window of steps recorded by torch's profiler: one Perfetto-readable trace per rank, its passes labelled."""

from __future__ import annotations

import os
from itertools import count
from pathlib import Path

from torch._C._profiler import _ExperimentalConfig
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
        self._began = 0

    def before(self, iteration: int) -> None:
        """Call with the number of finished steps before each step."""
        if (
            self._wanted
            and self._open is None
            and self._log.profile_step_start <= iteration < self._log.profile_step_end
        ):
            os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # it tells of its start, and that a CPU is no GPU
            shapes, lines = self._log.pytorch_profiler_collect_shapes, self._log.pytorch_profiler_collect_callstack
            # Of everything this build of torch can record, in all threads: the second of two passes has one of its own.
            threads = _ExperimentalConfig(profile_all_threads=True)
            self._open = profile(record_shapes=shapes, with_stack=lines, experimental_config=threads)
            self._open.start()
            self._began = iteration

    def after(self, iteration: int) -> bool:
        """Call with the number of finished steps after each step; the window closes at its end.

        Returns: has it written the trace now?
        """
        ends = self._open is not None and iteration >= self._log.profile_step_end
        if ends:
            self.close(iteration)
        return ends

    def close(self, iteration: int) -> None:
        """Write the trace, also where the run ends inside the window, and say where. An earlier one is renamed."""
        if self._open is None:
            return
        self._open.stop()
        path = trace_path(self._log, self._rank)
        path.parent.mkdir(parents=True, exist_ok=True)
        name = path.name[: -len(".json.gz")]
        partial = path.with_name(f"{name}.partial.json.gz")
        self._open.export_chrome_trace(str(partial))
        moved = ""
        if path.exists():
            aside = next(p for n in count(1) if not (p := path.with_name(f"earlier-{n}-{name}.json.gz")).exists())
            path.rename(aside)
            moved = f"; the one that was there is now {aside.name}"
        os.replace(partial, path)
        print(f"trace of iterations {self._began + 1} to {iteration} of rank {self._rank}: {path}{moved}", flush=True)
        self._open = None
        self._wanted = False
