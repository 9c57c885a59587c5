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
from typing import Any

import torch

from megapipe.config import Config, GuardConfig
from megapipe.distributed.meeting.together import on_first
from megapipe.distributed.mesh import ProcessMesh
from megapipe.pipeline_parallel.watch.watch import RELAY_S

STOPPED = 75
"""Exit code of a run that was asked to stop, has saved and can go on (EX_TEMPFAIL of sysexits.h)."""

REPEATED = (signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
"""Signals that launchers and schedulers send more than once: each passes on what the one above it has sent to all."""


def triggered(config: Config, mesh: ProcessMesh, iteration: int) -> list[str]:
    """Files of --trigger-path that ask for something after an iteration; they are removed. Collective."""
    folder = config.checkpoint.trigger_path
    if folder is None or iteration % config.log.log_interval:
        return []

    def look() -> list[str]:
        found = [name for name in ("save", "exit") if Path(folder, name).exists()]
        for path in (Path(folder, name) for name in found):
            try:
                path.unlink(missing_ok=True)
            except OSError as error:
                again = f"{error.strerror}; it will be obeyed again and again, also by the next run. Remove it by hand"
                print(f"WARNING: {path} of --trigger-path cannot be removed: {again}", flush=True)
        return found

    return on_first(mesh, look)


class Stopping:
    """A watch on what ends a run before its last iteration. `exit_code`: of the process then."""

    def __init__(self, flags: GuardConfig, mesh: ProcessMesh, started: float) -> None:
        self.flags, self.mesh, self._started = flags, mesh, started
        self.signal = ExitSignal(flags.exit_signal if flags.exit_signal_handler else None)
        self.exit_code = 0

    @property
    def wanted(self) -> bool:
        """Is this rank to stop by itself?"""
        most, minutes = self.flags.exit_duration_in_mins, (time.monotonic() - self._started) / 60
        return self.signal.received or (most is not None and minutes > most)

    def reason(self, iteration: int, asked: Sequence[str] = ()) -> str | None:
        """The reason to stop after an iteration, agreed over all ranks; None to go on. asked: by `triggered`."""
        why = self._asked()
        if why is None and "exit" in asked:
            why = "finding exit in --trigger-path"
        if why is not None:
            # torchrun would take it for a failure and, with --max-restarts, start the run again.
            self.exit_code = 0 if _under_torchrun() else STOPPED
            return f"[exiting program after {why}]"
        if (every := self.flags.exit_interval) and iteration % every == 0:
            return f"[exiting program at iteration {iteration}] datetime: {datetime.now():%Y-%m-%d %H:%M:%S}"
        return None

    def _asked(self) -> str | None:
        """The signal that came to any rank, or the time that is up."""
        most = self.flags.exit_duration_in_mins
        if most is None and not self.flags.exit_signal_handler:
            return None
        # Clocks of machines differ by seconds: the longest of all decides, or ranks would stop at different steps.
        mine = [(time.monotonic() - self._started) / 60, float(self.signal.number)]
        longest, number = self.mesh.world.all_reduce(torch.tensor(mine, device=self.mesh.device), "max").tolist()
        if number:
            return f"receiving {signal.Signals(int(number)).name}"
        return f"{longest} minutes" if most is not None and longest > most else None


class ExitSignal:
    """Notes a signal, or Ctrl-C, instead of dying of it. Repeats are noted too, and change nothing: the run is saving,
    perhaps for minutes. A second Ctrl-C is the watch's, which also hears it while this thread hangs in a call.

    Args:
        name: such as SIGTERM; None to listen to none. Only the main thread of a process may listen.
    Attributes:
        number: of the signal that arrived on this rank first; 0 for none.
    """

    first_saves = True
    """A mark for the watch, which asks the handler of SIGINT."""

    def __init__(self, name: str | None) -> None:
        self.number = 0
        self._before: dict[int, Any] = {}
        for number in () if name is None else dict.fromkeys((signal.Signals[name], signal.SIGINT)):
            self._listen(number)

    @property
    def received(self) -> bool:
        return self.number != 0

    def close(self) -> None:
        """Stop listening. What has come may come once more while the process ends, and is not to change its status."""
        for number, before in self._before.items():
            ends = self.received and (number != signal.SIGINT or _under_torchrun())
            signal.signal(number, signal.SIG_IGN if ends else before)
        self._before = {}

    def _listen(self, number: int) -> None:
        if number not in self._before and signal.getsignal(number) is not None:  # None: another library's, in C
            self._before[number] = signal.signal(number, self)

    def __call__(self, number: int, frame: FrameType | None) -> None:
        """A signal has come."""
        if not self.received:
            self.number = number
            for repeated in REPEATED:
                self._listen(repeated)
            if number == signal.SIGINT and os.environ.get("RANK", "0") == "0":
                after = f", from {RELAY_S:g} s on," if _under_torchrun() else ""
                text = f"megapipe: Ctrl-C: saves and ends after this iteration. A second one{after} ends it at once\n"
                with suppress(OSError):
                    os.write(2, text.encode())


def _under_torchrun() -> bool:
    return "TORCHELASTIC_RUN_ID" in os.environ
