"""One run per folder of checkpoints: a file names the run, and is touched while that run lives.

It is no lock of the file system: over a network such locks are emulated, missing or forgotten. On
the owner's machine the process table says whether the owner lives. Other machines look at the
file's time: a living owner changes it every few seconds.
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
"""Seconds between two touches of the file."""
TIMEOUT_S = 30.0
"""Seconds without a touch after which an owner on another machine counts as ended."""

# The owner in a damaged file, as errors print it.
_NOBODY = {
    "token": "",
    "host": "a machine that its damaged file does not say",
    "pid": "?",
    "since": "?",
}


@contextmanager
def one_run(directory: str | None, mesh: ProcessMesh) -> Iterator[None]:
    """Own the folder of --save while the `with` block runs, so that no other run saves there.

    Collective over the world. A line is printed if the folder is taken over from a dead run.

    Args:
        directory: the folder of --save; None without the flag, and then nothing is owned.
    Raises: CheckpointError on all ranks if another run has the folder.
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
    """Ownership of a folder by this process, from the construction of the object to `release`.

    A file in the folder names the owner. A thread touches the file every few seconds, so that
    processes of other machines see that the owner lives.

    Args:
        root: the folder.
        beat_s: seconds between two touches of the file.
        timeout_s: seconds without a touch of the file after which an owner on another machine
            counts as dead.
    Attributes:
        path: the file that names the owner.
        took_over: a sentence on a dead run that had the folder before; empty if there was none.
    Raises: CheckpointError if another run that lives has the folder.
    """

    def __init__(self, root: Path, *, beat_s: float = BEAT_S, timeout_s: float = TIMEOUT_S) -> None:
        root.mkdir(parents=True, exist_ok=True)
        self.path = root / NAME
        self._token = secrets.token_hex(8)
        self._over = threading.Event()
        self.took_over = ""
        # After each attempt from the start: between any two steps another run may take the folder,
        # or give it back.
        while not self._create():
            owner = _read(self.path)
            # Released meanwhile.
            if owner is None:
                continue
            if _lives(self.path, owner, timeout_s):
                raise _anothers(root, owner)
            self._remove(owner, root)
            self.took_over = f"--save {root} belonged to a run that is gone: {_who(owner)}"
        self._beat_s = beat_s
        self._thread = threading.Thread(target=self._beat, name="lock", daemon=True)
        self._thread.start()

    def release(self) -> None:
        """Give the folder back, unless another run has taken it over."""
        self._over.set()
        self._thread.join()
        with suppress(OSError):
            if (_read(self.path) or _NOBODY)["token"] == self._token:
                self.path.unlink()

    def _create(self) -> bool:
        """Make the file that names the owner. Returns False if there is one already."""
        owner = {"token": self._token, **_myself()}
        # A draft that gets its name at once: whoever finds the file finds it complete.
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
        """Remove the file of a dead owner, unless another process has replaced the file meanwhile.

        Args:
            owner: the dead owner, as the file names it.
            root: the folder.
        """
        moved = self.path.with_name(f"{NAME}.{self._token}")
        with _in_turn(root), suppress(FileNotFoundError):
            if _read(self.path) != owner:
                return
            os.rename(self.path, moved)
            # Another run took it between the reading and the rename: it gets its file back.
            if _read(moved) != owner:
                with suppress(FileExistsError):
                    _put(moved, self.path)
            moved.unlink()

    def _beat(self) -> None:
        while not self._over.wait(self._beat_s):
            with suppress(OSError):
                os.utime(self.path)


def _put(draft: Path, path: Path) -> None:
    """Create `path` with the content of `draft` in one step, by a hard link.

    A reader of `path` finds all content or no file. On a file system without hard links the content
    is copied, and a reader may find it incomplete for a moment.

    Args:
        draft: a complete file.
        path: the file to create.
    Raises: FileExistsError if `path` exists; it is left as it is.
    """
    try:
        os.link(draft, path)
    except FileExistsError:
        raise
    except OSError:
        # No hard links: exFAT, some SMB, object stores through FUSE.
        text = draft.read_bytes()
        file = os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o644)
        try:
            # Whoever reads before this line sees a damaged file, whose owner counts as living while
            # the file is touched.
            os.write(file, text)
        finally:
            os.close(file)


