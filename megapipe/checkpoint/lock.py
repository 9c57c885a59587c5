"""One run per folder of checkpoints: a file says whose it is, touched every few seconds while that run lives.

No lock of the file system: over a network they are emulated, missing or forgotten. On one machine the process itself
tells whether it lives; elsewhere the file's time does, as it changes or does not while it is looked at.
"""

from __future__ import annotations

import fcntl
import json
import os
import secrets
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import datetime
from pathlib import Path
from typing import Any

from megapipe.distributed.meeting.together import on_first
from megapipe.distributed.mesh import ProcessMesh
from megapipe.errors import CheckpointError

NAME = "run.lock"
BEAT_S = 5.0
PATIENCE_S = 30.0
"""Seconds that the file of another machine is looked at before a beat that does not come counts as its end."""


_NOBODY = {
    "token": "",
    "host": "a machine that its damaged file does not say",
    "pid": "?",
    "since": "?",
}


@contextmanager
def one_run(directory: str | None, mesh: ProcessMesh) -> Iterator[None]:
    """While entered, --save is this run's alone. Collective.

    Raises: CheckpointError on all ranks if it is another's.
    """
    locks: list[Lock] = []

    def take() -> str:
        if directory is not None:
            locks.append(Lock(Path(directory)))
        return "".join(taken.took_over for taken in locks)

    try:
        took_over = on_first(mesh, take)
        if took_over and mesh.world.rank == 0:
            print(f"{took_over}; taken over", flush=True)
        yield
    finally:
        for taken in locks:
            taken.release()


class Lock:
    """Ownership of a folder, from its making to `release`.

    Raises: CheckpointError if another run that lives has it.
    """

    def __init__(
        self, root: Path, *, beat_s: float = BEAT_S, patience_s: float = PATIENCE_S
    ) -> None:
        root.mkdir(parents=True, exist_ok=True)
        self.path, self._token = root / NAME, secrets.token_hex(8)
        self._over = threading.Event()
        self.took_over = ""
        # After each look from the start: between any two steps another run may take the folder, or give it back.
        while not self._create():
            owner = _read(self.path)
            if owner is None:
                continue  # released meanwhile
            if _lives(self.path, owner, patience_s):
                raise _anothers(root, owner)
            self._remove(owner, root)
            self.took_over = f"--save {root} belonged to a run that is gone: {_who(owner)}"
        self._beat_s = beat_s
        self._thread = threading.Thread(target=self._beat, name="lock", daemon=True)
        self._thread.start()

    def release(self) -> None:
        """Give the folder back. What another run has taken stays that run's."""
        self._over.set()
        self._thread.join()
        with suppress(OSError):
            if (_read(self.path) or _NOBODY)["token"] == self._token:
                self.path.unlink()

    def _create(self) -> bool:
        owner = {"token": self._token, **_myself()}
        # A draft that gets its name at once: who finds the file finds it whole.
        draft = self.path.with_name(f"{NAME}.{self._token}")
        draft.write_text(json.dumps(owner) + "\n")
        try:
            _put(draft, self.path)
        except FileExistsError:
            return False
        finally:
            draft.unlink()
        return True

    def _remove(self, owner: dict[str, Any], root: Path) -> None:
        """The file of a dead owner, unless a third run was faster."""
        moved = self.path.with_name(f"{NAME}.{self._token}")
        with _in_turn(root), suppress(FileNotFoundError):
            if _read(self.path) != owner:
                return
            os.rename(self.path, moved)
            # Between the look and the rename another run had taken it: it gets its file back.
            if _read(moved) != owner:
                with suppress(FileExistsError):
                    _put(moved, self.path)
            moved.unlink()

    def _beat(self) -> None:
        while not self._over.wait(self._beat_s):
            with suppress(OSError):
                os.utime(self.path)


def _put(draft: Path, path: Path) -> None:
    """Put the file under another name, whole or not at all. Raises: FileExistsError, never over another."""
    try:
        os.link(draft, path)
    except FileExistsError:
        raise
    except OSError:  # no hard links: exFAT, some SMB, object stores through FUSE
        text, file = draft.read_bytes(), os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o644)
        try:
            os.write(
                file, text
            )  # who reads before it sees a damaged file, whose owner lives as long as it is touched
        finally:
            os.close(file)


@contextmanager
def _in_turn(root: Path) -> Iterator[None]:
    """One at a time where the file system has locks: else a third run might come between a look and a removal."""
    folder = os.open(root, os.O_RDONLY)
    try:
        with suppress(OSError):
            fcntl.flock(folder, fcntl.LOCK_EX)
        yield
    finally:
        os.close(folder)


def refuse_living(root: Path) -> None:
    """Refuse a folder that a `Lock` would refuse. Raises: CheckpointError."""
    owner = _read(root / NAME)
    if owner is not None and _lives(root / NAME, owner, PATIENCE_S):
        raise _anothers(root, owner)


def _anothers(root: Path, owner: dict[str, Any]) -> CheckpointError:
    return CheckpointError(
        f"--save {root} belongs to another run: {_who(owner)}. Wait for it or end it, or use another folder"
    )


def refuse_others(root: Path) -> None:
    """Raises: CheckpointError if a folder belongs to another process, which may have taken it while this one slept."""
    owner, me = _read(root / NAME), _myself()
    if owner is not None and any(owner.get(key) != me[key] for key in ("system", "pid", "born")):
        raise CheckpointError(
            f"{root / NAME} is not this run's, but {_who(owner)}'s, which saves there. Nothing is saved any more"
        )


def _myself() -> dict[str, Any]:
    return {
        "host": socket.gethostname(),
        "system": _system(),
        "pid": os.getpid(),
        "born": _born(os.getpid()),
        "since": f"{datetime.now():%Y-%m-%d %H:%M:%S}",
        "job": os.environ.get("SLURM_JOB_ID"),
    }


def _read(path: Path) -> dict[str, Any] | None:
    try:
        owner: dict[str, Any] = json.loads(path.read_text())
        return owner if {"token", "host", "pid", "since"} <= owner.keys() else _NOBODY | owner
    except FileNotFoundError:
        return None
    except (ValueError, AttributeError, TypeError):
        return dict(_NOBODY)


def _who(owner: dict[str, Any]) -> str:
    job = f" of job {owner['job']}" if owner.get("job") else ""
    return f"process {owner['pid']}{job} on {owner['host']}, since {owner['since']}"


def _lives(path: Path, owner: dict[str, Any], patience_s: float) -> bool:
    system = _system()
    if system is not None and owner.get("system") == system:
        return _born(owner["pid"]) == owner.get("born") is not None
    before, until = _beat_of(path), time.monotonic() + patience_s
    while time.monotonic() < until:
        time.sleep(min(0.5, patience_s / 10))
        now = _beat_of(path)
        if now != before:
            return now is not None  # None: released, and to be taken like a dead one's
    return False


def _beat_of(path: Path) -> int | None:
    try:
        with path.open() as file:  # a network file system looks at the server when a file is opened
            return os.fstat(file.fileno()).st_mtime_ns
    except FileNotFoundError:
        return None


def _system() -> str | None:
    """A name of all that processes must share to see each other: the machine since its start, the process namespace."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip() + os.readlink(
            "/proc/self/ns/pid"
        )
    except OSError:
        return None


def _born(pid: int) -> str | None:
    """The start of a process, in the kernel's ticks; None if there is none that runs."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] in "ZX" else fields[19]
