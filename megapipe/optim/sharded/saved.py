"""The tensors of a checkpoint that ranks hold in shards, gathered or read one bucket at a time.

Saves and loads know a tensor by its full shape. The full tensors are on the host, and have memory
only while they are written or read.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from megapipe.optim.buffers import FlatBuffers


class SavedShard:
    """This rank's share of a bucket's weights, or of one tensor of the bucket's optimizer state.

    To save, some tensors of `full` are given memory, `gather` gathers the bucket, and `copy` writes
    their values. To load, `allocate` gives all of them memory, and after the reading `keep` takes
    this rank's share.

    Args:
        buffers: the bucket.
        flat: this rank's share, a flat tensor.

    Attributes:
        full: {name of a parameter: a tensor of its full shape on the host, at first without
            memory}.
    """

    def __init__(self, buffers: FlatBuffers, flat: Tensor) -> None:
        self._buffers = buffers
        self._flat = flat
        self.full = dict[str, Tensor]()
        for name in buffers.own:
            full = torch.empty(buffers.shape(name), dtype=flat.dtype)
            release(full)
            self.full[name] = full

    def allocate(self) -> None:
        """Give all full tensors memory, uninitialised."""
        for full in self.full.values():
            allocate(full)

    @property
    def nbytes(self) -> int:
        """Bytes of the gathered bucket."""
        return self._flat.nbytes * self._buffers.shares.size

    def new_room(self, nbytes: int) -> Tensor:
        """Return new memory of the bucket's device, to gather into."""
        return self._flat.new_empty(nbytes, dtype=torch.uint8)

    def gather(self, room: Tensor | None = None) -> Tensor:
        """Gather the bucket, and return it as a flat tensor.

        Collective over data parallelism.

        Args:
            room: memory for the bucket, of at least `nbytes`; None for new memory.
        """
        into = None if room is None else room[: self.nbytes].view(self._flat.dtype)
        return self._buffers.gathered(self._flat, into)

    def copy(self, flat: Tensor) -> None:
        """Copy a gathered bucket to the full tensors that have memory on this rank.

        Ranks may keep different tensors.

        Args:
            flat: the result of `gather`.
        """
        for name, full in self.full.items():
            if has_memory(full):
                full.copy_(self._buffers.view(flat, name))

    def keep(self) -> None:
        """Copy this rank's share of the full tensors, and release their memory."""
        for name, full in self.full.items():
            share = self._buffers.share_of(full, name)
            self._buffers.own_part(self._flat, name).copy_(share)
            release(full)


class Saved(NamedTuple):
    """The tensors of this rank in a checkpoint.

    Attributes:
        weights: {parameter: full tensor} for sharded weights; all others are in the model itself.
        state: {kind of optimizer state, such as exp_avg: {parameter: tensor}}. A tensor is a view
            of the optimizer's own, or a full tensor of a shard.
        shards: the shards whose full tensors are in `weights` and `state`, in the same order on
            all data-parallel ranks.
    """

    weights: dict[str, Tensor]
    state: dict[str, dict[str, Tensor]]
    shards: list[SavedShard]


def room_for(shards: Sequence[SavedShard]) -> Tensor | None:
    """Return memory to gather any of these shards into; None if there are none."""
    if not shards:
        return None
    return shards[0].new_room(max(shard.nbytes for shard in shards))


def has_memory(tensor: Tensor) -> bool:
    """Return whether a tensor has values, and not only a shape."""
    return tensor.untyped_storage().nbytes() > 0


def allocate(tensor: Tensor) -> None:
    """Give a tensor memory, uninitialised, unless it has some."""
    if not has_memory(tensor):
        tensor.untyped_storage().resize_(tensor.nbytes)


def release(tensor: Tensor) -> None:
    """Release a tensor's memory. Its shape and all views of it stay."""
    tensor.untyped_storage().resize_(0)
