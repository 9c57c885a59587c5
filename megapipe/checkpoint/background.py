"""--async-save: a rank copies its part of a checkpoint into memory that it shares with its writer, and trains on.

A later checkpoint is the first one with other numbers: the same files, the same headers, the same places of tensors. So
the first save of a run is written as without this flag; from its files a rank learns what the following ones look like.
"""

from __future__ import annotations

import json
import mmap
import os
import select
import shutil
import signal
import struct
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

import torch
from torch import Tensor

from megapipe.checkpoint.retention import Keep
from megapipe.checkpoint.writer import SIGNALS, Job, marker
from megapipe.distributed.meeting.together import on_first, together
from megapipe.distributed.mesh import ProcessMesh
from megapipe.errors import CheckpointError

_PAGE = 4096
# The writer runs this very package, which need not be installed nor lie in the current folder.
_WRITER = (
    f"import runpy, sys; sys.path.insert(0, {str(Path(__file__).parents[2])!r}); "
    "runpy.run_module('megapipe.checkpoint.writer', run_name='__main__', alter_sys=True)"
)
SILENT_S = 600.0
"""Seconds that a writer may give no sign of life where no --distributed-timeout-* says it."""


class Background:
    """The saves of one rank that its writer makes, one at a time. keep: what the first rank's then removes."""

    keep: Keep = None, None, ()

    def __init__(self, mesh: ProcessMesh) -> None:
        self._mesh = mesh
        self._files: dict[str, tuple[int, int]] = {}
        self._places: dict[str, tuple[int, int]] = {}
        self._buffer: Tensor | None = None
        self._memory = -1
        self._writer: subprocess.Popen[bytes] | None = None
        self._heard = b""
        self._job: Job | None = None
        self._answer: str | None = None
        self._removed: Sequence[int] = ()
        self._news: tuple[int, str, Sequence[int]] | None = None

    @property
    def under_way(self) -> int | None:
        """The iteration that is being saved."""
        return None if self._job is None else self._job["iteration"]

    def learn(self, folder: Path, names: Iterable[str]) -> None:
        """Take over the form of the first checkpoint, just written; names: of this rank's files of tensors."""
        if self._buffer is not None:
            return
        at, headers = 0, []
        # Later checkpoints have these very files but for their bytes: headers and places are kept, and a save copies
        # tensors into the picture of the files.
        for name in names:
            with (folder / name).open("rb") as file:
                length = file.read(8)
                header = file.read(*struct.unpack("<Q", length))
            size = (folder / name).stat().st_size
            self._files[name] = at, size
            begin = at + 8 + len(header)
            for key, entry in json.loads(header).items():
                if key != "__metadata__":
                    first, last = entry["data_offsets"]
                    self._places[key] = begin + first, last - first
            headers.append((at, length + header))
            at += -(-size // _PAGE) * _PAGE
        # Memory that both processes map: the writer needs no copy of its own, and no disk stands between.
        memory = os.memfd_create("checkpoint")
        os.ftruncate(memory, max(at, 1))
        self._buffer = torch.frombuffer(mmap.mmap(memory, max(at, 1)), dtype=torch.uint8)
        self._buffer.zero_()  # pages are made now, not while the next save blocks a step
        for at, text in headers:
            self._buffer[at : at + len(text)] = torch.frombuffer(bytearray(text), dtype=torch.uint8)
        self._memory = memory
        self._start_writer()

    def _start_writer(self) -> None:
        self._heard = b""
        before = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)  # a process inherits it, until it ignores them
        try:
            self._writer = subprocess.Popen(
                [sys.executable, "-c", _WRITER, str(self._memory), str(os.getpid())],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                pass_fds=(self._memory,),
            )
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)

    def _end_writer(self) -> None:
        if self._writer is not None:
            self._writer.kill()  # it writes nothing, or never will
            with suppress(subprocess.TimeoutExpired):
                self._writer.communicate(timeout=10)
            self._writer = None

    def fits(self, tensors: Mapping[str, Tensor]) -> bool:
        """Do all ranks know the form of this checkpoint? Collective."""
        mine = self._buffer is not None and all(
            key in tensors and _local(tensors[key]).nbytes == size for key, (_, size) in self._places.items()
        )
        return all(self._mesh.world.gather_json(mine))

    def start(
        self,
        folder: Path,
        iteration: int,
        tensors: Mapping[str, Tensor],
        texts: Mapping[str, str],
    ) -> None:
        """Copy and let write. Tensors may change after it.

        Args:
            folder: as `commit.begin` has made it.
            texts: what the first rank writes beside tensors.
        """
        assert self._buffer is not None, "a save has been learned from"
        if self._writer is None or self._writer.poll() is not None:
            self._end_writer()
            self._start_writer()
        assert self._writer is not None, "just started"
        assert self._writer.stdin is not None, "a pipe"
        for key, (at, size) in self._places.items():
            flat = _local(tensors[key]).detach().contiguous().view(-1)
            self._buffer[at : at + size].copy_(flat.view(torch.uint8))
        world = self._mesh.world
        self._job = Job(
            folder=str(folder),
            iteration=iteration,
            rank=world.rank,
            ranks=world.size,
            files=self._files,
            texts=dict(texts) if world.rank == 0 else {},
            keep=self.keep,
        )
        self._answer, self._removed = None, ()
        try:
            self._writer.stdin.write(json.dumps(self._job).encode() + b"\n")
            self._writer.stdin.flush()
        except OSError:
            pass  # it is gone: `poll` says so

    def poll(self, *, wait: bool = False) -> str | None:
        """The end of the save under way, on this rank: empty if it is complete, a problem, None if it goes on."""
        if self._job is None or self._answer is not None:
            return self._answer
        rank, folder = self._mesh.world.rank, Path(self._job["folder"])
        self._answer, became = self._hear(wait)
        if became:
            self._answer = f"the process that writes rank {rank}'s part {became}"
            with suppress(OSError):  # a quota, a folder that is gone: the other ranks see the silence
                marker(folder).touch()
            self._end_writer()
        if self._answer is not None:
            self._news = self._job["iteration"], self._answer, self._removed
        return self._answer

    def _hear(self, wait: bool) -> tuple[str | None, str]:
        """The writer's answer, if it has one, and what has become of a writer that will never have one."""
        assert self._writer is not None, "a job has a writer"
        assert self._writer.stdout is not None, "a pipe"
        limit = self._mesh.position.limit_s or SILENT_S
        while select.select([self._writer.stdout], [], [], limit if wait else 0)[0]:
            self._heard += (heard := os.read(self._writer.stdout.fileno(), 1 << 16))
            *lines, self._heard = self._heard.split(b"\n")
            if answers := [line for line in lines if line]:  # an empty one says that it lives
                problem, self._removed = json.loads(answers[-1])
                return str(problem), ""
            if not heard:
                return None, "has ended"
        return None, f"has not moved for {limit:g} s: it is stopped" if wait else ""

    def news(self) -> tuple[int, str, Sequence[int]] | None:
        """(iteration, problem, iterations removed) of a save that has come to its end on this rank; told once."""
        self.poll()
        news, self._news = self._news, None
        return news

    def finish(self) -> int | None:
        """Wait for the save under way; its iteration. Collective.

        Raises: CheckpointError on all ranks if any could not write; previous checkpoints are as they were.
        """
        if (job := self._job) is None:
            return None
        problem, folder = self.poll(wait=True), Path(job["folder"])
        self._job = None

        def told() -> None:
            if problem:
                raise CheckpointError(f"iteration {job['iteration']}: {problem}")

        try:
            together(self._mesh, told)
        except CheckpointError:
            on_first(self._mesh, lambda: _remove(folder))
            raise
        return job["iteration"]

    def close(self) -> None:
        """Wait for this rank's part and end the writer."""
        self.poll(wait=True)
        self._end_writer()
        if self._memory >= 0:
            os.close(self._memory)
            self._memory = -1


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor  # a DTensor, whose import takes a second


def _remove(folder: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    marker(folder).unlink(missing_ok=True)
