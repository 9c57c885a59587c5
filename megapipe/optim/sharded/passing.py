"""Flat tensors whose memory is allocated and released, and the gathering that fills them."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from megapipe.distributed.axis import Axis
from megapipe.distributed.device import Gauge


class Passing:
    """A flat tensor whose memory can be allocated and released again.

    `allocate` and `release` resize only the tensor's storage. Views of the tensor stay valid, and
    see the next content.

    Args:
        flat: the tensor, with memory, and the only one in its storage.
        live: counts the bytes of such tensors that are allocated.

    Attributes:
        there: whether the tensor has memory.
    """

    def __init__(self, flat: Tensor, live: Gauge) -> None:
        self.flat = flat
        self._live = live
        self._bytes = flat.nbytes
        self.there = True
        live.add(self._bytes)

    def allocate(self) -> None:
        """Allocate the memory, uninitialised. The tensor must have none."""
        assert not self.there
        # Resizing keeps the storage's identity, which views and autograd graphs hold on to.
        self.flat.untyped_storage().resize_(self._bytes)
        self.there = True
        self._live.add(self._bytes)

    def release(self) -> None:
        """Release the memory, if there is any."""
        if self.there:
            self.flat.untyped_storage().resize_(0)
            self.there = False
            self._live.add(-self._bytes)


def start_filling(flat: Tensor, shard: Tensor, shares: Axis) -> Callable[[], None]:
    """Start to gather every rank's shard into `flat`. Return a function that waits for the end.

    `shares` is the axis of the ranks that hold the shards.
    """
    pending = shares.start_all_gather(shard, into=flat)

    def finish() -> None:
        gathered = pending.wait()
        # On a CPU the gathering may have used a tensor of its own.
        if gathered is not flat:
            flat.copy_(gathered)

    return finish


def separate(shard: Tensor) -> Tensor:
    """Return a shard, a slice of a flat tensor, so that it can be gathered into that tensor.

    On a CPU it is a copy, because a gathering there cannot write to the memory that it reads. NCCL
    can.
    """
    return shard if shard.is_cuda else shard.clone()
