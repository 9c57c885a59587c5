"""Arrays that take a while to compute, kept in a folder so that the next start maps them.

Whoever finds no entry and gets its lock file computes it and renames it into place; others that see that folder wait.
The lock saves work and disk, no more: two that build side by side, because one took the other for dead, store the same.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import shutil
import socket
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megapipe.errors import DataError


def cached(
    folder: str | None, key: Mapping[str, object], build: Callable[[], Sequence[NDArray[Any]]]
) -> list[NDArray[Any]]:
    """The arrays of `build`, mapped from `folder` if an entry of this key is there, else computed and stored.

    Args:
        folder: cache folder, None for no cache.
        key: everything the arrays depend on; stored beside them in key.json.
    Raises: DataError for a folder that cannot be written or an entry that cannot be read.
    """
    if folder is None:
        return list(build())
    # The name is a digest of everything the arrays depend on: another setting finds another entry, never a stale one.
    text = json.dumps({"format": 2, **key}, indent=1, sort_keys=True)
    entry = Path(folder) / hashlib.sha256(text.encode()).hexdigest()[:32]
    _once(entry, lambda: _store(entry, text, build()))
    try:
        said = json.loads((entry / _ARRAYS).read_text())
        files = [entry / f"{i}.npy" for i in range(len(said))]
        arrays = [np.load(file, mmap_mode="r", allow_pickle=False).view(np.ndarray) for file in files]
        if (found := _facts(arrays)) != said or len(files) != len([*entry.glob("*.npy")]):
            raise ValueError(f"its arrays are {found}, not {said}")
        return arrays
    except Exception as error:  # numpy takes a header for Python, with the errors of its tokenizer
        raise DataError(f"--data-cache-path entry {entry} is damaged ({error}). Delete it: rm -r {entry}") from error


_ARRAYS = "arrays.json"
_BEAT_S, _STALE_S = 5.0, 60.0
"""Seconds after which a builder says again that it lives, and for which the others believe it without a word."""


def _once(entry: Path, build: Callable[[], None]) -> None:
    """Build the entry, or wait for who does, until it is there."""
    lock = entry.with_name(f".lock-{entry.name}")
    seen: tuple[str, int] | None = None
    since = time.monotonic()
    with contextlib.suppress(OSError):  # a folder that cannot be made: said where the entry is stored
        entry.parent.mkdir(parents=True, exist_ok=True)
    while not entry.is_dir():
        try:
            handle = os.open(lock, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o644)
        except FileExistsError:
            # The holder's beat is watched by this machine's clock: those of two machines may differ by hours.
            if (now := _holder(lock)) != seen:
                seen, since = now, time.monotonic()
            stale = time.monotonic() - since > _STALE_S
            if now is not None and (stale or _dead(now[0])) and not _take_away(lock, now):
                build()  # another user's lock that this one may not remove
                return
            if now is None and stale and lock.exists():
                build()  # nor read
                return
            time.sleep(0.05)
            continue
        except OSError:  # nor written
            build()
            return
        with os.fdopen(handle, "w") as file:
            file.write(f"{socket.gethostname()} {os.getpid()}")
        done = threading.Event()
        threading.Thread(target=_beat, args=(lock, done), daemon=True).start()
        try:
            if not entry.is_dir():
                for left in entry.parent.glob(f".building-{entry.name}-*"):  # of one that was killed
                    shutil.rmtree(left, ignore_errors=True)
                build()
        finally:
            done.set()
            lock.unlink(missing_ok=True)


def _beat(lock: Path, done: threading.Event) -> None:
    while not done.wait(_BEAT_S):
        with contextlib.suppress(OSError):
            os.utime(lock)


def _holder(lock: Path) -> tuple[str, int] | None:
    """The holder of the lock, and when it last said that it lives by the clock of its file system."""
    try:
        return lock.read_text(), lock.stat().st_mtime_ns
    except OSError:
        return None


def _take_away(lock: Path, seen: tuple[str, int]) -> bool:
    """Remove the lock file of a builder that is gone; return False where this user may not.

    The first of those that wait removes it, and the lock of the next builder stays.

    Without the file lock, one that has looked at the old file could remove the new file of one that was faster.
    """
    try:
        with lock.open() as file:
            with contextlib.suppress(OSError):  # a file system without such locks: two may build, and store the same
                fcntl.flock(file, fcntl.LOCK_EX)
            if _holder(lock) == seen:
                lock.unlink()
    except FileNotFoundError:
        pass
    except OSError:
        return False
    return True


def _dead(holder: str) -> bool:
    """Was it a process of this machine that is gone?"""
    host, _, pid = holder.rpartition(" ")
    if host != socket.gethostname() or not pid.isdecimal():
        return False
    try:
        os.kill(int(pid), 0)
    except ProcessLookupError:
        return True
    except OSError:
        pass
    return False


def _facts(arrays: Sequence[NDArray[Any]]) -> list[list[Any]]:
    """Shape and type of each."""
    return [[list(array.shape), array.dtype.str] for array in arrays]


def _store(entry: Path, key: str, arrays: Sequence[NDArray[Any]]) -> None:
    size = sum(a.nbytes for a in arrays)
    try:
        entry.parent.mkdir(parents=True, exist_ok=True)
        temporary = Path(tempfile.mkdtemp(prefix=f".building-{entry.name}-", dir=entry.parent))
        try:
            (temporary / "key.json").write_text(key)
            (temporary / _ARRAYS).write_text(json.dumps(_facts(arrays)))
            for i, array in enumerate(arrays):
                np.save(temporary / f"{i}.npy", array, allow_pickle=False)
            temporary.chmod(0o755)
            # A folder gets its name when all of it is there: who sees the name may map the arrays.
            os.rename(temporary, entry)
        finally:
            shutil.rmtree(temporary, ignore_errors=True)
    except OSError as error:
        if not entry.is_dir():  # else another process was faster, with the same arrays
            raise DataError(
                f"--data-cache-path {entry.parent}: cannot store an index of {size} bytes ({error.strerror}). "
                "Free the space, give another folder or leave the flag out."
            ) from error
