"""Cache arrays that take long to compute in a folder, so that later starts only map them.

One process creates a lock file, computes the arrays and renames a folder of them into place. Other
processes wait for that folder. The lock only saves time and disk: if a live process is mistaken for
a dead one, two processes compute the entry and store equal arrays.
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

_ARRAYS = "arrays.json"
# Seconds after which the process that holds a lock touches the lock file again.
_BEAT_S = 5.0
# Seconds without a touch after which waiting processes consider the holder dead.
_STALE_S = 60.0


def cached(
    folder: str | None,
    key: Mapping[str, object],
    build: Callable[[], Sequence[NDArray[Any]]],
) -> list[NDArray[Any]]:
    """Return the arrays that `build` returns, read from the cache folder if it has them.

    Arrays that are not stored yet are computed and stored first. Arrays of a folder are read-only
    memory maps.

    Args:
        folder: cache folder; None to compute without a cache.
        key: {name: value} of everything that the arrays depend on. Each key has a folder of its
            own, with the key in key.json.
        build: computes the arrays.
    Raises: DataError for a folder that cannot be written or an entry that cannot be read.
    """
    if folder is None:
        return list(build())
    # The entry is named by a digest of the whole key: after a change of any setting an old entry
    # is never found.
    text = json.dumps({"format": 2, **key}, indent=1, sort_keys=True)
    entry = Path(folder) / hashlib.sha256(text.encode()).hexdigest()[:32]
    _once(entry, lambda: _store(entry, text, build()))
    try:
        stored = json.loads((entry / _ARRAYS).read_text())
        files = [entry / f"{i}.npy" for i in range(len(stored))]
        arrays = []
        for file in files:
            mapped = np.load(file, mmap_mode="r", allow_pickle=False)
            arrays.append(mapped.view(np.ndarray))
        found = _facts(arrays)
        if found != stored or len(files) != len([*entry.glob("*.npy")]):
            raise ValueError(f"its arrays are {found}, not {stored}")
        return arrays
    # numpy parses a header as Python source, so a damaged one raises errors of Python's tokenizer.
    except Exception as error:
        raise DataError(
            f"--data-cache-path entry {entry} is damaged ({error}). Delete it: rm -r {entry}"
        ) from error


def _once(entry: Path, build: Callable[[], None]) -> None:
    """Build a cache entry, or wait until another process has built it.

    Args:
        entry: the folder of the entry.
        build: writes the entry.
    """
    lock = entry.with_name(f".lock-{entry.name}")
    seen: tuple[str, int] | None = None
    since = time.monotonic()
    # A folder that cannot be created is reported by `_store`.
    with contextlib.suppress(OSError):
        entry.parent.mkdir(parents=True, exist_ok=True)
    while not entry.is_dir():
        try:
            handle = os.open(lock, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o644)
        except FileExistsError:
            now = _holder(lock)
            # Measure the time since the last touch with this machine's clock: the time stamp comes
            # from another clock, which may differ by hours.
            if now != seen:
                seen = now
                since = time.monotonic()
            stale = time.monotonic() - since > _STALE_S
            if now is None:
                # a lock file that this user may not read
                blocked = stale and lock.exists()
            else:
                # a lock file of another user, which this process may not delete
                blocked = (stale or _dead(now[0])) and not _take_away(lock, now)
            if blocked:
                build()
                return
            time.sleep(0.05)
            continue
        except OSError:
            # No lock file can be created here; if nothing can be stored either, `_store` says so.
            build()
            return
        with os.fdopen(handle, "w") as file:
            file.write(f"{socket.gethostname()} {os.getpid()}")
        _build_locked(entry, lock, build)


def _build_locked(entry: Path, lock: Path, build: Callable[[], None]) -> None:
    """Build the cache entry unless it exists by now, and delete the lock file.

    Until then the lock file is touched every few seconds, so that other processes see that this one
    lives.

    Args:
        entry: the folder of the entry.
        lock: the lock file, which this process has made.
        build: writes the entry.
    """
    done = threading.Event()
    threading.Thread(target=_beat, args=(lock, done), daemon=True).start()
    try:
        if not entry.is_dir():
            # Unfinished folders of processes that were killed would fill the disk.
            for left in entry.parent.glob(f".building-{entry.name}-*"):
                shutil.rmtree(left, ignore_errors=True)
            build()
    finally:
        done.set()
        lock.unlink(missing_ok=True)


def _beat(lock: Path, done: threading.Event) -> None:
    """Touch the lock file every few seconds until `done` is set."""
    while not done.wait(_BEAT_S):
        with contextlib.suppress(OSError):
            os.utime(lock)


def _holder(lock: Path) -> tuple[str, int] | None:
    """Return ("host pid" of the process that holds a lock file, time of the file's last touch).

    The time is in nanoseconds, by the clock of the file system. None if the file cannot be read.
    """
    try:
        return lock.read_text(), lock.stat().st_mtime_ns
    except OSError:
        return None


def _take_away(lock: Path, seen: tuple[str, int]) -> bool:
    """Delete the lock file of a dead process; return False if this user may not.

    Only the first waiting process deletes it. The flock is why: without it, a slow process that
    has read the old lock file could delete the new one of a faster process.

    Args:
        lock: the lock file.
        seen: the lock file's state, from `_holder`; a file that has changed since is left alone.
    """
    try:
        with lock.open() as file:
            # On a file system without such locks two processes may build, and store equal arrays.
            with contextlib.suppress(OSError):
                fcntl.flock(file, fcntl.LOCK_EX)
            if _holder(lock) == seen:
                lock.unlink()
    except FileNotFoundError:
        pass
    except OSError:
        return False
    return True


def _dead(holder: str) -> bool:
    """Return whether a process of this machine does not run any more.

    Args:
        holder: "host pid". A process of another machine counts as alive.
    """
    host, _, pid = holder.rpartition(" ")
    if host != socket.gethostname() or not pid.isdecimal():
        return False
    try:
        # Signal 0 asks whether the process exists and does nothing to it.
        os.kill(int(pid), 0)
    except ProcessLookupError:
        return True
    except OSError:
        pass
    return False


def _facts(arrays: Sequence[NDArray[Any]]) -> list[list[Any]]:
    """Return the shape and dtype of each array, in the form JSON stores."""
    return [[list(array.shape), array.dtype.str] for array in arrays]


def _store(entry: Path, key: str, arrays: Sequence[NDArray[Any]]) -> None:
    """Write the arrays to a temporary folder and rename it to `entry`.

    Args:
        entry: the folder of the cache entry.
        key: the content of key.json: everything that the arrays depend on.
    Raises: DataError if that fails and no other process has stored the entry meanwhile.
    """
    size = sum(a.nbytes for a in arrays)
    try:
        entry.parent.mkdir(parents=True, exist_ok=True)
        temporary = Path(tempfile.mkdtemp(prefix=f".building-{entry.name}-", dir=entry.parent))
        try:
            (temporary / "key.json").write_text(key)
            (temporary / _ARRAYS).write_text(json.dumps(_facts(arrays)))
            for i, array in enumerate(arrays):
                np.save(temporary / f"{i}.npy", array, allow_pickle=False)
            # mkdtemp allows only its owner to enter; a cache is shared.
            temporary.chmod(0o755)
            # A process that sees the final name may map the arrays at once, so it comes last.
            os.rename(temporary, entry)
        finally:
            shutil.rmtree(temporary, ignore_errors=True)
    except OSError as error:
        # If the entry exists, another process was faster and stored equal arrays.
        if not entry.is_dir():
            raise DataError(
                f"--data-cache-path {entry.parent}: cannot store an index of {size} bytes "
                f"({error.strerror}). "
                "Free the space, give another folder or leave the flag out."
            ) from error
