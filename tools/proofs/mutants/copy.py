"""A copy of the repository, in which mutants are made and judged."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import sys
import time
from collections.abc import Callable, Sequence
from importlib import import_module
from pathlib import Path
from typing import NamedTuple, NoReturn

from tools.proofs.mutants.draw import ROOMS, ROOT, Mutant
from tools.proofs.mutants.lines import Lines

COPIED = (
    "megapipe",
    "tests",
    "tools",
    "examples",
    "docs",
    "scripts",
    "README.md",
    "pretrain_gpt.py",
    "pyproject.toml",
)
WARM = (
    "hypothesis.strategies",
    "numpy",
    "pytest",
    "safetensors.torch",
    "torch.distributed.device_mesh",
    "tokenizers",
)


def copy_repository(folder: Path) -> None:
    """Copy all that tests and proofs need to a folder, where it may be changed."""
    for name in COPIED:
        if (ROOT / name).is_dir():
            shutil.copytree(
                ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__")
            )
        else:
            shutil.copy(ROOT / name, folder)


class Judging(NamedTuple):
    """The way to judge a mutant by the tests that run its line.

    Attributes:
        lines: the record; None for rooms with tests of their own.
        seconds: tests are taken until they take so long; at least one.
        patience: on what hangs, as a multiple of a minute.
    """

    lines: Lines | None
    seconds: float
    patience: float


class Copy:
    """The repository where it may be changed, and forks of this process that run tests there."""

    def __init__(self, folder: Path, judges: Judging) -> None:
        self.folder, self.output = folder / "copy", folder / "output"
        self.judges = judges
        self.limits = dict.fromkeys(ROOMS, 600.0)  # seconds
        self.changes = 0
        self.folder.mkdir(parents=True)
        copy_repository(self.folder)
        others = [path for path in sys.path if not Path(path).is_relative_to(ROOT)]
        sys.path[:] = [str(self.folder), *others]
        os.environ |= {
            "PYTHONPATH": str(self.folder),
            "OMP_NUM_THREADS": "1",
        }  # a fork has one thread only
        for name in WARM:
            import_module(name)

    def check(self, mutants: Sequence[Mutant]) -> None:
        """Run the tests of rooms on unchanged code, which compiles everything.

        Raises: SystemExit if they fail.
        """
        for room in dict.fromkeys(mutant.room for mutant in mutants if mutant.room in ROOMS):
            result, by, seconds = self.run(self.tests_of(room), self.limits[room])
            print(f"{room}: {seconds:.1f} s without a change", flush=True)
            self.limits[room] = max(60.0, 4 * seconds)
            if result != "survived":
                why = f"The tests of {room} fail without a change: {result} {by}"
                raise SystemExit(f"{self.output.read_text()}\n{why}")

    def judge(self, mutant: Mutant) -> dict[str, object]:
        """Return the outcome of a mutant: it is killed, hangs, or has survived."""
        path = self.folder / mutant.path
        source, stat = path.read_text(), path.stat()
        lines = source.splitlines()
        lines[mutant.line - 1] = mutant.after
        path.write_text("\n".join(lines) + "\n")
        # A source of another second is compiled anew. What was compiled of the old one holds again
        # afterwards.
        self.changes += 1
        os.utime(path, (stat.st_atime, int(stat.st_mtime) + self.changes))
        if mutant.room in ROOMS:
            result, by, seconds = self.run(self.tests_of(mutant.room), self.limits[mutant.room])
        else:
            result, by, seconds = self._of_lines(mutant, source)
        path.write_text(source)
        os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))
        return {**mutant._asdict(), "result": result, "by": by, "seconds": round(seconds, 1)}

    def _of_lines(self, mutant: Mutant, source: str) -> tuple[str, str, float]:
        lines, most, patience = self.judges
        assert lines is not None
        tests, expected = lines.judges(mutant.path, source, mutant.line, most)
        if not tests:
            return "survived", "no test", 0.0
        return self.run(tests, patience * (60 + max(60.0, 4 * expected)))

    def tests_of(self, room: str) -> list[str]:
        """Return the files with a room's tests."""
        folder, _, names = ROOMS[room][1].partition(": ")
        paths = (Path("tests", folder, name) for name in names.split())
        return [str(path.with_name(f"test_{path.name}.py")) for path in paths]

    def run(self, tests: Sequence[str], limit: float) -> tuple[str, str, float]:
        """Run tests until the first fails. Return the result, the failed test, and seconds."""
        result, seconds = forked(lambda: self._pytest(["-x", *tests]), limit)
        said = self.output.read_text(errors="replace")
        failed = re.search(r"^(?:FAILED|ERROR) (?:tests/)?(\S+)", said, re.M)
        absent = re.findall(r"^ERROR: not found: (.+)$", said, re.M)
        if absent and not failed:
            # pytest runs none if one is not there, as where the change has renamed a parameter.
            left = [test for test in tests if not any(name.endswith(test) for name in absent)]
            if not left or len(left) == len(tests):
                return "survived", "no such test", seconds
            return self.run(left, limit)
        return result, failed[1] if failed else "", seconds

    def _pytest(self, arguments: Sequence[str]) -> int:
        output = os.open(self.output, os.O_CREAT | os.O_TRUNC | os.O_WRONLY)
        for stream in (1, 2):
            os.dup2(output, stream)
        os.chdir(self.folder)
        sys.modules["__main__"] = type(sys)(
            "__main__"
        )  # what multiprocessing starts would import this file
        options = ["-q", "--tb=short", "-p", "no:xdist", "-p", "no:cacheprovider"]
        status: int = import_module("pytest").main([*options, *arguments])
        return status


def forked(body: Callable[[], int], limit: float) -> tuple[str, float]:
    """Call a function in a fork that leads a group of processes; return the result and seconds."""
    begun, ended, status = time.monotonic(), 0, 0
    child = os.fork()
    if not child:
        _end(body)
    while not ended and time.monotonic() < begun + limit:
        time.sleep(0.02)
        ended, status = os.waitpid(child, os.WNOHANG)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child, signal.SIGKILL)  # with the ranks that it has started
    seconds = time.monotonic() - begun
    if not ended:
        os.waitpid(child, 0)
        return "hangs", seconds
    return ("killed" if status else "survived"), seconds


def _end(body: Callable[[], int]) -> NoReturn:
    status = 1
    try:
        os.setsid()
        status = body()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)
