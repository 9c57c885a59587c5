"""Ends before the last iteration: a signal, as a cluster sends before it takes the machine away, and flags."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Sequence
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from types import FrameType

import torch

from megapipe.config import Config, TrainConfig
from megapipe.distributed.mesh import ProcessMesh
from megapipe.training.together import on_first

STOPPED = 75
"""Exit code of a run that was asked to stop, has saved and can go on (EX_TEMPFAIL of sysexits.h)."""


def triggered(config: Config, mesh: ProcessMesh, iteration: int) -> list[str]:
    """Which files of --trigger-path ask for something after an iteration. Collective."""
    folder = config.checkpoint.trigger_path
    if folder is None or iteration % config.log.log_interval:
        return []

    def look() -> list[str]:
        found = [name for name in ("save", "exit") if Path(folder, name).exists()]
        with suppress(OSError):
            Path(folder, "save").unlink()
        return found

    return on_first(mesh, look)


class Stopping:
    """When a run is to stop. `exit_code`: of the process then."""

    def __init__(self, train: TrainConfig, mesh: ProcessMesh, started: float) -> None:
        self.train, self.mesh, self._started = train, mesh, started
        self.signal = ExitSignal(train.exit_signal if train.exit_signal_handler else None)
        self.exit_code = 0

    @property
    def wanted(self) -> bool:
        """By this rank."""
        most, minutes = self.train.exit_duration_in_mins, (time.monotonic() - self._started) / 60
        return self.signal.received or (most is not None and minutes > most)

    def reason(self, iteration: int, asked: Sequence[str] = ()) -> str | None:
        """Why to stop after an iteration, agreed over all ranks. asked: by `triggered`."""
        train = self.train
        if train.exit_duration_in_mins is not None or train.exit_signal_handler:
            mine = [(time.monotonic() - self._started) / 60, float(self.signal.received)]
            longest, signalled = self.mesh.world.all_reduce(torch.tensor(mine, device=self.mesh.device), "max").tolist()
            over = train.exit_duration_in_mins is not None and longest > train.exit_duration_in_mins
            if signalled or over:
                # torchrun would take it for a failure and, with --max-restarts, start the run again.
                self.exit_code = 0 if "TORCHELASTIC_RUN_ID" in os.environ else STOPPED
                after = f"receiving {train.exit_signal}" if signalled else f"{longest} minutes"
                return f"[exiting program after {after}]"
        if train.exit_interval and iteration % train.exit_interval == 0:
            return f"[exiting program at iteration {iteration}] datetime: {datetime.now():%Y-%m-%d %H:%M:%S}"
        return "[exiting program after finding exit in --trigger-path]" if "exit" in asked else None


class ExitSignal:
    """Notes a signal instead of dying of it. A second one of the kind does what it did before.

    Args:
        name: such as SIGTERM; None to listen to none. Only the main thread of a process may listen.
    Attributes:
        received: did it arrive on this rank?
    """

    def __init__(self, name: str | None) -> None:
        self.received = False
        self._number = None if name is None else signal.Signals[name]
        if self._number is not None:
            self._before = signal.signal(self._number, self._note)

    def close(self) -> None:
        """Stop listening."""
        if self._number is not None:
            signal.signal(self._number, self._before)
            self._number = None

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self.received:
            self.close()
            signal.raise_signal(number)
        self.received = True
