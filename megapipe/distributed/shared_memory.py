"""Tensors between CPU ranks of one host, through memory that all of them have mapped.

Gloo sends every tensor through the kernel's TCP stack, by threads of its own. Here each rank copies its tensor into a
segment that the others read, and a byte in a pipe says that it is there.
"""

from __future__ import annotations

import mmap
import os
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.profiler import record_function

SMALLEST = 1 << 12
"""Bytes from which a tensor goes this way."""


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

    Args:
        gather: every rank's value, in rank order.
    """

    def __init__(self, rank: int, gather: Callable[[Any], list[Any]]) -> None:
        self._rank, self._gather = rank, gather
        self._works = hasattr(os, "memfd_create")
        self._peers: dict[int, _Peer] = {}
        self._slots: list[_Slot] = []
        self._started = 0
        self._over = -1

    def start(self, x: Tensor, read: Callable[[Sequence[Tensor]], object]) -> Exchange | None:
        """Show x to all ranks; then x may change. Collective at the first use of a size, as it makes room for it.

        Args:
            read: is given every rank's x, in rank order, once all are there.
        Returns: None if x does not go this way: it is small, this is not Linux, or not all ranks are on one host.
        """
        index = self._room(x.nbytes)
        if index is None:
            return None
        slot, number = self._slots[index], self._started
        slot.busy, self._started = True, number + 1
        views = [segment[: x.nbytes].view(x.dtype).view(x.shape) for segment in slot.segments]
        views[self._rank].copy_(x)
        for rank, peer in self._peers.items():
            try:
                os.write(peer.outbox, bytes((index,)))
            except BrokenPipeError:
                raise _gone(rank) from None

        def wait() -> None:
            with record_function("exchange through shared memory"):
                for rank, peer in self._peers.items():
                    if self._hear(rank, peer, number) != index:
                        raise AssertionError("the ranks of a group exchange tensors in different orders")
                read(views)
            self._over = max(self._over, number)
            slot.busy, slot.free_from = False, self._started

        return Exchange(wait)

    def _hear(self, rank: int, peer: _Peer, number: int) -> int:
        """Wait until a peer has started an exchange. Returns: its slot there."""
        while number not in peer.slots:
            told = os.read(peer.inbox, 64)
            if not told:
                raise _gone(rank)
            peer.slots.update(enumerate(told, peer.heard))
            peer.heard += len(told)
        return peer.slots.pop(number)

    def _room(self, nbytes: int) -> int | None:
        """The first slot with room for nbytes whose segments all ranks have read, a new one if there is none."""
        if nbytes < SMALLEST or not self._works:
            return None
        for index, slot in enumerate(self._slots):
            if not slot.busy and slot.free_from <= self._over and len(slot.segments[0]) >= nbytes:
                return index
        if not self._peers:
            self._works = self._meet()
        if self._works:
            self._slots.append(_Slot(self._map(1 << (nbytes - 1).bit_length())))
        return len(self._slots) - 1 if self._works else None

    def _meet(self) -> bool:
        """Open a pipe from every rank to every other. False if a rank could not."""
        pipes = [os.pipe() for _ in self._gather(None)]
        rows = self._gather([_where(outbox) for _, outbox in pipes])
        outboxes = [_open(row[self._rank], os.O_WRONLY) for row in rows]
        works = all(self._gather(None not in outboxes))
        for rank, ((inbox, mine), outbox) in enumerate(zip(pipes, outboxes, strict=True)):
            os.close(mine)  # so that an inbox ends with the process that writes into it
            for descriptor in (inbox, outbox):
                if descriptor is not None:
                    weakref.finalize(self, os.close, descriptor)
            if outbox is not None and rank != self._rank:
                self._peers[rank] = _Peer(inbox, outbox)
        return works

    def _map(self, nbytes: int) -> tuple[Tensor, ...]:
        """A segment of every rank. They have no name in any folder and end with the processes that map them."""
        mine = os.memfd_create("megapipe")
        os.ftruncate(mine, nbytes)
        segments = []
        for row in self._gather(_where(mine)):
            descriptor = _open(row, os.O_RDWR)
            assert descriptor is not None, "a pipe of this rank could be opened, its memory not"
            segments.append(torch.frombuffer(mmap.mmap(descriptor, nbytes), dtype=torch.uint8))
            os.close(descriptor)
        self._gather(None)  # all have opened it
        os.close(mine)
        return tuple(segments)


@dataclass(frozen=True)
class Exchange:
    """One that has been started. wait: until it is over, once."""

    wait: Callable[[], None]


def _where(descriptor: int) -> list[Any]:
    """What another process of this host needs to open a descriptor of this one: a path, and what must be there."""
    return [f"/proc/{os.getpid()}/fd/{descriptor}", *_identity(f"/proc/self/fd/{descriptor}")]


def _open(where: Sequence[Any], flags: int) -> int | None:
    """A descriptor of another process, opened here; None if that process is on another host or in a container."""
    path, *identity = where
    try:
        return os.open(path, flags) if _identity(path) == identity else None
    except OSError:
        return None


def _identity(path: str) -> list[Any]:
    """A file, and the system that it is in since its start."""
    status = os.stat(path)
    return [status.st_dev, status.st_ino, Path("/proc/sys/kernel/random/boot_id").read_text()]


def _gone(rank: int) -> dist.DistNetworkError:
    return dist.DistNetworkError(f"rank {rank} of the tensor-parallel group has closed its pipe")
