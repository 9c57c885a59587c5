"""Flat tensors whose memory comes and goes, and the gathering that fills them."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from megapipe.distributed.axis import Axis
from megapipe.distributed.device import Gauge


class Passing:
    """A flat tensor, alone in its storage, whose memory comes and goes."""

    def __init__(self, flat: Tensor, live: Gauge) -> None:
        self.flat, self._live, self._bytes = flat, live, flat.nbytes
        self.there = True
        live.add(self._bytes)

    def come(self) -> None:
        """Take memory, of any content."""
        assert not self.there
        self.flat.untyped_storage().resize_(self._bytes)
        self.there = True
        self._live.add(self._bytes)

    def go(self) -> None:
        """Give the memory back."""
        if self.there:
            self.flat.untyped_storage().resize_(0)
            self.there = False
            self._live.add(-self._bytes)


def start_filling(flat: Tensor, shard: Tensor, shares: Axis) -> Callable[[], None]:
    """Begin to gather every rank's shard into a tensor; what is returned waits for it."""
    pending = shares.start_all_gather(shard, into=flat)

    def finish() -> None:
        if (gathered := pending.wait()) is not flat:
            flat.copy_(gathered)

    return finish


def apart(shard: Tensor) -> Tensor:
    """Return a part of a tensor as what is gathered into the whole of it.

    On a CPU a copy goes out, for the ways of gathering there want the two apart. NCCL does not.
    """
    return shard if shard.is_cuda else shard.clone()
