"""Activations that leave the device and come back: passes O and L of a stage, on the storages that its graphs saved.

Autograd's hooks show what a forward saves, and each storage goes once, whatever views of it are saved. Weights stay,
and so does what anyone else holds too: tables that layers share, and the output, which may still be on its way. Keys
and values of slices are no graph's own: layers say that they keep them, and they go with the last slice that sees them.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from megapipe.distributed.device import Gauge
from megapipe.pipeline_parallel.again import Noting
from megapipe.pipeline_parallel.families.family import Forward, OfStage, Setting
from megapipe.pipeline_parallel.families.offload.host import Buffer, Copy, Host, Sizes
from megapipe.pipeline_parallel.microbatches import Microbatches
from megapipe.schedule.families.offload.rules import MOVES, computed_again
from megapipe.schedule.kinds import Lane
from megapipe.tensor_parallel.rng import Stream
from megapipe.tensor_parallel.saving import saver

KEYS = "core_attn"
"""The module whose keys and values those of slices are."""


@dataclass(eq=False)
class _Slot:
    """A storage that a graph saved. Its `storage` is None while it is on the host, `goes` if that is wanted and
    `stays` if it cannot be."""

    storage: torch.UntypedStorage | None
    size: int
    held: Gauge
    goes: bool = True
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

    @classmethod
    def of(cls, tensor: Tensor, slot: _Slot) -> Self:
        """The tensor, whose storage is the slot's."""
        where = tensor.size(), tensor.stride(), int(tensor.storage_offset())
        return cls(slot, tensor.dtype, tensor.device, *where)

    def tensor(self) -> Tensor:
        """It, while it is on the device."""
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
class Activations(OfStage):
    """The saved activations of one stage, microbatch by microbatch.

    Args:
        module: its parameters stay.
        sizes: of a microbatch, or of each of its slices, which each count as one by their number among all.
        out, again: microbatches that go to the host, and those whose forward runs twice.
        share, modules: as of Host; the first bytes in the order of a microbatch's forward go.
    """

    module: nn.Module
    host: Host
    sizes: Sequence[Sizes]
    share: float
    out: Collection[int]
    again: Collection[int]
    modules: Collection[str] = ()

    def __post_init__(self) -> None:
        self._weights = {p.untyped_storage()._cdata for p in self.module.parameters()}
        self.held = self.host.held
        self._kept: dict[int, _Kept] = {}
        self._keys: dict[int, list[_Slot]] = {}  # by the slice that they go with
        self._of_keys: dict[int, int] = {}
        self._first: dict[int, tuple[Tensor | None, list[Any], Stream]] = {}
        self._to_go = {*self.out}

    def stream(self, stream: Stream, number: int, microbatches: Microbatches) -> Stream:
        return microbatches.keeping(stream, number, self.keep)

    def forward(self, stage: Any, microbatch: int, usual: Forward) -> Forward:
        return partial(self._forward_alone, stage) if microbatch in self.again else usual

    def _forward_alone(self, stage: Any, microbatch: int, x: Tensor | None) -> Tensor | None:
        """Run the forward without a graph, which `repeat` makes."""
        data = None if stage.data_iterator is None else Noting(stage.data_iterator)
        stream = stage.microbatches.begun(microbatch, stage.stream)
        self._first[microbatch] = x, [] if data is None else data.given, stream
        self.hold(microbatch, x)
        with torch.no_grad():
            made: Tensor | None = stage.run_forward(microbatch, x, data, stream)
        return made

    def repeat(self, stage: Any, microbatch: int) -> None:
        """Run the forward of a microbatch a second time, on the same data with the same randomness."""
        x, data, stream = self._first.pop(microbatch)
        self.hold(microbatch, x, -1)
        stage.context.copy().run(stage.run_forward, microbatch, x, iter(data) if data else None, stream)

    def takes_input(self, x: Tensor | None) -> Tensor | None:
        # When the leaf's values leave it is let go of; whoever else keeps the input keeps them in the view.
        return x if x is None else x.view_as(x)

    def keep(self, number: int, last: int, keys: Tensor) -> Callable[[], Tensor]:
        """Hold keys and values of a slice for those behind it; what is returned gives them while they are here.

        last: the last slice that sees them. They go with that, or with the first behind it in its microbatch that does.
        """
        slot, count = _Slot(keys.untyped_storage(), keys.untyped_storage().nbytes(), self.held), len(self.sizes)
        self._size(number).keys = self._of_keys[number] = self._of_keys.get(number, 0) + slot.size
        # What is kept while its forward runs again stays: by then all that could take it has gone.
        goes = range(last, number // count * count + count) if not self.modules or KEYS in self.modules else ()
        if (out := next((n for n in goes if n in self._to_go), None)) is not None:
            self._keys.setdefault(out, []).append(slot)
        return _View.of(keys, slot).tensor

    def saving(self, microbatch: int) -> AbstractContextManager[None]:
        """A context for a forward, which notes what its graph saves."""
        slots = (kept := _Kept()).slots
        self._kept[microbatch] = kept
        modules = self.modules

        def pack(tensor: Tensor) -> Tensor | _View:
            storage = tensor.untyped_storage()
            at = storage.data_ptr()
            if storage._cdata in self._weights or type(tensor) is not Tensor or not storage.nbytes():
                return tensor
            slot = slots.get(at)
            if slot is None:
                slot = slots[at] = _Slot(storage, storage.nbytes(), self.held, goes=not modules)
            if modules and saver(at) in modules:
                slot.goes = True
            return _View.of(tensor, slot)

        def unpack(saved: Tensor | _View) -> Tensor:
            return saved.tensor() if isinstance(saved, _View) else saved

        return saved_tensors_hooks(pack, unpack)

    def saved(self, microbatch: int, output: Tensor | None, leaf: Tensor | None) -> None:
        kept = self._kept[microbatch]
        kept.leaf = leaf
        self._size(microbatch).saved = sum(slot.size for slot in kept.slots.values())
        if output is not None and (slot := kept.slots.get(output.untyped_storage().data_ptr())):
            slot.stays = True
        if microbatch not in self.out:
            self._drop(microbatch)

    def _size(self, number: int) -> Sizes:
        return self.sizes[number % len(self.sizes)]

    def hold(self, microbatch: int, x: Tensor | None, count: int = 1) -> None:
        """Count an input that stays until its forward runs again."""
        size = self._size(microbatch)
        size.input = 0 if x is None else x.nbytes
        self.held.add(count * size.input)

    def offload(self, microbatch: int) -> Copy:
        """Begin O."""
        kept, host = self._kept[microbatch], self.host
        self._to_go.discard(microbatch)
        if (leaf := kept.leaf) is not None:  # its values live in the slot alone; its shape is what its gradient needs
            leaf.data = leaf.data.new_empty(1).expand(leaf.shape)
        going, wanted = [], [slot for slot in kept.slots.values() if slot.goes]
        left = self.share * sum(slot.size for slot in wanted)
        for slot in wanted:
            left -= slot.size
            if left >= -slot.size / 2 and not slot.stays and slot.storage is not None and _alone(slot.storage):
                going.append(slot)
        going += self._keys.get(microbatch, ())
        for slot in going:
            slot.buffer = host.take(slot.size)
        pairs = [(_of(slot.buffer, slot.size), _bytes(slot.storage)) for slot in going]
        kept.begun = host.out.begin(pairs, [slot.buffer.read for slot in going if slot.buffer])
        del pairs
        self._size(microbatch).copied = sum(slot.size for slot in going)
        for slot in going:  # a GPU's allocator gives the memory to others behind the copy
            slot.storage = None
            self.held.add(-slot.size)
        return Copy(host.out, kept.begun, needed=False)

    def load(self, microbatch: int) -> Copy:
        """Begin L."""
        kept, host = self._kept[microbatch], self.host
        held = *kept.slots.values(), *self._keys.pop(microbatch, ())
        coming = [slot for slot in held if slot.buffer is not None]
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
        return Copy(host.back, begun, needed=True)

    def _drop(self, microbatch: int) -> None:
        # The hooks live as long as the graph and know the slots by this dict: from here on the graph alone holds them.
        self._kept.pop(microbatch).slots.clear()

    def forget(self) -> None:
        for microbatch, (x, _, _) in self._first.items():
            self.hold(microbatch, x, -1)
        self._first.clear()
        for microbatch, kept in list(self._kept.items()):
            for slot in (*kept.slots.values(), *self._keys.get(microbatch, ())):
                if slot.buffer is not None:
                    self.host.give(slot.buffer)
            self._drop(microbatch)
        self._keys.clear()
        self._of_keys.clear()
        self._to_go = {*self.out}


def _alone(storage: torch.UntypedStorage) -> bool:
    """Is it held by us alone?"""
    return torch._C._storage_Use_Count(storage._cdata) == 1


def _bytes(storage: torch.UntypedStorage | None) -> Tensor:
    assert storage is not None
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def _of(buffer: Buffer | None, size: int) -> Tensor:
    assert buffer is not None
    return buffer.bytes[:size]


def moves_of(setting: Setting) -> dict[int, Activations]:
    """Return the activations of each stage under a table that moves them; none under another."""
    table, chunks, step, host = setting
    if step.forward_only or table.kinds.isdisjoint(MOVES):
        return {}
    host.begin()
    host.held, host.sizes = Gauge(), {stage: [Sizes() for _ in table.slices] for stage in chunks}
    every = table.passes()
    out = {(x.stage, table.number(x)) for x in every if x.kind.traits.lane is Lane.D2H}
    again = computed_again(table)
    return {
        stage: Activations(
            module,
            host,
            host.sizes[stage],
            host.share,
            out=frozenset(number for s, number in out if s == stage),
            again=frozenset(number for s, number in again if s == stage),
            modules=host.modules,
        )
        for stage, (module, _) in chunks.items()
    }
