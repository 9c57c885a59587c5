"""Post sends and receives between two pipeline ranks, in one of three modes.

Messages between two ranks have no names. The first one that an end sends is the first one that the
other end must receive. So every mode keeps the order of the operations between two ranks.
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
    """The way in which the sends and receives of one call are posted.

    plain: one by one; each completes on its own.
    batched: as one group, which is one NCCL launch on the axis's communicator.
    ring: as groups with at most one send and one receive per neighbour. A group completes as a
        unit.

    With gloo the operations of a group are posted one by one.
    """

    PLAIN = "plain"
    BATCHED = "batched"
    RING = "ring"


class Handle(Protocol):
    """The handle of a send or receive that was posted, like torch.distributed's Work."""

    def wait(self) -> Any:
        """Wait until the operation has completed."""

    def is_completed(self) -> bool:
        """Return whether the operation has completed; False for gloo's sends before a wait."""


class Op(NamedTuple):
    """A send to the rank at position `peer` of the axis, or a receive from it.

    Gloo pairs a send with the receive of the same tag, so a lost message stops the ranks at the
    place where it is missing. NCCL has no tags and pairs by order.

    Attributes:
        sends: whether it is a send.
        peer: position of the other rank in the pipeline.
        tensor: the tensor to send, or the buffer to receive into.
        tag: number of the message.
    """

    sends: bool
    peer: int
    tensor: Tensor
    tag: int = 0


class Ahead(NamedTuple):
    """A rule for posting receives earlier than their place in the program.

    Attributes:
        places: each receive is posted this number of receives earlier; 0 to move none.
        peers: only receives from these pipeline ranks are posted earlier.
    """

    places: int
    peers: frozenset[int]


class InFlight:
    """A tensor that is being sent or received.

    `wait` waits for the transfer and returns the tensor. `is_over` says whether the transfer is
    over.

    Args:
        tensor: the tensor, or the buffer that receives it.
        work: the handle of the operation.
        then: called once the tensor has arrived or left; None to call nothing.
    """

    __slots__ = ("_then", "_work", "tensor")

    def __init__(
        self, tensor: Tensor, work: Handle, then: Callable[[], None] | None = None
    ) -> None:
        self.tensor = tensor
        self._work = work
        self._then = then

    @property
    def is_over(self) -> bool:
        """Return whether `wait` would return at once; False if the handle does not know."""
        return self._work.is_completed()

    def wait(self) -> Tensor:
        """Return the tensor once it has arrived or left.

        Call it only once: at a second wait gloo would wait for another message.
        """
        self._work.wait()
        if self._then is not None:
            self._then()
        return self.tensor


