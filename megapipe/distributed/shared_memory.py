"""Tensors between CPU ranks of one host, through memory that all of them have mapped.

Gloo sends every tensor through the kernel's TCP stack, by threads of its own. Here each rank copies its tensor into a
segment that the others read, and a byte in a pipe says that it is there.
"""

from __future__ import annotations

import math
import mmap
import os
import select
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.profiler import record_function

from megapipe.distributed.meeting.position import Position

T = TypeVar("T")

_SMALLEST = 1 << 16
"""Bytes of a segment, at least: to make room is many times the work of an exchange."""
TIMEOUT_S = 1800.0
"""Seconds that a rank is waited for where no other time is set; gloo's."""


@dataclass
class _Slot:
    """One segment of every rank, as bytes.

    Attributes:
        busy: from a rank's copy into its segment to its reading of all.
        free_from: when this exchange or a later one is over, all ranks have read these segments.
    """

    segments: tuple[Tensor, ...]
    busy: bool = False
    free_from: int = -1


@dataclass
class _Peer:
    """Another rank: the pipes from and to it, and the slot of each exchange that it has started."""

    inbox: int
    outbox: int
    heard: int = 0
    slots: dict[int, int] = field(default_factory=dict)


class SharedMemory:
    """Exchanges between the ranks of a group, which all start and end the same ones in the same order.

    What one rank cannot have, a pipe, a segment or a look at the other's, no rank uses from then on.

    Args:
        gather: every rank's value, in rank order.
        position: its limit_s is how long another rank is waited for.
        name: what an error calls the ranks' group.
    """

    def __init__(self, rank: int, gather: Callable[[Any], list[Any]], position: Position, name: str) -> None:
        self._rank, self._gather, self._position = rank, gather, position
        self._name = name
        self._works = True
        self._peers: dict[int, _Peer] = {}
        self._slots: list[_Slot] = []
        self._started = 0
        self._over = -1

    def start(self, x: Tensor, read: Callable[[Sequence[Tensor]], object], most: int | None = None) -> Started | None:
        """Show x to all ranks; then x may change. Collective at the first use of a size, as it makes room for it.

        Args:
            read: is given every rank's x, in rank order, once all are there.
            most: rows of the longest x, where they differ; all that are read then have so many.
        Returns: None if there is no such way: not Linux, not one host, a sandbox, no room.
        """
        shape = x.shape if most is None else (most, *x.shape[1:])
        nbytes = math.prod(shape) * x.itemsize
        index = self._room(nbytes)
        if index is None:
            return None
        slot, number = self._slots[index], self._started
        slot.busy, self._started = True, number + 1
        views = [segment[:nbytes].view(x.dtype).view(shape) for segment in slot.segments]
        views[self._rank][: len(x)].copy_(x) if x.ndim else views[self._rank].copy_(x)
        for rank, peer in self._peers.items():
            try:
                os.write(peer.outbox, bytes((index,)))
            except BrokenPipeError:
                raise self._gone(rank) from None

        def wait() -> None:
            with record_function("exchange through shared memory"):
                for rank, peer in self._peers.items():
                    if self._hear(rank, peer, number) != index:
                        raise AssertionError("the ranks of a group exchange tensors in different orders")
                read(views)
            self._over = max(self._over, number)
            # Free for this rank when all have read it, which shows when a later exchange is over.
            slot.busy, slot.free_from = False, self._started

        return Started(wait)

    def _hear(self, rank: int, peer: _Peer, number: int) -> int:
        """Wait until a peer has started an exchange. Returns: its slot there."""
        limit_s, inbox = self._position.limit_s or TIMEOUT_S, select.poll()
        inbox.register(peer.inbox, select.POLLIN)
        while number not in peer.slots:
            if not inbox.poll(1000 * limit_s):
                raise dist.DistNetworkError(
                    f"Timed out after {limit_s:g} s of waiting for rank {rank} of the {self._name}"
                )
            told = os.read(peer.inbox, 64)
            if not told:
                raise self._gone(rank)
            peer.slots.update(enumerate(told, peer.heard))
            peer.heard += len(told)
        return peer.slots.pop(number)

    def _gone(self, rank: int) -> dist.DistNetworkError:
        return dist.DistNetworkError(f"rank {rank} of the {self._name} has closed its pipe")

    def _room(self, nbytes: int) -> int | None:
        """The first slot with room for nbytes whose segments all ranks have read, a new one if there is none."""
        if not self._works:
            return None
        for index, slot in enumerate(self._slots):
            if not slot.busy and slot.free_from <= self._over and len(slot.segments[0]) >= nbytes:
                return index
        if not self._peers:
            self._works = self._meet()
        segments = self._map(max(_SMALLEST, 1 << (nbytes - 1).bit_length())) if self._works else None
        self._works = segments is not None
        if segments is not None:
            self._slots.append(_Slot(segments))
        return None if segments is None else len(self._slots) - 1

    def _meet(self) -> bool:
        """Open a pipe from every rank to every other. False if a rank could not."""
        size = len(self._gather(None))
        pipes: list[tuple[int, int]] = []
        outboxes: list[int] = []

        def make() -> list[Any]:
            while len(pipes) < size:
                pipes.append(os.pipe())
            return [_where(outbox) for _, outbox in pipes]

        rows = self._agreed(make)
        works = rows is not None and self._agreed(
            lambda: outboxes.extend(_open(row[self._rank], os.O_WRONLY) for row in rows)
        )
        for _, mine in pipes:
            os.close(mine)  # so that an inbox ends with the process that writes into it
        for descriptor in (*(inbox for inbox, _ in pipes), *outboxes):
            if works:
                weakref.finalize(self, os.close, descriptor)
            else:
                os.close(descriptor)
        if works:
            ends = enumerate(zip(pipes, outboxes, strict=True))
            self._peers = {rank: _Peer(inbox, outbox) for rank, ((inbox, _), outbox) in ends if rank != self._rank}
        return bool(works)

    def _map(self, nbytes: int) -> tuple[Tensor, ...] | None:
        """A segment of every rank; None if a rank could not. They have no name and end with the processes."""
        descriptors: list[int] = []
        segments: list[Tensor] = []

        def make() -> list[Any]:
            descriptors.append(os.memfd_create("megapipe"))
            os.ftruncate(descriptors[0], nbytes)
            return _where(descriptors[0])

        def see(rows: list[Any]) -> None:
            for row in rows:
                descriptors.append(_open(row, os.O_RDWR))
                segments.append(torch.frombuffer(mmap.mmap(descriptors[-1], nbytes), dtype=torch.uint8))

        rows = self._agreed(make)
        works = rows is not None and self._agreed(lambda: see(rows))
        for descriptor in descriptors:
            os.close(descriptor)
        return tuple(segments) if works else None

    def _agreed(self, work: Callable[[], Any]) -> list[Any] | None:
        """Results of `work` on every rank; None on all if the system refuses it to any."""
        try:
            mine = [work()]
        except (OSError, AttributeError):  # a Python built for an old C library has no memfd_create
            mine = []
        everyone = self._gather(mine)
        return [given for (given,) in everyone] if all(everyone) else None


@dataclass(frozen=True)
class Started:
    """One that has been started. wait: until it is over, once."""

    wait: Callable[[], None]


def _where(descriptor: int) -> list[Any]:
    """A path by which another process of this host opens a descriptor of this one, and what must be there."""
    return [f"/proc/{os.getpid()}/fd/{descriptor}", *_identity(f"/proc/self/fd/{descriptor}")]


def _open(where: Sequence[Any], flags: int) -> int:
    """A descriptor of another process, opened here. Raises: OSError; also if that process is on another host or in a
    container."""
    path, *identity = where
    if _identity(path) != identity:
        raise FileNotFoundError(path)
    return os.open(path, flags)


def _identity(path: str) -> list[Any]:
    """A file, and the system that it is in since its start."""
    status = os.stat(path)
    return [status.st_dev, status.st_ino, Path("/proc/sys/kernel/random/boot_id").read_text()]
