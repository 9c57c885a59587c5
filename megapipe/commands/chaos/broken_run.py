"""A launched command as `megapipe chaos` sees it: processes, output, faults and checkpoints."""

from __future__ import annotations

import json
import os
import random
import re
import secrets
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import safe_open

from megapipe.checkpoint import commit
from megapipe.checkpoint.save_load import STATE
from megapipe.errors import CheckpointError

MARK = "MEGAPIPE_CHAOS"
"""The environment variable by which the processes of a launch are found."""
# The number of an iteration, and all that it prints from the loss to the norms.
_ITERATION = re.compile(
    r" iteration +(\d+)/ *\d+ \|.*? learning rate: \S+ \|(.*?)\| number of skipped"
)
_RESUMED = re.compile(r"successfully loaded checkpoint from .* at iteration (\d+)")
# A line with one of these words shows that the run has noticed a fault.
_TROUBLE = (
    "megapipe:",
    "ALARM",
    "DAMAGED",
    "error:",
    "Error",
    "belonged to a run that is gone",
    "failed (exitcode",
)


class Launched:
    """A running command, such as torchrun, with all processes that it starts on this machine.

    `hit` sends a signal to one rank, `signal_all` to all processes, and `end` kills all. `sees`
    waits for a condition, `trains` for some seconds, and `wait` until the command ends.

    `poll` returns the exit status, `pids` all living processes, `ranks` the living training
    processes, and `orphans` the processes that outlive the command.

    Attributes:
        log: the file to which the command's output is copied.
        iterations: (iteration, time.monotonic() when it was read) of each iteration line.
        resumed: the iteration of the checkpoint that was loaded; 0 if none was.
        saves: the number of complete checkpoints that were reported.
        failed_saves: the number of failed saves that were reported.
        trouble: time.monotonic() at each line that reports a fault.
    """

    def __init__(self, command: Sequence[str], log: Path) -> None:
        self.log = log
        self.resumed = 0
        self.saves = 0
        self.failed_saves = 0
        self.iterations: list[tuple[int, float]] = []
        self.trouble: list[float] = []
        # Ranks outlive a killed launcher and lose their parent, but they keep its environment. A
        # mark in the environment finds them all.
        self._mark = secrets.token_hex(8)
        self.process = subprocess.Popen(
            command,
            env=os.environ | {MARK: self._mark, "PYTHONUNBUFFERED": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            # In a session of its own: Ctrl-C reaches this program alone.
            start_new_session=True,
        )
        # A full pipe would stop the run, so a thread reads it all the time.
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        """Copy the output to the log, line by line, and note iterations, saves and faults."""
        assert self.process.stdout is not None
        with self.log.open("w") as log:
            for line in self.process.stdout:
                log.write(line)
                # The user may watch the log while the run goes on.
                log.flush()
                if match := _ITERATION.search(line):
                    self.iterations.append((int(match[1]), time.monotonic()))
                elif match := _RESUMED.search(line):
                    self.resumed = int(match[1])
                elif "successfully saved checkpoint" in line:
                    self.saves += 1
                elif any(word in line for word in _TROUBLE):
                    self.trouble.append(time.monotonic())
                    self.failed_saves += "NOT SAVED" in line

    def poll(self) -> int | None:
        """Return the exit status of the command; None while it runs."""
        return self.process.poll()

    def wait(self) -> int:
        """Wait until the command has ended. Return its exit status."""
        code = self.process.wait()
        # The last lines may still be in the pipe. A rank that was orphaned keeps the pipe open.
        self._reader.join(60)
        return code

    def end(self) -> int:
        """Kill every process of the command, stopped ones too. Return the exit status."""
        self.signal_all(signal.SIGKILL)
        return self.wait()

    def orphans(self, limit_s: float) -> list[int]:
        """Wait up to `limit_s` seconds until all processes of an ended command have ended.

        Returns: the ids of the processes that still live. Empty if the command itself goes on.
        """
        until = time.monotonic() + limit_s
        while time.monotonic() < until:
            if self.process.poll() is None or not self.pids():
                return []
            time.sleep(0.1)
        if self.process.poll() is None:
            return []
        return self.pids()

    def pids(self) -> list[int]:
        """Return the ids of the processes that the command started and that have not ended."""
        mark = f"{MARK}={self._mark}"
        found = []
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit() and mark in _words(int(entry.name), "environ"):
                found.append(int(entry.name))
        return found

    def ranks(self) -> list[int]:
        """Return the process ids of the ranks and of their checkpoint writers."""
        found = sorted(pid for pid in self.pids() if _rank_of(pid) is not None)
        # A command without a launcher is its only rank, and has no RANK.
        if not found and self.process.poll() is None:
            return [self.process.pid]
        return found

    def signal_all(self, number: int) -> None:
        """Send the signal of this number to every process of the command."""
        for pid in self.pids():
            with suppress(ProcessLookupError):
                os.kill(pid, number)

    def hit(
        self,
        draw: random.Random,
        number: signal.Signals,
        *,
        launcher: bool = False,
        where: str = "",
    ) -> str:
        """Send a signal to a drawn rank, or to the launcher.

        Args:
            draw: chooses the rank.
            number: the signal.
            launcher: hit the launcher, if there is one.
            where: the moment, for the text that is returned.
        Returns: a text that says the signal and its target; empty if the process has ended.
        """
        ranks = self.ranks()
        if not ranks:
            return ""
        alone = ranks == [self.process.pid]
        # The rank is drawn even for the launcher, so that one seed draws the same faults.
        pid = ranks[draw.randrange(len(ranks))]
        who = _name(pid)
        if launcher and not alone:
            who = "the launcher"
        try:
            os.kill(self.process.pid if launcher else pid, number)
        except ProcessLookupError:
            return ""
        return f"{number.name} to {who} {where}".rstrip()

    def sees(self, what: Callable[[], bool], limit_s: float) -> bool:
        """Wait until `what()` is true, and return True.

        Args:
            what: a condition, which is asked again and again.
            limit_s: seconds to wait at most.
        Returns: False if the command ends first, or the time is over.
        """
        until = time.monotonic() + limit_s
        while time.monotonic() < until and self.process.poll() is None:
            if what():
                return True
            # Some moments are short: small checkpoints are written within milliseconds.
            time.sleep(0.002)
        return False

    def trains(self, seconds: float, until: float) -> bool:
        """Let the run train for some seconds.

        Args:
            seconds: how long.
            until: a time of time.monotonic() at which the wait ends in any case.
        Returns: False if the run ends first, or the clock reaches `until`.
        """
        self.sees(lambda: time.monotonic() >= until, seconds)
        return self.process.poll() is None and time.monotonic() < until


@dataclass
class Fault:
    """A fault that was injected into a run, and its consequences.

    Call `now` when the fault is injected, `watch` after that, and `look` until the run has
    recovered.

    Attributes:
        kind: the kind of fault, such as "kill", from `main.KINDS` or `main.IN_MEMORY`.
        run: the launch into which the fault was injected.
        noticed_s: seconds until the run reported the fault or ended; None if it did neither.
        healed_s: seconds until the run printed an iteration again; None before that.
        lost: iterations that were trained a second time.
    """

    kind: str
    run: Launched
    noticed_s: float | None = None
    healed_s: float | None = None
    lost: int = 0

    def __post_init__(self) -> None:
        self.now()

    def now(self) -> None:
        """Record that the fault happens now, in the present iteration."""
        self.at = time.monotonic()
        self.iteration = self.run.resumed
        if self.run.iterations:
            self.iteration, _ = self.run.iterations[-1]

    def watch(self, *, ends: bool) -> None:
        """Wait until the run has reported the fault or ended, if the fault must end it.

        The wait lasts at most 600 seconds.

        Args:
            ends: whether the fault must end the run. If False, do not wait.
        """
        self.run.sees(lambda: bool(self._reported()) or not ends, 600)
        if reported := self._reported():
            self.noticed_s = reported[0] - self.at
        # A run that ends without a word has noticed the fault too.
        elif ends:
            self.noticed_s = time.monotonic() - self.at

    def look(self, run: Launched) -> None:
        """Record when training has continued after the fault, and how many iterations were lost.

        Args:
            run: the launch that was broken, or a later one.
        """
        # Iterations before that moment may come from ranks that the fault has not reached yet.
        noticed = self.at + (self.noticed_s or 0)
        after = [(n, at) for n, at in run.iterations if at > noticed]
        if self.healed_s is not None or not after:
            return
        first, at_first = after[0]
        self.healed_s = at_first - self.at
        reached = max(
            (n for n, at in self.run.iterations if at <= at_first), default=self.iteration
        )
        # A launch that survived has trained nothing again unless its numbers went back.
        if run is not self.run or reached >= first + 1:
            self.lost = max(0, reached + 1 - first)

    def _reported(self) -> list[float]:
        """Return time.monotonic() at each report of a fault since this fault happened."""
        return [at for at in self.run.trouble if at > self.at]


def variables(pid: int) -> dict[str, str]:
    """Return the environment of the process `pid` by name; empty if the process has ended."""
    pairs = [word.partition("=") for word in _words(pid, "environ")]
    return {name: value for name, _, value in pairs}


def _rank_of(pid: int) -> str | None:
    """Return the rank in the environment of the process `pid`; None if it has none."""
    return variables(pid).get("RANK")


def _name(pid: int) -> str:
    """Return a name of the process `pid` for the log, such as "rank 2" or its checkpoint writer."""
    rank = _rank_of(pid) or "0"
    if "megapipe.checkpoint.writer" in _words(pid, "cmdline"):
        return f"the writer of rank {rank}"
    return f"rank {rank}"


def _words(pid: int, file: str) -> list[str]:
    """Return the words of the file /proc/PID/FILE; [] if the process `pid` has ended.

    Args:
        file: environ or cmdline. In both, words are separated by zero bytes.
    """
    try:
        return Path(f"/proc/{pid}/{file}").read_text(errors="replace").split("\0")
    except OSError:
        return []


def newest_sound(root: Path) -> Path | None:
    """Return the newest undamaged checkpoint in the folder `root`; None if there is none."""
    for iteration in reversed(commit.iterations_in(root)):
        folder = commit.folder_of(root, iteration)
        # The last faults may have damaged the newest ones.
        with suppress(CheckpointError, OSError):
            files = commit.read_manifest(folder)
            commit.verify(folder, files, files)
            return folder
    return None


def difference(a: Path, b: Path) -> tuple[int, list[str]]:
    """Compare two checkpoints of one parallel layout bit by bit.

    Args:
        a, b: the folders of the checkpoints.
    Returns: (the number of tensors of `a`, the names of all tensors that differ). If counters or
        random states differ, the name of their file is among the names.
    """
    tensors = _tensors(a)
    others = _tensors(b)
    # A tensor that only one of them has.
    differing = {name for _, name in tensors.keys() ^ others.keys()}
    for key in tensors.keys() & others.keys():
        # As bytes: torch.equal takes 0.0 and -0.0 for equal, and no NaN for equal to itself.
        if not torch.equal(_bytes(tensors[key]), _bytes(others[key])):
            differing.add(key[1])
    if _state(a) != _state(b):
        differing.add(STATE)
    return len(tensors), sorted(differing)


def _tensors(folder: Path) -> dict[tuple[str, str], torch.Tensor]:
    """Return {(name of the file, name of the tensor): tensor} of a checkpoint."""
    found = {}
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, "pt") as file:
            for name in file.keys():  # noqa: SIM118
                found[path.name, name] = file.get_tensor(name)
    return found


