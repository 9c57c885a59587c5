"""--log-progress: write progress.txt in the folder of --save, with Megatron-LM's lines.

A resumed run continues the file.
"""

from __future__ import annotations

import os
import time
from contextlib import suppress
from datetime import datetime
from pathlib import Path

from megapipe.config import Config
from megapipe.plan.seconds.flops import flops_per_token
from megapipe.training.report.sinks import Sink

_TIME = "%Y-%m-%d %H:%M:%S"


class JobLog(Sink):
    """The file progress.txt, which one rank writes.

    `saved` writes a line for a checkpoint, `complete` one for a save in the background.

    Args:
        config: the run's configuration.
        samples: training samples before this job.
        writes: whether this rank writes.
    """

    def __init__(self, config: Config, samples: int, *, writes: bool) -> None:
        path = Path(config.checkpoint.save or "", "progress.txt")
        super().__init__(f"no --log-progress from here on, {path}")
        if writes and config.log.log_progress and config.checkpoint.save:
            self._to = path
        self._world = config.world_size
        self._async = config.checkpoint.async_save
        self._tokens = config.batch.sequence
        self._flops = flops_per_token(config.model, self._tokens) * self._tokens
        self._began = time.time()
        self._samples = samples
        self._write("Starting job")

    def saved(self, iteration: int, samples: int) -> None:
        """Write that a checkpoint is complete or, with --async-save, begun.

        Args:
            iteration: the checkpoint's iteration.
            samples: training samples so far.
        """
        if self._to is None:
            return
        flops = self._flops * samples
        here = self._flops * (samples - self._samples)
        with suppress(OSError):
            # Restarts with the same number of devices count together, as in Megatron-LM.
            first = first_job(self._to.read_text(), self._world)
            began, before = first or (self._began, 0.0)
            job = self._throughput(here / (time.time() - self._began))
            # Time between jobs counts, as in Megatron-LM.
            cumulative = self._throughput((flops - before) / max(1.0, time.time() - began))
            event = "Saving async checkpoint" if self._async else "Saved checkpoint"
            self._write(
                f"{event}\tIteration: {iteration}\tJob {job}\tCumulative {cumulative}\t"
                f"Floating-point operations: {flops:.2e}\t"
                f"Tokens (in billions): {samples * self._tokens / 1e9:.2f}"
            )

    def complete(self, iteration: int) -> None:
        """Write that a save in the background is complete; without --async-save write nothing.

        Args:
            iteration: the checkpoint's iteration.
        """
        if self._async:
            self._write(f"Saved async checkpoint\tIteration: {iteration}")

    def _throughput(self, flops_per_second: float) -> str:
        return f"throughput: {flops_per_second / 1e12 / self._world:.1f} TFLOP/s/GPU"

    def _write(self, event: str) -> None:
        if self._to is None:
            return
        job = os.environ.get("SLURM_JOB_ID", "")
        with self._trying():
            self._to.parent.mkdir(parents=True, exist_ok=True)
            with self._to.open("a") as file:
                now = f"{datetime.now():{_TIME}}"
                file.write(f"{now}\tJob ID: {job}\t# GPUs: {self._world}\t{event}\n")

    def _reason(self, error: Exception) -> object:
        return getattr(error, "strerror", error)


def first_job(text: str, world: int) -> tuple[float, float] | None:
    """Return when the current series of jobs with this world size began.

    The series is at the end of the file: a job with another world size ends a series.

    Args:
        text: the content of progress.txt.
        world: the world size.
    Returns: (start of the first job of the series, in seconds since 1970; FLOPs trained up to the
        last checkpoint before that start). None if the last job has another size.
    """
    found = None
    saved = 0.0
    begun = 0.0
    for line in text.splitlines():
        # Other programs may have written lines of their own.
        with suppress(ValueError, IndexError):
            when, _, devices, event, *rest = line.split("\t")
            if event in ("Saved checkpoint", "Saving async checkpoint"):
                begun = float(rest[3].split(": ")[1])
            # A background save counts only once it is complete.
            if event in ("Saved checkpoint", "Saved async checkpoint"):
                saved = begun
            if int(devices.split(": ")[1]) != world:
                found = None
            elif event == "Starting job" and found is None:
                found = datetime.strptime(when, _TIME).timestamp(), saved
    return found
