"""--log-progress: progress.txt in the folder of --save, with Megatron-LM's lines; a run of it is gone on with."""

from __future__ import annotations

import os
import time
from contextlib import suppress
from datetime import datetime
from pathlib import Path

from megapipe.config import Config
from megapipe.training.report.flops import flops_per_token
from megapipe.training.report.sinks import Sink

_TIME = "%Y-%m-%d %H:%M:%S"


class JobLog(Sink):
    """Written by one rank, the one of which `writes` is said."""

    def __init__(self, config: Config, samples: int, *, writes: bool) -> None:
        wanted = writes and config.log.log_progress and config.checkpoint.save
        path = Path(config.checkpoint.save or "", "progress.txt")
        super().__init__(f"no --log-progress from here on, {path}")
        self._to = path if wanted else None
        self._world, self._async = config.world_size, config.checkpoint.async_save
        self._tokens = config.batch.sequence
        self._flops = flops_per_token(config.model, self._tokens) * self._tokens
        self._began, self._samples = time.time(), samples
        self._write("Starting job")

    def saved(self, iteration: int, samples: int) -> None:
        """A checkpoint is complete, or with --async-save begun, behind so many samples."""
        if self._to is None:
            return
        flops, here = self._flops * samples, self._flops * (samples - self._samples)
        with suppress(OSError):
            began, before = first_job(self._to.read_text(), self._world) or (self._began, 0.0)
            speeds = here / (time.time() - self._began), (flops - before) / max(1.0, time.time() - began)
            job, cumulative = (f"throughput: {x / 1e12 / self._world:.1f} TFLOP/s/GPU" for x in speeds)
            what = "Saving async checkpoint" if self._async else "Saved checkpoint"
            self._write(
                f"{what}\tIteration: {iteration}\tJob {job}\tCumulative {cumulative}\t"
                f"Floating-point operations: {flops:.2e}\tTokens (in billions): {samples * self._tokens / 1e9:.2f}"
            )

    def complete(self, iteration: int) -> None:
        """A checkpoint that was begun is complete."""
        if self._async:
            self._write(f"Saved async checkpoint\tIteration: {iteration}")

    def _write(self, what: str) -> None:
        if self._to is None:
            return
        job = os.environ.get("SLURM_JOB_ID", "")
        with self._trying():
            self._to.parent.mkdir(parents=True, exist_ok=True)
            with self._to.open("a") as file:
                file.write(f"{datetime.now():{_TIME}}\tJob ID: {job}\t# GPUs: {self._world}\t{what}\n")

    def _why(self, error: Exception) -> object:
        return getattr(error, "strerror", error)


def first_job(text: str, world: int) -> tuple[float, float] | None:
    """The time at which the first job began of those of this world size at the end of a progress.txt, and
    the FLOPs that were saved by then."""
    found, saved, begun = None, 0.0, 0.0
    for line in text.splitlines():
        with suppress(ValueError, IndexError):  # a line of somebody else
            when, _, devices, what, *rest = line.split("\t")
            if what in ("Saved checkpoint", "Saving async checkpoint"):
                begun = float(rest[3].split(": ")[1])
            if what in ("Saved checkpoint", "Saved async checkpoint"):
                saved = begun
            if int(devices.split(": ")[1]) != world:
                found = None
            elif what == "Starting job" and found is None:
                found = datetime.strptime(when, _TIME).timestamp(), saved
    return found
