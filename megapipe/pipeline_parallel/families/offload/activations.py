"""Move a stage's saved activations to the host and back, for passes O and L.

Autograd's hooks show which tensors a forward saves. Several may be views of one storage, and each
storage moves once. Weights stay. A storage that anyone else holds stays too: a table that layers
share, or the output, which may still be on its way to the next rank.

Keys and values of slices belong to no graph. Layers say that they keep them, and they move with the
last slice that reads them.
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
from megapipe.tensor_parallel.rng import MicrobatchContext
from megapipe.tensor_parallel.saving import saver

KEYS = "core_attn"
"""The module to which the keys and values of slices belong."""


@dataclass(eq=False)
class _Slot:
    """A tensor storage that autograd saved, on the device or as a copy on the host.

    Attributes:
        storage: the storage; None while it is on the host.
        size: the storage's size in bytes.
        held: the counter of bytes on the device, to which the size is added.
        goes: whether the storage may be offloaded, because a module in --offload-modules saved it.
        stays: whether the storage is the stage's output, which cannot be offloaded.
        buffer: the copy on the host; None while there is none.
    """

    storage: torch.UntypedStorage | None
    size: int
    held: Gauge
    goes: bool = True
    stays: bool = False
    buffer: Buffer | None = None

    def __post_init__(self) -> None:
        self.held.add(self.size)

    # Autograd frees what a graph saved without a word: only the end of the slot shows it.
    def __del__(self) -> None:
        if self.storage is not None:
            self.held.add(-self.size)


class _View(NamedTuple):
    """A saved tensor, described as a view of a storage, which may be on the host.

    `of` makes the description, and `tensor` makes the tensor from it.

    Attributes:
        slot: the storage.
        dtype, device, size, stride, offset: the properties of the tensor.
    """

    slot: _Slot
    dtype: torch.dtype
    device: torch.device
    size: torch.Size
    stride: tuple[int, ...]
    offset: int

    @classmethod
    def of(cls, tensor: Tensor, slot: _Slot) -> Self:
        """Return the description of a tensor, whose storage is in `slot`."""
        offset = int(tensor.storage_offset())
        return cls(slot, tensor.dtype, tensor.device, tensor.size(), tensor.stride(), offset)

    def tensor(self) -> Tensor:
        """Return the tensor; the slot's storage must be on the device."""
        assert self.slot.storage is not None, "used while it is on the host"
        empty = torch.empty(0, dtype=self.dtype, device=self.device)
        return empty.set_(self.slot.storage, self.offset, self.size, self.stride)


@dataclass(eq=False)
class _Kept:
    """The storages (memory of tensors) that autograd saved in the forward of one microbatch.

    Attributes:
        slots: {address: the storage there}.
        begun: the copies to the host, as `CopyLane.begin` returned them; None before pass O.
        leaf: the input, where the graph begins; None at the embedding.
    """

    slots: dict[int, _Slot] = field(default_factory=dict)
    begun: Any = None
    leaf: Tensor | None = None


