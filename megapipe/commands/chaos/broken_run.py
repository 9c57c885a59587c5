"""A launch line in progress, as the command sees it: its processes, what it prints, its faults and its checkpoints."""

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
_ITERATION = re.compile(r" iteration +(\d+)/ *\d+ \|.*? learning rate: \S+ \|(.*?)\| number of skipped")
_TROUBLE = ("megapipe:", "ALARM", "DAMAGED", "error:", "Error", "belonged to a run that is gone")


class Launched:
    """A command with all processes that it starts, on this machine; what it prints goes to `log`.

    Attributes:
        iterations: number and time of each iteration line.
        resumed: the iteration that it went on from.
        saves, failed_saves: complete ones, and those that it has told.
    """

    def __init__(self, command: Sequence[str], log: Path) -> None:
        self.log, self.resumed, self.saves, self.failed_saves = log, 0, 0, 0
        self.iterations: list[tuple[int, float]] = []
        self.trouble: list[float] = []
        self._mark = secrets.token_hex(8)
        self.process = subprocess.Popen(
            command,
            env=os.environ | {MARK: self._mark, "PYTHONUNBUFFERED": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            start_new_session=True,
        )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        with self.log.open("w") as log:
            for line in self.process.stdout:
                log.write(line)
                log.flush()
                if match := _ITERATION.search(line):
                    self.iterations.append((int(match[1]), time.monotonic()))
                elif match := re.search(r"successfully loaded checkpoint from .* at iteration (\d+)", line):
                    self.resumed = int(match[1])
                elif "successfully saved checkpoint" in line:
                    self.saves += 1
                elif any(word in line for word in _TROUBLE):
                    self.trouble.append(time.monotonic())
                    self.failed_saves += "NOT SAVED" in line

    def poll(self) -> int | None:
        """The exit status of the command; None while it runs."""
        return self.process.poll()

    def wait(self) -> int:
        """Its exit status."""
        code = self.process.wait()
        self._reader.join(60)
        return code

    def end(self) -> int:
        """Kill what is left: what is stopped, or still trains when the time is over."""
        self.signal_all(signal.SIGKILL)
        return self.wait()

    def left_behind(self, limit_s: float) -> list[int]:
        """Processes that the command has left behind."""
        until = time.monotonic() + limit_s
        while (left := self.pids()) and self.process.poll() is not None and time.monotonic() < until:
            time.sleep(0.1)
        return left if self.process.poll() is not None else []

    def pids(self) -> list[int]:
        """Processes that this command started and that have not ended."""
        mark, found = f"{MARK}={self._mark}", []
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit() and mark in _words(int(entry.name), "environ"):
                found.append(int(entry.name))
        return found

    def ranks(self) -> list[int]:
        """Processes that train or write for one that does: all but the launcher, if there is one."""
        found = [pid for pid in self.pids() if any(word.startswith("RANK=") for word in _words(pid, "environ"))]
        return sorted(found) or ([self.process.pid] if self.process.poll() is None else [])

    def signal_all(self, number: int) -> None:
        """Send a signal to every process."""
        for pid in self.pids():
            with suppress(ProcessLookupError):
                os.kill(pid, number)

    def hit(self, draw: random.Random, number: signal.Signals, *, launcher: bool = False, where: str = "") -> str:
        """Send a signal to a drawn rank, or to the launcher. Returns: what was done; empty if it has ended already."""
        ranks = self.ranks()
        if not ranks:
            return ""
        alone, pid = ranks == [self.process.pid], ranks[draw.randrange(len(ranks))]
        who = "the launcher" if launcher and not alone else _name(pid)
        try:
            os.kill(self.process.pid if launcher else pid, number)
        except ProcessLookupError:
            return ""
        return f"{number.name} to {who} {where}".rstrip()

    def sees(self, what: Callable[[], bool], limit_s: float) -> bool:
        """Wait until it is so, for the process's life and at most limit_s."""
        until = time.monotonic() + limit_s
        while time.monotonic() < until and self.process.poll() is None:
            if what():
                return True
            time.sleep(0.002)
        return False

    def waits(self, seconds: float, until: float) -> bool:
        """Let it train; False if it ends or the time is over before."""
        self.sees(lambda: time.monotonic() >= until, seconds)
        return self.process.poll() is None and time.monotonic() < until


@dataclass
class Fault:
    """A fault: what was done to a run and what came of it.

    Attributes:
        noticed_s: until the run said a word about it or ended.
        healed_s: until the next iteration that is beyond those before.
        lost: iterations that were trained again.
    """

    kind: str
    run: Launched
    noticed_s: float | None = None
    healed_s: float | None = None
    lost: int = 0

    def __post_init__(self) -> None:
        self.now()

    def now(self) -> None:
        """Let it happen."""
        self.at = time.monotonic()
        self.iteration = self.run.iterations[-1][0] if self.run.iterations else self.run.resumed

    def watch(self, *, ends: bool) -> None:
        """Wait until the run has said or done something about it; one that need not end it is only looked at."""
        self.run.sees(lambda: bool(self._said()) or not ends, 600)
        said = self._said()
        if said or ends:
            self.noticed_s = (said[0] if said else time.monotonic()) - self.at

    def look(self, run: Launched) -> None:
        """Has training gone on?"""
        after = [(n, at) for n, at in run.iterations if at > self.at + (self.noticed_s or 0)]
        if self.healed_s is None and after:
            self.healed_s = after[0][1] - self.at
            reached = max((n for n, at in self.run.iterations if at <= after[0][1]), default=self.iteration)
            self.lost = max(0, reached + 1 - after[0][0]) if run is not self.run or reached >= after[0][0] + 1 else 0

    def _said(self) -> list[float]:
        return [at for at in self.run.trouble if at > self.at]


def _name(pid: int) -> str:
    environment, command = (_words(pid, file) for file in ("environ", "cmdline"))
    rank = next((word.removeprefix("RANK=") for word in environment if word.startswith("RANK=")), "0")
    return f"the writer of rank {rank}" if "megapipe.checkpoint.writer" in command else f"rank {rank}"


def _words(pid: int, file: str) -> list[str]:
    try:
        return Path(f"/proc/{pid}/{file}").read_text(errors="replace").split("\0")
    except OSError:
        return []  # it has ended


def newest_sound(root: Path) -> Path | None:
    """The newest checkpoint whose files are what its manifest says."""
    for iteration in reversed(commit.iterations_in(root)):
        folder = commit.folder_of(root, iteration)
        with suppress(CheckpointError, OSError):
            files = commit.read_manifest(folder)
            commit.verify(folder, files, files)
            return folder
    return None


def difference(a: Path, b: Path) -> tuple[int, list[str]]:
    """Number of tensors in two checkpoints of one layout, and the names of those that differ in a bit."""

    def tensors(folder: Path) -> dict[tuple[str, str], torch.Tensor]:
        found = {}
        for path in sorted(folder.glob("*.safetensors")):
            with safe_open(path, "pt") as file:
                found.update({(path.name, name): file.get_tensor(name) for name in file.keys()})  # noqa: SIM118
        return found

    one, other = tensors(a), tensors(b)
    both = one.keys() & other.keys()
    differing = {name for _, name in one.keys() ^ other.keys()}
    if json.loads((a / STATE).read_text())["state"] != json.loads((b / STATE).read_text())["state"]:
        differing.add(STATE)
    differing |= {key[1] for key in both if not torch.equal(_bits(one[key]), _bits(other[key]))}
    return len(one), sorted(differing)


def numbers(logs: Path, unbroken: Path, until: int) -> tuple[int, list[int]]:
    """The number of iterations that printed their numbers in both, and those of which any launch printed others."""

    def printed(path: Path) -> list[tuple[int, str]]:
        found = map(_ITERATION.search, path.read_text(errors="replace").splitlines())
        return [(int(match[1]), match[2]) for match in found if match]

    whole = dict(printed(unbroken))
    rows = [row for path in sorted(logs.glob("launch-*.log")) for row in printed(path) if row[0] <= until]
    return len({n for n, _ in rows}), sorted({n for n, text in rows if whole.get(n) != text})


def _bits(x: torch.Tensor) -> torch.Tensor:
    return x.contiguous().flatten().view(torch.uint8)
