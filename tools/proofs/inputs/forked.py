"""A command in a forked process of its own, with a limit of its time: what it printed and how it
ended.
"""

from __future__ import annotations

import ctypes
import multiprocessing.process
import os
import re
import resource
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn


@dataclass(frozen=True)
class Limits:
    """Limits of a forked command.

    Attributes:
        seconds: computing longer ends it, and waiting for ten times as long: other programs take
            their turns.
        ranks: False ends it where it would start a process, after it has printed what it hands
            over.
        powerless: root gives up the right to read what nobody may read.
    """

    seconds: float
    ranks: bool = True
    powerless: bool = False


def block_signals() -> None:
    """Let `run_forked` wait for the end of its child. To be called once, before it."""
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGCHLD])


def run_forked(work: Callable[[], object], here: Path, limits: Limits) -> tuple[int | None, str]:
    """Run a command in a fork of this process, in the folder `here`.

    Returns: its exit status, None if it was killed for taking too long, and what it printed.
    """
    log = here.parent / "log"
    log.write_bytes(b"")
    sys.stdout.flush()
    pid = os.fork()
    if not pid:
        _child(work, here, log, limits)
    until, status = time.monotonic() + 10 * limits.seconds, None
    while status is None and time.monotonic() < until:
        signal.sigtimedwait([signal.SIGCHLD], until - time.monotonic() + 0.001)
        ended, code = os.waitpid(pid, os.WNOHANG)
        status = code if ended else None
    with suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)  # with what it has started
    if status is None:
        os.waitpid(pid, 0)
    with log.open("rb") as file:
        text = file.read(200_000).decode(errors="replace")
    result = None if status is None else os.waitstatus_to_exitcode(status)
    return (None if result == -signal.SIGXCPU else result), text


def _child(work: Callable[[], object], here: Path, log: Path, limits: Limits) -> NoReturn:
    """The command in this process, which ends with it."""
    code = 70  # of an error of this tool
    try:
        os.setsid()
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGCHLD])
        file = os.open(log, os.O_WRONLY | os.O_APPEND)
        for number in (1, 2):
            os.dup2(file, number)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        resource.setrlimit(resource.RLIMIT_AS, (24 << 30, 24 << 30))
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 28, 1 << 28))
        resource.setrlimit(resource.RLIMIT_CPU, (max(1, round(limits.seconds)), 1000))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        # Root reads what nobody may, but not without its capabilities.
        if limits.powerless and os.geteuid() == 0:
            header, none = (ctypes.c_uint32 * 2)(0x20080522, 0), (ctypes.c_uint32 * 6)()
            ctypes.CDLL(None).capset(header, none)
        os.chdir(here)
        if not limits.ranks:
            _without_ranks()
        work()
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else 0 if end.code is None else 1
        if code == 1 and not isinstance(end.code, int):
            print(end.code, file=sys.stderr)
    except BaseException:
        traceback.print_exc()
        code = 1
    finally:
        for stream in (sys.stdout, sys.stderr):
            try:
                stream.flush()
            except BaseException:
                code = 70
        os._exit(code)


def _without_ranks() -> None:
    """A command that comes as far as its processes has taken what it was given: what it hands over
    is printed.
    """

    def end(*given: Any, **named: Any) -> NoReturn:
        process = given[0]
        handed = (
            getattr(process, "_target", None),
            getattr(process, "_args", None),
            given[1:],
            named,
        )
        # Without addresses, and without the free port that run_ranks hands over as the third
        # argument.
        plain = re.sub(r" at 0x\w+", "", repr(handed))
        # run_ranks hands over a free port as the third argument.
        print(
            "handed to a process:",
            re.sub(r"(?<=<function _rank>, )\((\d+), (\d+), \d+", r"(\1, \2, PORT", plain),
        )
        sys.stdout.flush()
        os._exit(0)

    multiprocessing.process.BaseProcess.start = end  # type: ignore[method-assign]
    subprocess.Popen.__init__ = end  # type: ignore[method-assign]
    os.execv = end