@dataclass(eq=False)
class Activations(OfStage):
    """The saved activations of one stage, with the methods that offload and recompute them.

    `offload` runs pass O (copy to the host), `load` L (copy back) and `repeat` R (recompute).
    `saving`, `saved` and `keep` collect what forwards save. If microbatches are cut, `microbatch`
    is the number of a slice among all slices.

    Args:
        module: the stage, whose parameters stay on the device.
        host: the rank's buffers on the host and its streams of copies.
        sizes: one record for each slice of a microbatch, or a single one; the stage stores the
            bytes that it measures there.
        share: the fraction of the saved bytes to offload. Storages that were saved first are taken.
        out: microbatches whose activations are offloaded.
        again: microbatches whose forward is recomputed.
        modules: Megatron-LM's names of modules whose saved tensors are offloaded; () for all.
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
        # By the slice with which they move.
        self._keys: dict[int, list[_Slot]] = {}
        self._bytes_of_keys: dict[int, int] = {}
        # Input, batches and stream of a first forward, for the second.
        self._first: dict[int, tuple[Tensor | None, list[Any], MicrobatchContext]] = {}
        self._to_go = {*self.out}

    def stream(
        self, stream: MicrobatchContext, number: int, microbatches: Microbatches
    ) -> MicrobatchContext:
        return microbatches.keeping(stream, number, self.keep)

    def forward(self, stage: Any, microbatch: int, usual: Forward) -> Forward:
        if microbatch in self.again:
            return partial(self._forward_alone, stage)
        return usual

    def _forward_alone(self, stage: Any, microbatch: int, x: Tensor | None) -> Tensor | None:
        """Run a forward without a graph, and keep what the later recomputation (pass R) needs.

        The input, the data and the random stream are kept.

        Args:
            stage: the stage.
            x: the input; None at the embedding.
        """
        stream = stage.microbatches.begun(microbatch, stage.stream)
        data: Noting[Any] | None = None
        batches: list[Any] = []
        if stage.data_iterator is not None:
            data = Noting(stage.data_iterator)
            batches = data.given
        self._first[microbatch] = (x, batches, stream)
        self.hold(microbatch, x)
        with torch.no_grad():
            made: Tensor | None = stage.run_forward(microbatch, x, data, stream)
        return made

    def repeat(self, stage: Any, microbatch: int) -> None:
        """Run R: the forward a second time, with the same data and random numbers, and a graph."""
        x, batches, stream = self._first.pop(microbatch)
        self.hold(microbatch, x, -1)
        data = iter(batches) if batches else None
        stage.context.copy().run(stage.run_forward, microbatch, x, data, stream)

    def takes_input(self, x: Tensor | None) -> Tensor | None:
        # O takes the values out of the leaf. Whoever else keeps the input has them in this view.
        return None if x is None else x.view_as(x)

    def keep(self, number: int, last: int, keys: Tensor) -> Callable[[], Tensor]:
        """Hold the keys and values that a layer computed for a slice, for later slices.

        These are offloaded by pass O of slice `last`, or of the first later slice that has a pass
        O. They stay if no such slice of the microbatch has one, or if `modules` omits core_attn.

        Args:
            number: number of the slice.
            last: number of the last slice that reads them.
            keys: keys and values in one tensor.
        Returns: a function that returns the tensor; call it only while it is on the device.
        """
        slot = _Slot(keys.untyped_storage(), keys.untyped_storage().nbytes(), self.held)
        self._bytes_of_keys[number] = self._bytes_of_keys.get(number, 0) + slot.size
        self._size(number).keys = self._bytes_of_keys[number]
        if not self.modules or KEYS in self.modules:
            count = len(self.sizes)
            end = number // count * count + count
            # While the forward runs again every O that could take them is over, and they stay.
            out = next((n for n in range(last, end) if n in self._to_go), None)
            if out is not None:
                self._keys.setdefault(out, []).append(slot)
        return _View.of(keys, slot).tensor

    def saving(self, stage: Any, microbatch: int) -> AbstractContextManager[None]:
        """Return a context for a forward in which the storage of each saved tensor is recorded."""
        kept = _Kept()
        self._kept[microbatch] = kept
        # The hooks hold the dict and not `kept`: see `_drop`.
        slots = kept.slots
        modules = self.modules

        def pack(tensor: Tensor) -> Tensor | _View:
            storage = tensor.untyped_storage()
            # A subclass of Tensor may have its numbers elsewhere.
            if (
                storage._cdata in self._weights
                or type(tensor) is not Tensor
                or not storage.nbytes()
            ):
                return tensor
            at = storage.data_ptr()
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
        if output is not None:
            slot = kept.slots.get(output.untyped_storage().data_ptr())
            if slot is not None:
                slot.stays = True
        if microbatch not in self.out:
            self._drop(microbatch)

    def _size(self, number: int) -> Sizes:
        return self.sizes[number % len(self.sizes)]

    def hold(self, microbatch: int, x: Tensor | None, count: int = 1) -> None:
        """Count the bytes of an input x that is kept for R as held on the device.

        The bytes are counted `count` times; -1 removes them. x is None at the embedding.
        """
        size = self._size(microbatch)
        size.input = 0 if x is None else x.nbytes
        self.held.add(count * size.input)

    def offload(self, microbatch: int) -> Copy:
        """Begin O: copy a microbatch's storages to the host. Return all copies as one `Copy`."""
        kept = self._kept[microbatch]
        host = self.host
        self._to_go.discard(microbatch)
        if kept.leaf is not None:
            # The slot alone keeps its values from here on. Its gradient needs the shape only.
            kept.leaf.data = kept.leaf.data.new_empty(1).expand(kept.leaf.shape)
        going = self._chosen(kept)
        going += self._keys.get(microbatch, ())
        for slot in going:
            slot.buffer = host.take(slot.size)
        pairs = [(_of(slot.buffer, slot.size), _bytes(slot.storage)) for slot in going]
        kept.begun = host.out.begin(pairs, [slot.buffer.read for slot in going if slot.buffer])
        # It holds the storages too.
        del pairs
        self._size(microbatch).copied = sum(slot.size for slot in going)
        # Though the copy may not have run: a GPU's allocator gives the memory to later work only.
        for slot in going:
            slot.storage = None
            self.held.add(-slot.size)
        return Copy(host.out, kept.begun, needed=False)

    def _chosen(self, kept: _Kept) -> list[_Slot]:
        """Return the storages that O copies: the ones saved first, up to `share` of the bytes.

        The output is left out, and so is a storage with another reference. Their bytes count.
        """
        wanted = [slot for slot in kept.slots.values() if slot.goes]
        left = self.share * sum(slot.size for slot in wanted)
        chosen = []
        for slot in wanted:
            left -= slot.size
            # The last one moves if more than half of it lies within the share.
            fits = left >= -slot.size / 2
            if fits and not slot.stays and slot.storage is not None and _alone(slot.storage):
                chosen.append(slot)
        return chosen

    def load(self, microbatch: int) -> Copy:
        """Begin L: copy a microbatch's storages back. Return all copies as one `Copy`."""
        kept = self._kept[microbatch]
        host = self.host
        # The keys that went with this slice come back with it: no earlier backward reads them.
        held = [*kept.slots.values(), *self._keys.pop(microbatch, ())]
        coming = [slot for slot in held if slot.buffer is not None]
        device = host.back.device
        pairs = []
        for slot in coming:
            memory = torch.empty(slot.size, dtype=torch.uint8, device=device)
            slot.storage = memory.untyped_storage()
            self.held.add(slot.size)
            pairs.append((_bytes(slot.storage), _of(slot.buffer, slot.size)))
        begun = host.back.begin(pairs, [kept.begun])
        # Another O may take the buffers at once: its copy waits for these that read them.
        for slot in coming:
            assert slot.buffer is not None
            host.give(slot.buffer._replace(read=begun))
            slot.buffer = None
        self._drop(microbatch)
        return Copy(host.back, begun, needed=True)

    def _drop(self, microbatch: int) -> None:
        # The hooks live as long as the graph, and hold the slots by this dict. Once it is empty
        # only the graph holds them, and B frees each as it goes.
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
        self._bytes_of_keys.clear()
        self._to_go = {*self.out}


