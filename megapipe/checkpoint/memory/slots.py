"""States in shared memory of a machine, which outlive the processes that write them.

A slot is a file in /dev/shm: a header and the bytes of one state. The header has the checksum of
both, and is written last. A slot whose writer was killed in between has no valid header.

    | length, checksum | text (JSON) | padding to HEADER | bytes of the state |

The files are in a folder of the launcher, torchrun's agent, which starts killed ranks again.
"""

from __future__ import annotations

import json
import mmap
import os
import shutil
import subprocess
import sys
import zlib
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from struct import Struct
from typing import Any

import torch

SHARED = Path("/dev/shm")
HEADER = 1 << 14
"""Bytes of the header, whose text is about a kilobyte."""
_BEGIN = Struct("<II")
_REACHED = Struct("<q")
# Waits for the launcher's end without polling, and removes what it can no longer use.
_JANITOR = (
    "import os, select, shutil, sys; "
    "select.select([os.pidfd_open(int(sys.argv[1]))], [], []); "
    "shutil.rmtree(sys.argv[2], ignore_errors=True)"
)


class Slot:
    """A file in shared memory for a training state of one rank.

    The file has a header and the bytes of the state, and is valid while the header is. `seal`
    writes the header once the bytes are complete, and `drop` erases it. `header` returns the
    header, and `sound` also compares the header's checksum with the bytes.

    `reached` is the last step that the rank has trained. It may be set.

    Args:
        path: the file, which is made if it does not exist.
        size: bytes of the state. A file of another size is replaced.

    Attributes:
        head: the bytes of the header, as a tensor of uint8 on the file's memory.
        data: the bytes of the state, in the same form.

    Raises: OSError if shared memory has no room.
    """

    def __init__(self, path: Path, size: int) -> None:
        file = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
        try:
            if os.fstat(file).st_size != HEADER + size:
                os.ftruncate(file, 0)
                # Takes the pages now. A write to a full /dev/shm would kill the process (SIGBUS).
                os.posix_fallocate(file, 0, HEADER + size)
            self._memory = mmap.mmap(file, HEADER + size)
        finally:
            os.close(file)
        whole = torch.frombuffer(self._memory, dtype=torch.uint8)
        self.head = whole[:HEADER]
        self.data = whole[HEADER:]

    def drop(self) -> None:
        """Make the slot invalid, before the bytes in it change."""
        self._memory[: _BEGIN.size] = bytes(_BEGIN.size)

    def seal(self, header: Mapping[str, Any]) -> None:
        """Make the slot valid. `header` must be representable in JSON, with a `checksum`."""
        text = json.dumps(header).encode()
        begin = _BEGIN.size
        assert begin + len(text) <= HEADER - _REACHED.size, "the header is too long"
        self._memory[begin : begin + len(text)] = text
        # Last: a process that is killed before this leaves an invalid slot.
        self._memory[:begin] = _BEGIN.pack(len(text), zlib.crc32(text))

    def header(self) -> dict[str, Any] | None:
        """Return the header; None if the slot is invalid."""
        length, checksum = _BEGIN.unpack(self._memory[: _BEGIN.size])
        text = self._memory[_BEGIN.size : _BEGIN.size + length]
        if not length or zlib.crc32(text) != checksum:
            return None
        found: dict[str, Any] = json.loads(text)
        return found

    def checksum(self, at: int = 0, size: int | None = None) -> int:
        """Return the checksum of the bytes of the state, as they are now, or of a part of them.

        Args:
            at: the first byte of the part.
            size: number of bytes; None for all that follow.
        """
        end = None if size is None else HEADER + at + size
        with memoryview(self._memory) as memory:
            return zlib.crc32(memory[HEADER + at : end])

    def sound(self, generation: int) -> bool:
        """Return whether the slot has the undamaged state after a step.

        The header must name that step, and have the checksum of the bytes.

        Args:
            generation: the number of the step.
        """
        header = self.header()
        if header is None or header["generation"] != generation:
            return False
        return bool(header["checksum"] == self.checksum())

    @property
    def reached(self) -> int:
        """The last step that the rank has trained; a failure loses steps since the last copy."""
        return int(_REACHED.unpack(self._memory[HEADER - _REACHED.size : HEADER])[0])

    @reached.setter
    def reached(self, step: int) -> None:
        self._memory[HEADER - _REACHED.size : HEADER] = _REACHED.pack(step)


def restarts() -> bool:
    """Return whether the launcher of this process starts it again when it is lost."""
    return int(os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0")) > 0


def own_folder() -> Path:
    """Return this process's folder in shared memory; make it if there is none.

    The folder's name has the launcher (such as torchrun's agent) and the local rank. So a process
    that the launcher starts again finds the folder of its predecessor.

    Folders of launchers that have ended are removed.
    """
    launcher = os.getppid()
    base = SHARED / f"megapipe-{os.getuid()}-{launcher}-{_started(launcher)}"
    # One of the machine's processes makes it.
    with suppress(FileExistsError):
        base.mkdir(mode=0o700)
        _clear()
        command = [sys.executable, "-S", "-E", "-c", _JANITOR, str(launcher), str(base)]
        # In a session of its own, as the launcher kills the groups of its processes. Without their
        # environment, as it is no rank.
        subprocess.Popen(
            command,
            env={},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
    own = base / os.environ.get("LOCAL_RANK", "0")
    own.mkdir(mode=0o700, exist_ok=True)
    return own


def remove(own: Path) -> None:
    """Remove a process's folder. The last process of a launcher also removes the launcher's folder.

    Args:
        own: the process's folder, from `own_folder`.
    """
    shutil.rmtree(own, ignore_errors=True)
    with suppress(OSError):
        own.parent.rmdir()


def _clear() -> None:
    """Remove folders of launchers that have ended, as far as they are still there."""
    for path in SHARED.glob(f"megapipe-{os.getuid()}-*-*"):
        *_, launcher, started = path.name.split("-")
        if _started(int(launcher)) != started:
            shutil.rmtree(path, ignore_errors=True)


def _started(pid: int) -> str:
    """Return when a process has started, in ticks since boot; empty if there is no such process.

    Args:
        pid: the process id.
    """
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return ""
    # After the name in brackets, which may have spaces: field 22 of the line.
    return stat.rpartition(")")[2].split()[19]
