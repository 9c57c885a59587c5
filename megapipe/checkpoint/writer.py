"""A process that writes a rank's part of checkpoints from shared memory, while the rank trains.

It lives as long as the rank. One line on its input begins a save. One line on its output answers
when the checkpoint is complete; empty lines before that are signs of life.

It uses neither torch nor process groups: the writers of all ranks meet in the folder. Each leaves
the digests of its files there. The first rank's writer waits for all digests and commits, as a save
in the foreground does. All others wait for that. A file FOLDER.failed ends all waits.
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

_CHUNK = 1 << 24
"""Bytes that are written at once."""
BEAT_S = 0.5
"""Seconds between two signs of life."""
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
"""Signals that a scheduler sends to every process of a step, and a terminal to its group."""


class Job(TypedDict):
    """One save of one rank, which the rank sends to its writer.

    Attributes:
        folder: the temporary folder to write, which is renamed once all ranks have written.
        iteration: the checkpoint's iteration.
        rank: the global rank.
        ranks: number of ranks.
        files: {name of a safetensors file: (offset in the shared memory, size)}, in bytes.
        texts: {name of a text file, such as state.json: content}; empty except on rank 0.
        keep: which checkpoints stay after the save: (--save-retain-interval, --save-keep-last,
            iterations that may be removed).
    """

    folder: str
    iteration: int
    rank: int
    ranks: int
    files: dict[str, tuple[int, int]]
    texts: dict[str, str]
    keep: Keep


class Failed(Exception):
    """Raised while waiting for other ranks, if one of them could not write its files."""


def marker(folder: Path) -> Path:
    """Return the path of the file that marks a failed save, next to the checkpoint's folder."""
    return folder.with_name(f"{folder.name}.failed")


def write(job: Job, memory: int) -> list[int]:
    """Write this rank's part, and wait until the checkpoint is complete.

    Args:
        job: the save.
        memory: file descriptor of the shared memory.
    Returns: on the first rank, the iterations whose checkpoints were removed; [] on all others.
    Raises: Failed if another rank cannot write its part, OSError if this one cannot.
    """
    folder = Path(job["folder"])
    for name, (offset, size) in job["files"].items():
        with (folder / name).open("wb") as file:
            done = 0
            while done < size:
                count = min(size - done, _CHUNK)
                # The kernel copies; the bytes do not pass through this process.
                done += os.sendfile(file.fileno(), memory, offset + done, count)
    for name, text in job["texts"].items():
        commit.write_durably(folder / name, text)
    digests = commit.digest(folder, [*job["files"], *job["texts"]])
    part = folder / f"rank-{job['rank']}.digests"
    commit.write_durably(part.with_suffix(".tmp"), json.dumps(digests))
    # The first rank reads the file as soon as it exists, so it must be complete then.
    os.replace(part.with_suffix(".tmp"), part)
    # Every rank waits for the commit, so that each of them can report it.
    if job["rank"]:
        final = commit.folder_of(folder.parent, job["iteration"])
        _wait(folder, lambda: (final / commit.MANIFEST).exists())
        return []
    parts = [folder / f"rank-{rank}.digests" for rank in range(job["ranks"])]
    _wait(folder, lambda: all(part.exists() for part in parts))
    files = {}
    for part in parts:
        files.update(json.loads(part.read_text()))
    for part in parts:
        part.unlink()
    return retain(commit.commit(folder, job["iteration"], files), job["keep"])


def _wait(folder: Path, done: Callable[[], bool]) -> None:
    """Wait until `done` returns True.

    Raises: Failed if before that another rank reports that it cannot write to `folder`.
    """
    while not done():
        if marker(folder).exists():
            raise Failed("another rank could not write its part")
        time.sleep(0.02)


@contextmanager
def _signs_of_life() -> Iterator[None]:
    """Return a context in which an empty line goes to stdout every BEAT_S seconds.

    The lines go on while a slow disk delays the save. The lines stop if the process is stopped.
    """
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


def _main(memory: int, parent: int) -> None:
    """Run the writer process: save each Job that arrives on stdin, one after the other.

    The answer on stdout is a line of JSON, [problem or "", removed iterations].

    Args:
        memory: file descriptor of the shared memory.
        parent: process id of the training process, whose end also ends this process.
    """
    # The rank handles signals, and waits for this process before it ends.
    for number in SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    # PR_SET_PDEATHSIG: the kernel kills this process when the rank ends, however it ends.
    ctypes.CDLL(None).prctl(1, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        return
    for line in sys.stdin:
        job: Job = json.loads(line)
        problem = ""
        removed: list[int] = []
        try:
            with _signs_of_life():
                removed = write(job, memory)
        except Failed as error:
            problem = str(error)
        except Exception as error:
            place = job["folder"] if isinstance(error, OSError) else type(error).__name__
            problem = f"{place}: {error}"
            with suppress(OSError):
                marker(Path(job["folder"])).touch()
        print(json.dumps([problem, removed]), flush=True)


if __name__ == "__main__":
    _main(*map(int, sys.argv[1:]))
