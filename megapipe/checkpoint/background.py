"""--async-save: copy a rank's part of a checkpoint into memory that a writer shares, and train on.

All checkpoints of a run have equal files, headers and positions of tensors; only the values differ.
The first save of a run is therefore written in the foreground. A rank reads headers and positions
from its files, and uses them for all later saves.
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
from collections.abc import Collection, Iterable, Mapping, Sequence
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
# The writer runs this package, which need not be installed or lie in the current folder.
_WRITER = (
    f"import runpy, sys; sys.path.insert(0, {str(Path(__file__).parents[2])!r}); "
    "runpy.run_module('megapipe.checkpoint.writer', run_name='__main__', alter_sys=True)"
)
SILENT_S = 600.0
"""Seconds without a sign of life after which a writer counts as stopped, by default.

A --distributed-timeout-* flag has precedence.
"""


class Background:
    """The asynchronous saves of one rank, one at a time.

    A second process, the writer, writes the files from memory that both processes share.

    All checkpoints of a run have the same files, with the same headers and the same byte position
    of each tensor. Only the values differ. `learn` reads headers and positions from the first
    checkpoint, `fits` returns whether tensors go into these files, and `start` begins a save.
    `poll` and `news` return how a save has ended, and `finish` waits for the end on all ranks.
    `close` ends the writer.

    `under_way` is the iteration that is being saved.

    Attributes:
        keep: which checkpoints stay on disk after a save: (--save-retain-interval,
            --save-keep-last, iterations that may be removed), see `retention.Keep`.
    """

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
        """Return the iteration that is being saved, or None if no save goes on."""
        return None if self._job is None else self._job["iteration"]

    @property
    def keys(self) -> Collection[str]:
        """The keys of the tensors that this rank saves."""
        return self._places.keys()

    def learn(self, folder: Path, names: Iterable[str]) -> None:
        """Read from the first checkpoint which file holds each tensor, and at which byte.

        The writer process is started, too.

        Args:
            folder: the first checkpoint of the run, which was written without a writer.
            names: the safetensors files that this rank has written there.
        """
        if self._buffer is not None:
            return
        at = 0
        headers = []
        # The memory is an image of this rank's files, one after the other. A save copies tensors to
        # their positions; lengths and headers stay.
        #
        #   | length | header | tensor | tensor | pad to a page | length | header | ...
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
        # Both processes map this memory, so the writer needs no copy and no disk is involved.
        memory = os.memfd_create("checkpoint")
        os.ftruncate(memory, max(at, 1))
        self._buffer = torch.frombuffer(mmap.mmap(memory, max(at, 1)), dtype=torch.uint8)
        # Allocates the pages now, and not while the next save blocks a step.
        self._buffer.zero_()
        for at, text in headers:
            self._buffer[at : at + len(text)] = torch.frombuffer(bytearray(text), dtype=torch.uint8)
        self._memory = memory
        self._start_writer()

    def _start_writer(self) -> None:
        self._heard = b""
        # The new process inherits the mask, which protects it until it ignores the signals.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
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
            # It is idle, or will never complete a save.
            self._writer.kill()
            with suppress(subprocess.TimeoutExpired):
                self._writer.communicate(timeout=10)
            self._writer = None

    def fits(self, tensors: Mapping[str, Tensor]) -> bool:
        """Return whether `start` can save these tensors, on every rank.

        This is so if `tensors` has each tensor that this rank wrote in the first checkpoint, with
        as many bytes. False before `learn`. Collective over the world.

        Args:
            tensors: this rank's tensors by global name.
        """
        mine = self._buffer is not None
        for key, (_, size) in self._places.items():
            if key not in tensors or _local(tensors[key]).nbytes != size:
                mine = False
        return all(self._mesh.world.gather_json(mine))

    def start(
        self,
        folder: Path,
        iteration: int,
        tensors: Mapping[str, Tensor],
        texts: Mapping[str, str],
    ) -> None:
        """Copy the tensors and let the writer save the copy. The tensors may change afterwards.

        Collective over the world.

        Args:
            folder: the temporary folder made by `commit.begin`.
            iteration: the checkpoint's iteration.
            tensors: this rank's tensors by global name.
            texts: {file name: content} of text files, which the first rank writes.
        Raises: CheckpointError on all ranks if any of them cannot copy or has no writer.
        """
        # Before any writer begins: it would wait for the files of a rank that has failed.
        together(self._mesh, lambda: self._copy(tensors), folder)
        assert self._writer is not None, "just started"
        assert self._writer.stdin is not None, "a pipe"
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
        self._answer = None
        self._removed = ()
        # `poll` reports a writer that has ended.
        with suppress(OSError):
            self._writer.stdin.write(json.dumps(self._job).encode() + b"\n")
            self._writer.stdin.flush()

    def _copy(self, tensors: Mapping[str, Tensor]) -> None:
        """Copy the tensors to the shared memory, and start a writer if none is there."""
        assert self._buffer is not None, "a save has been learned from"
        if self._writer is None or self._writer.poll() is not None:
            self._end_writer()
            self._start_writer()
        for key, (at, size) in self._places.items():
            flat = _local(tensors[key]).detach().contiguous().view(-1)
            self._buffer[at : at + size].copy_(flat.view(torch.uint8))

    def poll(self, *, wait: bool = False) -> str | None:
        """Return how the current save has ended on this rank.

        Args:
            wait: wait for the end.
        Returns: "" if the checkpoint is complete, a text with the problem if the save has failed,
            or None while it goes on. Between two saves it is the answer of the last one; None
            before the first.
        """
        if self._job is None or self._answer is not None:
            return self._answer
        rank = self._mesh.world.rank
        folder = Path(self._job["folder"])
        self._answer, became = self._hear(wait)
        if became:
            self._answer = f"the process that writes rank {rank}'s part {became}"
            # Without the marker, as with a full quota, the other ranks wait for their timeout.
            with suppress(OSError):
                marker(folder).touch()
            self._end_writer()
        if self._answer is not None:
            self._news = self._job["iteration"], self._answer, self._removed
        return self._answer

    def _hear(self, wait: bool) -> tuple[str | None, str]:
        """Read the writer's output.

        Args:
            wait: wait for the answer.
        Returns: (answer, failure). The answer is "" for a complete checkpoint, the text of a
            problem, or None if there is none yet. The failure is "has ended" or similar for a
            writer that is gone or hangs, else "".
        """
        assert self._writer is not None, "a job has a writer"
        assert self._writer.stdout is not None, "a pipe"
        limit = self._mesh.position.limit_s or SILENT_S
        while select.select([self._writer.stdout], [], [], limit if wait else 0)[0]:
            self._heard += (heard := os.read(self._writer.stdout.fileno(), 1 << 16))
            *lines, self._heard = self._heard.split(b"\n")
            # Empty lines are signs of life.
            if answers := [line for line in lines if line]:
                problem, self._removed = json.loads(answers[-1])
                return str(problem), ""
            if not heard:
                return None, "has ended"
        return None, f"has not moved for {limit:g} s: it is stopped" if wait else ""

    def news(self) -> tuple[int, str, Sequence[int]] | None:
        """Return how a save has ended on this rank; None if none has ended since the last call.

        Returns: (iteration, problem, iterations of old checkpoints that were removed). The problem
            is "" if the checkpoint is complete. The first rank removes old checkpoints, so the
            last value is empty on all others.
        """
        self.poll()
        news = self._news
        self._news = None
        return news

    def finish(self) -> int | None:
        """Wait for the current save on all ranks. Collective over the world.

        Returns: the iteration of the save, or None if no save goes on.
        Raises: CheckpointError on all ranks if any of them could not write. Earlier checkpoints are
            unchanged.
        """
        job = self._job
        if job is None:
            return None
        problem = self.poll(wait=True)
        folder = Path(job["folder"])
        self._job = None

        def report() -> None:
            if problem:
                raise CheckpointError(f"iteration {job['iteration']}: {problem}")

        try:
            together(self._mesh, report)
        except CheckpointError:
            on_first(self._mesh, lambda: _remove(folder))
            raise
        return job["iteration"]

    def close(self) -> None:
        """Wait until the current save has ended, if there is one, and end the writer.

        A save that fails raises no error here.
        """
        self.poll(wait=True)
        self._end_writer()
        if self._memory >= 0:
            os.close(self._memory)
            self._memory = -1


def _local(tensor: Tensor) -> Tensor:
    # A DTensor has it. Importing the class takes a second.
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def _remove(folder: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    marker(folder).unlink(missing_ok=True)