def _alone(storage: torch.UntypedStorage) -> bool:
    """Return whether there is only one reference to a storage, the one by which we hold it."""
    return torch._C._storage_Use_Count(storage._cdata) == 1


def _bytes(storage: torch.UntypedStorage | None) -> Tensor:
    assert storage is not None
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def _of(buffer: Buffer | None, size: int) -> Tensor:
    assert buffer is not None
    return buffer.bytes[:size]


def moves_of(setting: Setting) -> dict[int, Activations]:
    """Return {stage: the object that offloads and recomputes its activations}.

    The result is {} in an evaluation, and for a table with none of the passes O, L and R.

    Args:
        setting: the step of this rank.
    """
    table, chunks, step, host = setting
    if step.forward_only or table.kinds.isdisjoint(MOVES):
        return {}
    host.begin()
    host.held = Gauge()
    host.sizes = {stage: [Sizes() for _ in table.slices] for stage in chunks}
    # The table has the passes of all ranks.
    every = table.passes()
    out = {(x.stage, table.number(x)) for x in every if x.kind.traits.lane is Lane.D2H}
    again = computed_again(table)
    activations = {}
    for stage, (module, _) in chunks.items():
        activations[stage] = Activations(
            module,
            host,
            host.sizes[stage],
            host.share,
            out=frozenset(number for s, number in out if s == stage),
            again=frozenset(number for s, number in again if s == stage),
            modules=host.modules,
        )
    return activations
