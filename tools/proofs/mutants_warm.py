"""A process that has imported the package and collected its tests: a fork of it runs some with a
file changed.

Nothing is imported again. The functions that exist get the code that their changed source has. What
an import runs is judged elsewhere.
"""

from __future__ import annotations

import contextlib
import gc
import os
import shutil
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from types import CodeType, FunctionType
from typing import NamedTuple, NoReturn

import pytest

COLD = 3
"""The exit status of a fork whose functions cannot take the changed code."""


class Task(NamedTuple):
    """A copy of the repository, a file that is changed there, its source, the tests that judge it
    and their seconds.
    """

    folder: str
    path: str
    source: str
    tests: Sequence[str]
    limit: float


class Warm:
    """A plugin of pytest that does tasks in forks, in place of running all that it has collected.

    Args:
        connections: where tasks come from, each for a process of its own; it answers with result,
            test and seconds.
        folder: what was collected lies there.
    """

    def __init__(self, connections: Sequence[Connection], folder: Path) -> None:
        self.connections = connections
        self.folder = folder
        self.failed = ""

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        """Do tasks until there is none."""
        items = {item.nodeid: item for item in session.items}
        functions = _functions()
        children = [
            os.fork() or self._serve(connection, items, functions)
            for connection in self.connections
        ]
        for child in children:
            os.waitpid(child, 0)
        return True

    def _serve(
        self,
        connection: Connection,
        items: Mapping[str, pytest.Item],
        functions: Mapping[str, Sequence[FunctionType]],
    ) -> NoReturn:
        own = self.folder.with_name(f"tmp{os.getpid()}")
        own.mkdir()
        os.environ["PYTEST_DEBUG_TEMPROOT"] = str(own)
        report = own / "failed"
        connection.send(len(items))
        for task in iter(connection.recv, None):
            report.write_text("")
            run = _Run(self, items, functions.get(str(self.folder / task.path), ()), report)
            result, seconds = forked(partial(run, task), task.limit)
            connection.send((result, report.read_text(), seconds))
            for folder in own.glob("pytest-*"):
                shutil.rmtree(folder, ignore_errors=True)
        os._exit(0)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Keep the first test that failed."""
        if report.failed and not self.failed:
            self.failed = report.nodeid


@dataclass(frozen=True)
class _Run:
    """The work of a forked process; it returns the exit status."""

    warm: Warm
    items: Mapping[str, pytest.Item]
    functions: Sequence[FunctionType]
    report: Path

    def __call__(self, task: Task) -> int:
        try:
            change(self.functions, task.source)
        except ValueError:
            return COLD
        # What is imported later, and what tests start, finds the changed file.
        sys.path[:] = [task.folder if path == str(self.warm.folder) else path for path in sys.path]
        os.environ["PYTHONPATH"] = task.folder
        os.chdir(task.folder)
        chosen = [self.items[test] for test in task.tests if test in self.items]
        following = [*chosen[1:], None]
        for item, after in zip(chosen, following, strict=True):
            item.ihook.pytest_runtest_protocol(item=item, nextitem=after)
            if self.warm.failed:
                self.report.write_text(self.warm.failed)
                return 1
        return 0


def _functions() -> dict[str, list[FunctionType]]:
    """Return all functions that exist by the path of their file."""
    gc.unfreeze()  # what is frozen is not listed
    found: dict[str, list[FunctionType]] = {}
    for x in gc.get_objects():
        if type(x) is FunctionType:  # no look at __class__, which may be made up
            found.setdefault(x.__code__.co_filename, []).append(x)
    gc.freeze()
    return found


def change(functions: Sequence[FunctionType], source: str) -> None:
    """Give functions of one file the code that they have in another source of it.

    Raises: ValueError if one of them cannot take it.
    """
    if not functions:
        return
    path = functions[0].__code__.co_filename
    codes: dict[tuple[str, int], list[CodeType]] = {}
    for code in _codes(compile(source, path, "exec", dont_inherit=True)):
        codes.setdefault((code.co_qualname, code.co_firstlineno), []).append(code)
    for function in functions:
        old = function.__code__
        new = codes.get((old.co_qualname, old.co_firstlineno), [])
        if len(new) == 1 and new[0] != old:
            function.__code__ = new[0]


def _codes(code: CodeType) -> Iterator[CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _codes(constant)


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
    results = {0: "survived", COLD: "cold"}
    return results.get(os.waitstatus_to_exitcode(status), "killed"), seconds


def _end(body: Callable[[], int]) -> NoReturn:
    status = 1
    try:
        os.setsid()
        status = body()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)