@contextmanager
def _in_turn(root: Path) -> Iterator[None]:
    """Return a context that one process at a time may enter, if the file system has locks.

    Args:
        root: the folder whose lock is taken.
    """
    # Without one, a third run may take the folder between a reading and a removal, see `_remove`.
    folder = os.open(root, os.O_RDONLY)
    try:
        with suppress(OSError):
            fcntl.flock(folder, fcntl.LOCK_EX)
        yield
    finally:
        os.close(folder)


def refuse_living(root: Path) -> None:
    """Check that no running process owns a folder. Raises: CheckpointError if one does.

    If the owner is on another machine, this takes up to TIMEOUT_S seconds.

    Args:
        root: the folder of --save.
    """
    owner = _read(root / NAME)
    if owner is not None and _lives(root / NAME, owner, TIMEOUT_S):
        raise _anothers(root, owner)


def _anothers(root: Path, owner: dict[str, Any]) -> CheckpointError:
    return CheckpointError(
        f"--save {root} belongs to another run: {_who(owner)}. "
        "Wait for it or end it, or use another folder"
    )


def refuse_others(root: Path) -> None:
    """Check that a folder's owner is this process, or that the folder has no owner.

    Another process may have taken the folder over while this one was stopped.

    Args:
        root: the folder of --save.
    Raises: CheckpointError if another process owns it.
    """
    owner = _read(root / NAME)
    if owner is None:
        return
    me = _myself()
    if any(owner.get(key) != me[key] for key in ("system", "pid", "born")):
        raise CheckpointError(
            f"{root / NAME} is not this run's, but {_who(owner)}'s, which saves there. "
            "Nothing is saved any more"
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
    """Return the owner that a file names, such as {"host": "a", "pid": 71}; None without a file.

    The keys are the ones of `_myself`. For a damaged file the values are `_NOBODY`, which equals no
    process.
    """
    try:
        owner: dict[str, Any] = json.loads(path.read_text())
        return _NOBODY | owner
    except FileNotFoundError:
        return None
    except (ValueError, AttributeError, TypeError):
        return dict(_NOBODY)


def _who(owner: dict[str, Any]) -> str:
    job = f" of job {owner['job']}" if owner.get("job") else ""
    return f"process {owner['pid']}{job} on {owner['host']}, since {owner['since']}"


def _lives(path: Path, owner: dict[str, Any], timeout_s: float) -> bool:
    """Return whether the process that owns a folder still runs.

    On this machine the process table says so. For another machine, wait up to `timeout_s` for the
    owner to touch its file. False if the file disappears meanwhile.

    Args:
        path: the file that the owner touches.
        owner: the content of the owner's file, with its machine and process id.
        timeout_s: seconds to wait for a touch of the file.
    """
    system = _system()
    if system is not None and owner.get("system") == system:
        # The kernel uses process ids again: a process with this id may have started later.
        return _born(owner["pid"]) == owner.get("born") is not None
    # Only changes are compared, as clocks of two machines differ.
    before = _beat_of(path)
    until = time.monotonic() + timeout_s
    while time.monotonic() < until:
        time.sleep(min(0.5, timeout_s / 10))
        now = _beat_of(path)
        # A file that is gone was released, and can be taken as if its owner were dead.
        if now != before:
            return now is not None
    return False


def _beat_of(path: Path) -> int | None:
    """Return the time of a file's last touch in nanoseconds, None if there is no file."""
    try:
        # A network file system asks its server when a file is opened.
        with path.open() as file:
            return os.fstat(file.fileno()).st_mtime_ns
    except FileNotFoundError:
        return None


def _system() -> str | None:
    """Return a text that is equal for two processes if they see each other's process ids.

    The text is the boot id of the machine followed by the namespace of process ids. None if the
    kernel does not show these two.
    """
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return boot + os.readlink("/proc/self/ns/pid")
    except OSError:
        return None


def _born(pid: int) -> str | None:
    """Return when a process started, in the kernel's ticks; None if no such process runs.

    Args:
        pid: the process id.
    """
    try:
        # A command's name stands in parentheses, and may have spaces and parentheses itself.
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    # A zombie, or a dead process that nobody has waited for.
    if fields[0] in "ZX":
        return None
    return fields[19]
