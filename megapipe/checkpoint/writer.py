"""The process beside a rank that writes its part of checkpoints out of shared memory, while the rank trains.

It lives as long as the rank, is told of a save by a line and answers by one when the checkpoint is complete, with empty
ones until then. It knows neither torch nor groups: the writers of all ranks meet in the folder. Each leaves the digests
of its files there; the first rank's waits for all of them and commits as a save without it does; the others wait for
that. A file FOLDER.failed ends everyone's waiting.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TypedDict

from megapipe.checkpoint import commit
from megapipe.checkpoint.retention import Keep, retain

_AT_ONCE = 1 << 24
BEAT_S = 0.5
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
"""Signals that a scheduler sends to every process of a step, and a terminal to all of its group."""


class Job(TypedDict):
    """One save of one rank.

    Attributes:
        files: name -> where it begins in the shared memory, and its size.
        texts: name -> content of other files.
        keep: as `retention.retain` takes it.
    """

    folder: str
    iteration: int
    rank: int
    ranks: int
    files: dict[str, tuple[int, int]]
    texts: dict[str, str]
    keep: Keep


class Failed(Exception):
    """Another rank's part has failed."""


def marker(folder: Path) -> Path:
    """The file that says a save has failed."""
    return folder.with_name(f"{folder.name}.failed")


def write(job: Job, memory: int) -> list[int]:
    """Write this rank's part, until the checkpoint is complete. memory: a file descriptor.

    Returns: the iterations whose checkpoints were removed then, on the first rank.
    """
    folder = Path(job["folder"])
    for name, (offset, size) in job["files"].items():
        with (folder / name).open("wb") as file:
            done = 0
            while done < size:
                done += os.sendfile(file.fileno(), memory, offset + done, min(size - done, _AT_ONCE))
    for name, text in job["texts"].items():
        commit.write_durably(folder / name, text)
    digests = commit.digest(folder, [*job["files"], *job["texts"]])
    part = folder / f"rank-{job['rank']}.digests"
    commit.write_durably(part.with_suffix(".tmp"), json.dumps(digests))
    # Under its name only when it is whole: the first rank reads it as soon as it is there.
    os.replace(part.with_suffix(".tmp"), part)
    # Every rank waits for the whole, so that each of them can say what is complete.
    if job["rank"]:
        final = commit.folder_of(folder.parent, job["iteration"])
        _wait(folder, lambda: (final / commit.MANIFEST).exists())
        return []
    parts = [folder / f"rank-{rank}.digests" for rank in range(job["ranks"])]
    _wait(folder, lambda: all(part.exists() for part in parts))
    files = {name: entry for part in parts for name, entry in json.loads(part.read_text()).items()}
    for part in parts:
        part.unlink()
    return retain(commit.commit(folder, job["iteration"], files), job["keep"])


def _wait(folder: Path, done: Callable[[], bool]) -> None:
    while not done():
        if marker(folder).exists():
            raise Failed("another rank could not write its part")
        time.sleep(0.02)


@contextmanager
def _signs_of_life() -> Iterator[None]:
    """An empty line now and then. A process that is stopped gives none; one whose disk is slow does."""
    over = threading.Event()

    def beat() -> None:
        while not over.wait(BEAT_S):
            os.write(sys.stdout.fileno(), b"\n")

    thread = threading.Thread(target=beat, daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def _main(memory: int, rank: int) -> None:
    # Signals are for the rank, which waits for this process before it leaves; its end, however it comes, is the end.
    for number in SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    ctypes.CDLL(None).prctl(1, signal.SIGKILL, 0, 0, 0)  # PR_SET_PDEATHSIG
    if os.getppid() != rank:
        return
    for line in sys.stdin:
        job: Job = json.loads(line)
        problem, removed = "", list[int]()
        try:
            with _signs_of_life():
                removed = write(job, memory)
        except Failed as error:
            problem = str(error)
        except Exception as error:
            problem = f"{job['folder']}: {error}" if isinstance(error, OSError) else f"{type(error).__name__}: {error}"
            with suppress(OSError):
                marker(Path(job["folder"])).touch()
        print(json.dumps([problem, removed]), flush=True)


if __name__ == "__main__":
    _main(*map(int, sys.argv[1:]))
