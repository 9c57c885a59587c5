"""Activations that leave the device and come back: passes O and L of a stage, on the storages that its graphs saved.

Autograd's hooks show what a forward saves, and each storage goes once, whatever views of it are saved. Weights stay,
and so does what anyone else holds too: tables that layers share, and the output, which may still be on its way.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from megapipe.distributed.device import CopyLane
from megapipe.schedule import Schedule
from megapipe.schedule.kinds import COPIES, Lane
from megapipe.schedule.memory.held import computed_again

_ALIGNED = 512
"""Buffers on the host have sizes of so many bytes: few different ones, each used by every microbatch in turn."""


@dataclass(eq=False)
class Held:
    """Bytes of activations on the device, of all stages of a rank."""

    bytes: int = 0
    peak: int = 0

    def add(self, size: int) -> None:
        """Count so many more."""
        self.bytes += size
        self.peak = max(self.peak, self.bytes)


@dataclass(eq=False)
class Sizes:
    """Bytes of one microbatch of a stage: what its graph saves, what of it goes to the host, and what stays of its
    input where the forward runs twice. Of the last that did so in a step."""

    saved: int = 0
    copied: int = 0
    input: int = 0


class Buffer(NamedTuple):
    """Bytes on the host; `read` is what was begun last of those that read them."""

    bytes: Tensor
    read: Any = None


class Host:
    """A rank's buffers on the host, kept from step to step, and its lanes there and back.

    Attributes:
        held, sizes: what the stages of the last step had on the device, and by stage what a microbatch of it is, where
            the table has O, L or R.
        bytes: of all buffers together.
        share: of each microbatch's bytes that goes.
    """

    def __init__(self, device: torch.device) -> None:
        self.out, self.back = CopyLane(device), CopyLane(device)
        self._free: dict[int, list[Buffer]] = {}
        self.bytes, self.held, self.share = 0, Held(), 1.0
        self.sizes: dict[int, Sizes] = {}

    def take(self, size: int) -> Buffer:
        """Take a buffer of at least so many bytes."""
        size = -(-size // _ALIGNED) * _ALIGNED
        if free := self._free.get(size):
            return free.pop()
        self.bytes += size
        return Buffer(self.out.buffer(size))

    def give(self, buffer: Buffer) -> None:
        """The buffer may be written again, behind what reads it."""
        self._free.setdefault(buffer.bytes.numel(), []).append(buffer)


@dataclass(eq=False)
class _Slot:
    """A storage that a graph saved. Its `storage` is None while it is on the host, `stays` if it never goes."""

    storage: torch.UntypedStorage | None
    size: int
    held: Held
    stays: bool = False
    buffer: Buffer | None = None

    def __post_init__(self) -> None:
        self.held.add(self.size)

    def __del__(self) -> None:
        if self.storage is not None:
            self.held.add(-self.size)


class _View(NamedTuple):
    """A saved tensor, as a view of its storage."""

    slot: _Slot
    dtype: torch.dtype
    device: torch.device
    size: torch.Size
    stride: tuple[int, ...]
    offset: int

    def tensor(self) -> Tensor:
        assert self.slot.storage is not None, "used while it is on the host"
        empty = torch.empty(0, dtype=self.dtype, device=self.device)
        return empty.set_(self.slot.storage, self.offset, self.size, self.stride)


@dataclass(eq=False)
class _Kept:
    """The slots of a microbatch, by the address of their storage, and what is under way to the host."""

    slots: dict[int, _Slot] = field(default_factory=dict)
    begun: Any = None
    leaf: Tensor | None = None


@dataclass(eq=False)
class Activations:
    """The saved activations of one stage, microbatch by microbatch.

    Args:
        module: its parameters stay.
        out, again: microbatches that go to the host, and those whose forward runs twice.
        share: of each microbatch's bytes, the first in the order of its forward, that go.
    """

    module: nn.Module
    host: Host
    sizes: Sizes
    share: float
    out: Collection[int]
    again: Collection[int]

    def __post_init__(self) -> None:
        self._weights = {p.untyped_storage()._cdata for p in self.module.parameters()}
        self.held = self.host.held
        self._kept: dict[int, _Kept] = {}

    def saving(self, microbatch: int) -> AbstractContextManager[None]:
        """A context for a forward, which notes what its graph saves."""
        slots = (kept := _Kept()).slots
        self._kept[microbatch] = kept

        def pack(tensor: Tensor) -> Tensor | _View:
            storage = tensor.untyped_storage()
            at = storage.data_ptr()
            if storage._cdata in self._weights or type(tensor) is not Tensor or not storage.nbytes():
                return tensor
            slot = slots.get(at)
            if slot is None:
                slot = slots[at] = _Slot(storage, storage.nbytes(), self.held)
            return _View(
                slot, tensor.dtype, tensor.device, tensor.size(), tensor.stride(), int(tensor.storage_offset())
            )

        def unpack(saved: Tensor | _View) -> Tensor:
            return saved.tensor() if isinstance(saved, _View) else saved

        return saved_tensors_hooks(pack, unpack)

    def saved(self, microbatch: int, output: Tensor | None, leaf: Tensor | None) -> None:
        """The forward is over. leaf: where its graph begins, held for its gradient alone."""
        kept = self._kept[microbatch]
        kept.leaf = leaf
        self.sizes.saved = sum(slot.size for slot in kept.slots.values())
        if output is not None and (slot := kept.slots.get(output.untyped_storage().data_ptr())):
            slot.stays = True
        if microbatch not in self.out:
            self._drop(microbatch)

    def hold(self, x: Tensor | None, count: int = 1) -> None:
        """Count an input that stays until its forward runs again."""
        self.sizes.input = 0 if x is None else x.nbytes
        self.held.add(count * self.sizes.input)

    def offload(self, microbatch: int) -> Callable[[], None]:
        """Begin O: what is returned waits for its end."""
        kept, host = self._kept[microbatch], self.host
        if (leaf := kept.leaf) is not None:  # its values live in the slot alone; its shape is what its gradient needs
            leaf.data = leaf.data.new_empty(1).expand(leaf.shape)
        going, left = [], self.share * self.sizes.saved
        for slot in kept.slots.values():
            left -= slot.size
            if left >= -slot.size / 2 and not slot.stays and slot.storage is not None and _alone(slot.storage):
                slot.buffer = host.take(slot.size)
                going.append(slot)
        pairs = [(_of(slot.buffer, slot.size), _bytes(slot.storage)) for slot in going]
        kept.begun = host.out.begin(pairs, [slot.buffer.read for slot in going if slot.buffer])
        del pairs
        self.sizes.copied = sum(slot.size for slot in going)
        for slot in going:  # a GPU's allocator gives the memory to others behind the copy
            slot.storage = None
            self.held.add(-slot.size)
        return lambda: None

    def load(self, microbatch: int) -> Callable[[], None]:
        """Begin L: what is returned waits for its end."""
        kept, host = self._kept[microbatch], self.host
        coming = [slot for slot in kept.slots.values() if slot.buffer is not None]
        pairs = []
        for slot in coming:
            device = host.back.device
            slot.storage = torch.empty(slot.size, dtype=torch.uint8, device=device).untyped_storage()
            self.held.add(slot.size)
            pairs.append((_bytes(slot.storage), _of(slot.buffer, slot.size)))
        begun = host.back.begin(pairs, [kept.begun])
        for slot in coming:
            assert slot.buffer is not None
            host.give(slot.buffer._replace(read=begun))
            slot.buffer = None
        self._drop(microbatch)
        return lambda: host.back.wait(begun)

    def _drop(self, microbatch: int) -> None:
        # The hooks live as long as the graph and know the slots by this dict: from here on the graph alone holds them.
        self._kept.pop(microbatch).slots.clear()

    def forget(self) -> None:
        """All microbatches so far."""
        for microbatch, kept in list(self._kept.items()):
            for slot in kept.slots.values():
                if slot.buffer is not None:
                    self.host.give(slot.buffer)
            self._drop(microbatch)


def _alone(storage: torch.UntypedStorage) -> bool:
    """Is it held by us alone?"""
    return torch._C._storage_Use_Count(storage._cdata) == 1


def _bytes(storage: torch.UntypedStorage | None) -> Tensor:
    assert storage is not None
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def _of(buffer: Buffer | None, size: int) -> Tensor:
    assert buffer is not None
    return buffer.bytes[:size]


def moves_of(table: Schedule, chunks: Mapping[int, tuple[nn.Module, Any]], host: Host) -> dict[int, Activations]:
    """The activations of each stage under a table that moves them; none under another. Arguments as of Activations."""
    if not any(kind.traits.again or kind.traits.lane in COPIES for kind in table.kinds):
        return {}
    host.held, host.sizes = Held(), {stage: Sizes() for stage in chunks}
    out = {x[1:3] for row in table.ranks for step in row for x in step if x.kind.traits.lane is Lane.D2H}
    again = computed_again(table)
    return {
        stage: Activations(
            module,
            host,
            host.sizes[stage],
            host.share,
            out=frozenset(number for s, number in out if s == stage),
            again=frozenset(number for s, number in again if s == stage),
        )
        for stage, (module, _) in chunks.items()
    }
