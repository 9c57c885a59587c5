"""Exchange tensors between CPU ranks of one host through memory that all of them have mapped.

Gloo sends every tensor through the kernel's TCP stack, with threads of its own. Here each rank
copies its tensor into a segment that the others read. A byte in a pipe says that the copy is done.
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

# Least bytes of a segment: making a segment takes many times as long as an exchange.
_SMALLEST = 1 << 16
TIMEOUT_S = 1800.0
"""Seconds that a rank is waited for if no other timeout is set; gloo's default."""


@dataclass
class _Slot:
    """One shared-memory segment of every rank. Together they serve one exchange at a time.

    Attributes:
        segments: the segments as bytes, in rank order.
        busy: whether this rank has copied into its segment and has not read all segments yet.
        free_from: index of an exchange, counted from 0. Once it or a later one is over, all ranks
            have read the segments. -1 before the first use.
    """

    segments: tuple[Tensor, ...]
    busy: bool = False
    free_from: int = -1


@dataclass
class _Peer:
    """Another rank of the group, as seen from this rank.

    Attributes:
        inbox, outbox: file descriptors of the pipes from the other rank and to it.
        heard: number of exchanges that the other rank has started, as far as this rank has read
            from the pipe.
        slots: {number of an exchange: index of the `_Slot` that serves it}, for exchanges that the
            other rank has started and this rank has not waited for.
    """

    inbox: int
    outbox: int
    heard: int = 0
    slots: dict[int, int] = field(default_factory=dict)