def _state(folder: Path) -> object:
    """Return the state of the run in a checkpoint: counters and random states."""
    # The rest of the file is the configuration, which names the folder of the run.
    return json.loads((folder / STATE).read_text())["state"]


def _bytes(x: torch.Tensor) -> torch.Tensor:
    """Return the bytes of a tensor as a vector of uint8."""
    return x.contiguous().flatten().view(torch.uint8)


def numbers(logs: Path, unbroken: Path, until: int) -> tuple[int, list[int]]:
    """Compare the losses and norms that the broken launches printed with the unbroken run's.

    Args:
        logs: the folder with a log of each launch.
        unbroken: the log of the unbroken run.
        until: the last iteration that counts.
    Returns: (how many iterations were compared, the iterations for which a launch printed other
        numbers).
    """
    expected = dict(_printed(unbroken))
    # An iteration that was trained twice was printed twice, and both must be right.
    rows = []
    for path in sorted(logs.glob("launch-*.log")):
        rows += [row for row in _printed(path) if row[0] <= until]
    return len({n for n, _ in rows}), sorted({n for n, text in rows if expected.get(n) != text})


def _printed(log: Path) -> list[tuple[int, str]]:
    """Return (iteration, its losses and norms as text) of each iteration line of a log file."""
    found = map(_ITERATION.search, log.read_text(errors="replace").splitlines())
    return [(int(match[1]), match[2]) for match in found if match]