class Transport:
    """A poster of sends and receives over the process group of an axis.

    `post` starts several operations as `mode` says, and `one` starts one operation.
    `receives_ahead` says which receives may be posted early.

    Args:
        pp: the pipeline axis. The axis's group may be a bare ProcessGroup that torch.distributed
            does not know, as when each rank is a thread. If the axis has links (a communicator for
            each direction between neighbours), messages of the mode `plain` use them.
        mode: the way to post the operations of one call.
    """

    def __init__(self, pp: Axis, mode: str = P2PMode.PLAIN) -> None:
        self.pp = pp
        self.mode = P2PMode(mode)

    @property
    def receives_ahead(self) -> Ahead:
        """Return which receives may be posted before their place in the program."""
        none = Ahead(0, frozenset())
        # A batch must stay together: its peers post the same group.
        if self.mode is not P2PMode.PLAIN:
            return none
        # With CUDA_LAUNCH_BLOCKING=1 the host waits for each kernel. An early receive would block
        # it until the sender comes, and that sender may be waiting for this rank.
        if self.pp.device.type == "cuda" and waits_for_kernels():
            return none
        # Gloo saves a round trip if the receive is there when the message comes.
        if self.pp.device.type == "cpu":
            return Ahead(4, frozenset(range(self.pp.size)))
        # NCCL begins a transfer once the passes enqueued before it are over. Posted one place early
        # it runs during a pass. It also holds up all that is posted after it on its communicator,
        # so this needs links, which have one communicator for each direction.
        linked = []
        if self.pp.links:
            peers = range(self.pp.size)
            linked = [p for p in peers if link(p, self.pp.rank, self.pp.size) is not None]
        return Ahead(1, frozenset(linked))

    def post(self, ops: list[Op]) -> Sequence[Handle]:
        """Start the operations, and return a handle for each.

        In the mode `plain` operations start in the order of the list. A group has no order of its
        own.
        """
        if not ops:  # a batch of nothing is an IndexError in torch
            return []
        if self.mode is P2PMode.PLAIN:
            return [self.one(op) for op in ops]
        if self.mode is P2PMode.BATCHED:
            return self._batch(ops)
        handles: list[Handle] = []
        for group in _rounds(ops):
            handles += [self._ring(group)] * len(group)
        return handles

    def one(self, op: Op) -> Handle:
        """Start one operation and return its handle."""
        # NCCL runs the operations of one communicator in order. A link has one communicator for
        # each direction, so there a send never waits for a receive that was posted before it.
        if op.sends:
            group = self._link(self.pp.rank, op.peer) or self.pp.group
        else:
            group = self._link(op.peer, self.pp.rank) or self.pp.group
        assert group is not None
        post = group.send if op.sends else group.recv
        return post([op.tensor], op.peer, op.tag)

    def _link(self, src: int, dst: int) -> dist.ProcessGroup | None:
        """Return the communicator for messages from src to dst; None for the pipeline's own group.

        If all ranks share the vocabulary, one more communicator serves ranks that are no
        neighbours.
        """
        number = link(src, dst, self.pp.size)
        if number is None:
            number = num_links(self.pp.size)
        return self.pp.links[number] if number < len(self.pp.links) else None

    def _batch(self, ops: list[Op]) -> Sequence[Handle]:
        """Start the operations as one group (on CPUs one by one), and return a handle for each."""
        # Gloo coalesces nothing, and P2POp refuses the groups of threads.
        if self.pp.device.type != "cuda":
            return [self.one(op) for op in ops]
        calls = []
        for op in ops:
            do = dist.isend if op.sends else dist.irecv
            calls.append(dist.P2POp(do, op.tensor, group=self.pp.group, group_peer=op.peer))
        works: list[dist.Work] = dist.batch_isend_irecv(calls)
        # NCCL returns one Work for the whole batch.
        return works if len(works) == len(ops) else works * len(ops)

    def _ring(self, ops: list[Op]) -> _Unit:
        """Start one group of operations in the mode `ring`, and return the handle of all of them.

        Uses torch.distributed.ring_exchange in builds that have it; stock PyTorch does not.
        Otherwise the group is posted as in the mode `batched`.
        """
        native = getattr(dist, "ring_exchange", None)
        before = (self.pp.rank - 1) % self.pp.size
        after = (self.pp.rank + 1) % self.pp.size
        # With two ranks both neighbours are the same rank, and the native call could not
        # distinguish its tensors.
        is_ring = before != after and all(op.peer in (before, after) for op in ops)
        if native is None or not is_ring:
            return _Unit(self._batch(ops))
        named = {}
        for op in ops:
            way = "send" if op.sends else "recv"
            side = "next" if op.peer == after else "prev"
            named[f"tensor_{way}_{side}"] = op.tensor
        native(**named, group=self.pp.group)
        return _Unit(())


class _Unit:
    """A handle of several operations that complete together, made from their handles."""

    def __init__(self, works: Sequence[Handle]) -> None:
        self._works = list(works)

    def wait(self) -> None:
        # Each Work is waited for once, however many operations ask.
        while self._works:
            self._works.pop().wait()

    def is_completed(self) -> bool:
        return all(work.is_completed() for work in self._works)


def _rounds(ops: list[Op]) -> list[list[Op]]:
    """Split operations into groups with at most one send and one receive for each peer."""
    rounds: list[list[Op]] = []
    seen: set[tuple[bool, int]] = set()
    for op in ops:
        if not rounds or op[:2] in seen:
            rounds.append([])
            seen = set()
        rounds[-1].append(op)
        seen.add(op[:2])
    return rounds
