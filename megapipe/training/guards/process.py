"""Stop a run before its last iteration, at a signal or when a flag asks for it."""

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
"""Exit code of a run that was asked to stop, has saved and can be resumed: EX_TEMPFAIL.

Not under torchrun, where it is 0.
"""

REPEATED = (signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
"""Signals that arrive more than once, because each launcher passes on what it receives."""


def triggered(config: Config, mesh: ProcessMesh, iteration: int) -> list[str]:
    """Return the names of files found in --trigger-path, "save" or "exit", and remove them.

    Collective over the world.

    Args:
        config: the run's configuration.
        mesh: this rank's mesh.
        iteration: the iteration that has just ended. The folder is looked at after each multiple of
            --log-interval.
    """
    folder = config.checkpoint.trigger_path
    if folder is None or iteration % config.log.log_interval:
        return []

    def look() -> list[str]:
        found = [name for name in ("save", "exit") if Path(folder, name).exists()]
        for name in found:
            path = Path(folder, name)
            try:
                path.unlink(missing_ok=True)
            except OSError as error:
                print(
                    f"WARNING: {path} of --trigger-path cannot be removed: {error.strerror}; it "
                    "will be obeyed again and again, also by the next run. Remove it by hand",
                    flush=True,
                )
        return found

    # One rank looks for all: another might see the file a moment later, and ranks must agree.
    return on_first(mesh, look)


class Stopping:
    """Decides whether a run ends before its last iteration.

    `wanted` says whether this rank wants to stop; `reason` returns the decision of all ranks.

    Args:
        flags: the guards' flags.
        mesh: this rank's mesh.
        started: time.monotonic() at the start of `pretrain`.

    Attributes:
        signal: listens for --exit-signal.
        exit_code: exit code of the process, if the run ends early.
    """

    def __init__(self, flags: GuardConfig, mesh: ProcessMesh, started: float) -> None:
        self.flags = flags
        self.mesh = mesh
        self._started = started
        name = flags.exit_signal if flags.exit_signal_handler else None
        self.signal = ExitSignal(name)
        self.exit_code = 0

    @property
    def wanted(self) -> bool:
        """Return whether this rank wants to stop."""
        most = self.flags.exit_duration_in_mins
        return self.signal.received or (most is not None and self._minutes() > most)

    def reason(self, iteration: int, asked: Sequence[str] = ()) -> str | None:
        """Return a text with the reason to stop, equal on all ranks but for a date; None to go on.

        Sets `exit_code`. Collective over the world with --exit-duration-in-mins or
        --exit-signal-handler.

        Args:
            iteration: the iteration that has ended.
            asked: names of the trigger files that were found, such as "exit".
        """
        why = self._asked()
        if why is None and "exit" in asked:
            why = "finding exit in --trigger-path"
        if why is not None:
            # torchrun takes any other code for a failure. With --max-restarts it would start the
            # run again.
            self.exit_code = 0 if _under_torchrun() else STOPPED
            return f"[exiting program after {why}]"
        every = self.flags.exit_interval
        if every and iteration % every == 0:
            now = f"{datetime.now():%Y-%m-%d %H:%M:%S}"
            return f"[exiting program at iteration {iteration}] datetime: {now}"
        return None

    def _asked(self) -> str | None:
        """Return why all ranks must stop: a signal on any rank, or too long a run; else None."""
        most = self.flags.exit_duration_in_mins
        # No rank can want to stop, so no step pays for the all-reduce.
        if most is None and not self.flags.exit_signal_handler:
            return None
        # Clocks of machines differ by seconds. The longest time of all decides, because ranks must
        # stop at the same step.
        mine = torch.tensor([self._minutes(), float(self.signal.number)], device=self.mesh.device)
        longest, number = self.mesh.world.all_reduce(mine, "max").tolist()
        if number:
            return f"receiving {signal.Signals(int(number)).name}"
        if most is not None and longest > most:
            return f"{longest} minutes"
        return None

    def _minutes(self) -> float:
        return (time.monotonic() - self._started) / 60


class ExitSignal:
    """Remembers a signal, or Ctrl-C, instead of letting it end the process.

    The same signal again changes nothing here: the run is saving, perhaps for minutes. Only a
    second Ctrl-C ends the process. The watchdog does that in its own thread, because the main
    thread may hang in a call.

    `received` says whether the signal has arrived, `close` stops listening.

    Args:
        name: a signal's name, such as SIGTERM; None to listen to none. Python allows only the main
            thread to listen.

    Attributes:
        number: number of the first signal on this rank; 0 for none.
    """

    first_saves = True
    """Shows the watchdog that this handler of SIGINT lets the run save."""

    def __init__(self, name: str | None) -> None:
        self.number = 0
        self._before: dict[int, Any] = {}
        if name is not None:
            # Each once: the flag may name SIGINT itself.
            for number in dict.fromkeys((signal.Signals[name], signal.SIGINT)):
                self._listen(number)

    @property
    def received(self) -> bool:
        """Return whether a signal has arrived."""
        return self.number != 0

    def close(self) -> None:
        """Stop listening.

        If a signal has arrived, signals are ignored from now on, so that they do not change the
        exit code. Ctrl-C is ignored only under torchrun.
        """
        for number, before in self._before.items():
            handler = before
            # torchrun passes Ctrl-C on to its processes, so it may come again, too.
            if self.received and (number != signal.SIGINT or _under_torchrun()):
                handler = signal.SIG_IGN
            signal.signal(number, handler)
        self._before = {}

    def _listen(self, number: int) -> None:
        # getsignal returns None for a handler that another library has set in C.
        if number not in self._before and signal.getsignal(number) is not None:
            self._before[number] = signal.signal(number, self)

    def __call__(self, number: int, frame: FrameType | None) -> None:
        """Handle a signal, given its number and, unused, the interrupted frame."""
        if self.received:
            return
        self.number = number
        for repeated in REPEATED:
            self._listen(repeated)
        if number == signal.SIGINT and os.environ.get("RANK", "0") == "0":
            after = f", from {RELAY_S:g} s on," if _under_torchrun() else ""
            text = (
                "megapipe: Ctrl-C: saves and ends after this iteration. "
                f"A second one{after} ends it at once\n"
            )
            # Not by print, which is not safe inside a signal handler.
            with suppress(OSError):
                os.write(2, text.encode())


def _under_torchrun() -> bool:
    return "TORCHELASTIC_RUN_ID" in os.environ