class SharedMemory:
    """Exchanges of tensors through shared memory between the ranks of a group on one host.

    All ranks start the same exchanges in the same order, by calling `start`. If a rank cannot make
    a pipe or segment, or cannot open another rank's, no rank uses shared memory from then on.

    Args:
        rank: position in the group.
        gather: takes this rank's value, and returns the values of all ranks in rank order; a
            collective.
        position: position.limit_s is the timeout of a wait for another rank, in seconds.
        name: name of the group for errors.
    """

    def __init__(
        self, rank: int, gather: Callable[[Any], list[Any]], position: Position, name: str
    ) -> None:
        self._rank = rank
        self._gather = gather
        self._position = position
        self._name = name
        self._works = True
        self._peers: dict[int, _Peer] = {}
        self._slots: list[_Slot] = []
        # Number of exchanges that this rank has started, and the latest one that is over.
        self._started = 0
        self._over = -1

    def start(
        self, x: Tensor, read: Callable[[Sequence[Tensor]], object], most: int | None = None
    ) -> Started | None:
        """Copy x to shared memory, for all ranks of the group to read. x may change after the call.

        If there is no segment yet that is large enough, the call is collective.

        Args:
            x: this rank's tensor.
            read: called at the end with every rank's x, in rank order.
            most: if ranks have different numbers of rows in x, the largest number. Then `read` gets
                tensors with this number of rows.
        Returns: the started exchange; None if there is no shared memory, as on several hosts, in a
            sandbox, without room, or outside Linux.
        Raises: DistNetworkError if another rank has ended.
        """
        shape = x.shape if most is None else (most, *x.shape[1:])
        nbytes = math.prod(shape) * x.itemsize
        index = self._room(nbytes)
        if index is None:
            return None
        # All ranks choose the same slot, because they start equal exchanges in one order.
        slot = self._slots[index]
        slot.busy = True
        number = self._started
        self._started += 1
        views = [segment[:nbytes].view(x.dtype).view(shape) for segment in slot.segments]
        own = views[self._rank]
        if x.ndim:
            # Fewer rows than the longest tensor, for which the segment has room.
            own = own[: len(x)]
        own.copy_(x)
        for rank, peer in self._peers.items():
            try:
                os.write(peer.outbox, bytes((index,)))
            except BrokenPipeError:
                raise self._gone(rank) from None

        def wait() -> None:
            with record_function("exchange through shared memory"):
                for rank, peer in self._peers.items():
                    if self._hear(rank, peer, number) != index:
                        raise AssertionError(
                            "the ranks of a group exchange tensors in different orders"
                        )
                read(views)
            self._over = max(self._over, number)
            slot.busy = False
            # Others may still be reading. Every rank starts exchange number `_started` only after
            # it has read this one, so the end of that exchange proves that all have read.
            slot.free_from = self._started

        return Started(wait)

    def _hear(self, rank: int, peer: _Peer, number: int) -> int:
        """Wait until a peer has started an exchange, and return the index of the slot that it uses.

        Args:
            rank: the peer's position in the group.
            peer: the peer.
            number: number of the exchange, counted from the first.
        Raises: DistNetworkError after the timeout, or if the peer has ended.
        """
        limit_s = self._position.limit_s or TIMEOUT_S
        inbox = select.poll()
        inbox.register(peer.inbox, select.POLLIN)
        while number not in peer.slots:
            if not inbox.poll(1000 * limit_s):
                raise dist.DistNetworkError(
                    f"Timed out after {limit_s:g} s of waiting for rank {rank} of the {self._name}"
                )
            # One byte, the number of a slot, for each exchange.
            received = os.read(peer.inbox, 64)
            if not received:
                raise self._gone(rank)
            peer.slots.update(enumerate(received, peer.heard))
            peer.heard += len(received)
        return peer.slots.pop(number)

    def _gone(self, rank: int) -> dist.DistNetworkError:
        """Return the error for a rank whose process has ended."""
        return dist.DistNetworkError(f"rank {rank} of the {self._name} has closed its pipe")

    def _room(self, nbytes: int) -> int | None:
        """Return the first slot with room for `nbytes` whose segments all ranks have read.

        A new slot is made if there is none.

        Returns: the slot's index; None without shared memory.
        """
        if not self._works:
            return None
        for index, slot in enumerate(self._slots):
            is_free = not slot.busy and slot.free_from <= self._over
            if is_free and len(slot.segments[0]) >= nbytes:
                return index
        if not self._peers:
            self._works = self._meet()
        if not self._works:
            return None
        # Powers of two, so that few slots serve tensors of many sizes.
        power = 1 << (nbytes - 1).bit_length()
        segments = self._map(max(_SMALLEST, power))
        if segments is None:
            self._works = False
            return None
        self._slots.append(_Slot(segments))
        return len(self._slots) - 1

    def _meet(self) -> bool:
        """Open a pipe from every rank to every other; return False if a rank could not."""
        # The group is not handed to this class, but a gathering has an entry for each rank.
        size = len(self._gather(None))
        pipes: list[tuple[int, int]] = []
        outboxes: list[int] = []

        def make() -> list[Any]:
            while len(pipes) < size:
                # One to itself too, which is never used, so that positions in all lists are ranks.
                pipes.append(os.pipe())
            return [_where(outbox) for _, outbox in pipes]

        rows = self._agreed(make)
        works = rows is not None and self._agreed(
            lambda: outboxes.extend(_open(row[self._rank], os.O_WRONLY) for row in rows)
        )
        # Only the sender keeps the writing end open, so that a read ends with the sender's process.
        for _, own in pipes:
            os.close(own)
        for descriptor in (*(inbox for inbox, _ in pipes), *outboxes):
            if works:
                weakref.finalize(self, os.close, descriptor)
            else:
                os.close(descriptor)
        if works:
            for rank, ((inbox, _), outbox) in enumerate(zip(pipes, outboxes, strict=True)):
                if rank != self._rank:
                    self._peers[rank] = _Peer(inbox, outbox)
        return bool(works)

    def _map(self, nbytes: int) -> tuple[Tensor, ...] | None:
        """Return a new segment of `nbytes` of every rank; None if a rank could not make or map one.

        Segments have no name in the file system and end with the processes.
        """
        descriptors: list[int] = []
        segments: list[Tensor] = []

        def make() -> list[Any]:
            descriptors.append(os.memfd_create("megapipe"))
            os.ftruncate(descriptors[0], nbytes)
            return _where(descriptors[0])

        def see(rows: list[Any]) -> None:
            for row in rows:
                descriptors.append(_open(row, os.O_RDWR))
                mapped = mmap.mmap(descriptors[-1], nbytes)
                segments.append(torch.frombuffer(mapped, dtype=torch.uint8))

        rows = self._agreed(make)
        works = rows is not None and self._agreed(lambda: see(rows))
        # A mapping stays without its descriptor.
        for descriptor in descriptors:
            os.close(descriptor)
        return tuple(segments) if works else None

    def _agreed(self, work: Callable[[], Any]) -> list[Any] | None:
        """Return the results of `work` on every rank; None on all ranks if it fails on any.

        Failing means an OSError or AttributeError: the system or Python cannot do something.
        """
        try:
            own = [work()]
        # A Python built for an old C library has no memfd_create.
        except (OSError, AttributeError):
            own = []
        everyone = self._gather(own)
        if not all(everyone):
            return None
        return [result for (result,) in everyone]


@dataclass(frozen=True)
class Started:
    """An exchange that has been started.

    Attributes:
        wait: waits until the exchange is over; call it once.
    """

    wait: Callable[[], None]


def _where(descriptor: int) -> list[Any]:
    """Return a list with which another process can open a file descriptor of this process.

    The first item is a path. The other items are the result of `_identity`, by which `_open` checks
    that both processes mean one file.
    """
    identity = _identity(f"/proc/self/fd/{descriptor}")
    return [f"/proc/{os.getpid()}/fd/{descriptor}", *identity]


def _open(where: Sequence[Any], flags: int) -> int:
    """Open a file descriptor of another process in this process.

    Args:
        where: the result of `_where` in that process.
        flags: flags of os.open.
    Raises: OSError if it cannot be opened, or if the process is on another host or in a container.
    """
    path, *identity = where
    # On another host or in a container, another process may have this path.
    if _identity(path) != identity:
        raise FileNotFoundError(path)
    return os.open(path, flags)


def _identity(path: str) -> list[Any]:
    """Return values that identify a file and the running system, to compare between processes."""
    status = os.stat(path)
    return [status.st_dev, status.st_ino, Path("/proc/sys/kernel/random/boot_id").read_text()]
