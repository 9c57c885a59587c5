"""Transport of tensors between two pipeline ranks: three modes of posting operations, and handles to wait for.

Between two ranks messages have no names, only an order: what one end sends first, the other must receive first.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from enum import StrEnum
from typing import Any, NamedTuple, Protocol

import torch.distributed as dist
from torch import Tensor

from megapipe.distributed.axis import Axis
from megapipe.distributed.device import waits_for_kernels
from megapipe.distributed.groups import link, num_links

Shape = Sequence[int]


class P2PMode(StrEnum):
    """A way of posting the operations of one call.

    plain: one by one; each completes on its own.
    batched: as one group (one NCCL launch on the axis' communicator).
    ring: as groups with at most one send and one receive per neighbour; a group completes as a unit.
    """

    PLAIN = "plain"
    BATCHED = "batched"
    RING = "ring"


class Handle(Protocol):
    """Something that completes."""

    def wait(self) -> Any:
        """Return once it has."""

    def is_completed(self) -> bool:
        """Has it completed? Gloo's sends say no until they are waited for."""


class Op(NamedTuple):
    """A tensor from here to the rank at position `peer` of the axis, or (not sends) from there to here.

    Gloo pairs a send with the receive of the same tag, so a lost message stops the ranks where it is missing; NCCL
    knows only the order.
    """

    sends: bool
    peer: int
    tensor: Tensor
    tag: int = 0


class Ahead(NamedTuple):
    """The number of receives that may be posted before their turn, and the ranks that they are from."""

    places: int
    peers: frozenset[int]


class InFlight:
    """A tensor that may still be on its way."""

    __slots__ = ("_then", "_work", "tensor")

    def __init__(self, tensor: Tensor, work: Handle, then: Callable[[], None] | None = None) -> None:
        self.tensor, self._work, self._then = tensor, work, then

    @property
    def is_over(self) -> bool:
        """Would `wait` return at once? A handle may not know."""
        return self._work.is_completed()

    def wait(self) -> Tensor:
        """The tensor, once it has arrived or left. To be called once: gloo would wait for a second message."""
        self._work.wait()
        if self._then is not None:
            self._then()
        return self.tensor


class Transport:
    """Posts operations over the axis' group.

    Args:
        pp: the pipeline axis; its group may be a bare ProcessGroup that torch.distributed does not know (threads).
            Where it has links, plain messages between neighbours go over these.
    """

    def __init__(self, pp: Axis, mode: str = P2PMode.PLAIN) -> None:
        self.pp, self.mode = pp, P2PMode(mode)

    @property
    def receives_ahead(self) -> Ahead:
        """The receives that may be posted before their turn.

        Over gloo a message whose receive is there saves a round trip. Over NCCL a transfer begins when the passes that
        were enqueued before it are over: posted one place early it runs beside a pass. That needs a communicator of one
        way, as it holds up what is posted behind it; and a batch must stay together. Where the host waits for each
        kernel (CUDA_LAUNCH_BLOCKING=1) a receive ahead of its turn would wait for a sender that waits for this rank.
        """
        if self.mode is not P2PMode.PLAIN or (self.pp.device.type == "cuda" and waits_for_kernels()):
            return Ahead(0, frozenset())
        if self.pp.device.type == "cpu":
            return Ahead(4, frozenset(range(self.pp.size)))
        linked = [peer for peer in range(self.pp.size) if link(peer, self.pp.rank, self.pp.size) is not None]
        return Ahead(1, frozenset(linked if self.pp.links else ()))

    def post(self, ops: list[Op]) -> Sequence[Handle]:
        """Start the operations, in their order as far as the mode has one; a handle for each."""
        if not ops:  # a batch of nothing is an IndexError in torch
            return []
        if self.mode is P2PMode.PLAIN:
            return [self.one(op) for op in ops]
        if self.mode is P2PMode.BATCHED:
            return self._batch(ops)
        return [unit for group in _rounds(ops) for unit in [self._ring(group)] * len(group)]

    def one(self, op: Op) -> Handle:
        """Start one operation."""
        # A communicator for each way of each link, where there are any: NCCL runs those of one communicator in order.
        group = (self._link(self.pp.rank, op.peer) if op.sends else self._link(op.peer, self.pp.rank)) or self.pp.group
        assert group is not None
        return (group.send if op.sends else group.recv)([op.tensor], op.peer, op.tag)

    def _link(self, src: int, dst: int) -> dist.ProcessGroup | None:
        number = link(src, dst, self.pp.size)
        number = num_links(self.pp.size) if number is None else number  # beyond neighbours
        return self.pp.links[number] if number < len(self.pp.links) else None

    def _batch(self, ops: list[Op]) -> Sequence[Handle]:
        if self.pp.device.type != "cuda":  # gloo coalesces nothing, and P2POp refuses groups of threads
            return [self.one(op) for op in ops]
        calls = [
            dist.P2POp(dist.isend if op.sends else dist.irecv, op.tensor, group=self.pp.group, group_peer=op.peer)
            for op in ops
        ]
        works: list[dist.Work] = dist.batch_isend_irecv(calls)
        return works if len(works) == len(ops) else works * len(ops)  # NCCL gives one for all

    def _ring(self, ops: list[Op]) -> _Unit:
        """torch.distributed.ring_exchange in builds that have it (stock PyTorch has not), else a group of our own."""
        native = getattr(dist, "ring_exchange", None)
        before, after = (self.pp.rank - 1) % self.pp.size, (self.pp.rank + 1) % self.pp.size
        # With two ranks both neighbours are one, and the native call could not tell which tensor is which.
        if native is None or before == after or any(op.peer not in (before, after) for op in ops):
            return _Unit(self._batch(ops))
        named = {f"tensor_{'send' if op.sends else 'recv'}_{'next' if op.peer == after else 'prev'}": op for op in ops}
        native(**{name: op.tensor for name, op in named.items()}, group=self.pp.group)
        return _Unit(())


class _Unit:
    """Operations that complete together."""

    def __init__(self, works: Sequence[Handle]) -> None:
        self._works = list(works)

    def wait(self) -> None:
        while self._works:
            self._works.pop().wait()

    def is_completed(self) -> bool:
        return all(work.is_completed() for work in self._works)


def _rounds(ops: list[Op]) -> list[list[Op]]:
    """Runs of consecutive operations in which no direction occurs twice."""
    rounds: list[list[Op]] = []
    seen: set[tuple[bool, int]] = set()
    for op in ops:
        if not rounds or op[:2] in seen:
            rounds.append([])
            seen = set()
        rounds[-1].append(op)
        seen.add(op[:2])
    return rounds
