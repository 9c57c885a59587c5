"""Record a window of steps with torch's profiler: a trace per rank, with labelled passes."""

from __future__ import annotations

import os
from itertools import count
from pathlib import Path

from torch._C._profiler import _ExperimentalConfig
from torch.profiler import profile

from megapipe.config import LogConfig


def trace_path(log: LogConfig, rank: int) -> Path:
    """Return the file for the trace of a rank.

    The file is torch_profile/rank-N.json.gz next to the TensorBoard folder, as in Megatron-LM.
    Without such a folder it is in the current one.

    Args:
        log: the logging flags.
        rank: the global rank.
    """
    folder = Path(log.tensorboard_dir).parent if log.tensorboard_dir else Path()
    return folder / "torch_profile" / f"rank-{rank}.json.gz"


class Profiler:
    """Records the steps from --profile-step-start to --profile-step-end with PyTorch's profiler.

    `before` and `after` are called around each step, `close` at the end of the run. Does nothing
    if --profile or --use-pytorch-profiler is missing, and on ranks that --profile-ranks leaves out.

    Args:
        log: the logging flags.
        rank: the global rank.
    """

    def __init__(self, log: LogConfig, rank: int) -> None:
        self._log = log
        self._rank = rank
        chosen = not log.profile_ranks or rank in log.profile_ranks
        self._wanted = log.profile and log.use_pytorch_profiler and chosen
        self._open: profile | None = None
        self._began = 0

    def before(self, iteration: int) -> None:
        """Begin to record before a step, if the profiled steps begin with this one.

        Args:
            iteration: number of steps so far.
        """
        log = self._log
        if not self._wanted or self._open is not None:
            return
        # A resumed run may begin within the window.
        if log.profile_step_start <= iteration < log.profile_step_end:
            # Otherwise Kineto reports its start, and that a CPU is no GPU.
            os.environ.setdefault("KINETO_LOG_LEVEL", "99")
            self._open = profile(
                record_shapes=log.pytorch_profiler_collect_shapes,
                with_stack=log.pytorch_profiler_collect_callstack,
                # The second of two overlapped passes runs in a thread of its own.
                experimental_config=_ExperimentalConfig(profile_all_threads=True),
            )
            self._open.start()
            self._began = iteration

    def after(self, iteration: int) -> bool:
        """Write the trace after a step, if the profiled steps end with this one.

        Args:
            iteration: number of steps so far.
        Returns: whether a trace was written.
        """
        ends = self._open is not None and iteration >= self._log.profile_step_end
        if ends:
            self.close(iteration)
        return ends

    def close(self, iteration: int) -> None:
        """Write the trace and print its path, if steps were recorded and not yet written.

        An older trace of the same name is renamed.

        Args:
            iteration: the last iteration of the trace.
        """
        if self._open is None:
            return
        self._open.stop()
        path = trace_path(self._log, self._rank)
        path.parent.mkdir(parents=True, exist_ok=True)
        name = path.name[: -len(".json.gz")]
        # A trace under its final name is complete.
        partial = path.with_name(f"{name}.partial.json.gz")
        self._open.export_chrome_trace(str(partial))
        renamed = ""
        if path.exists():
            candidates = (path.with_name(f"earlier-{n}-{name}.json.gz") for n in count(1))
            aside = next(candidate for candidate in candidates if not candidate.exists())
            path.rename(aside)
            renamed = f"; the one that was there is now {aside.name}"
        os.replace(partial, path)
        iterations = f"{self._began + 1} to {iteration}"
        print(f"trace of iterations {iterations} of rank {self._rank}: {path}{renamed}", flush=True)
        self._open = None
        self._wanted = False
