"""Count the bytes that a rank holds at the peak of a step, by their purpose."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn

from megapipe.distributed.device import memory_bytes
from megapipe.training.pretrain import Training


def parts_of(training: Training) -> dict[str, float]:
    """Run steps of a training and return {purpose: bytes} at the peak of memory.

    The keys are weights, gradients, optimizer, activations and head (the logits). On a GPU there is
    also `other`: the peak of torch's allocator minus the sum of these.

    Args:
        training: the training of a rank.
    """
    run = training.run
    device = run.mesh.device
    optimizer = run.optimizer
    # Counting holds on to tensors in its own way, so the allocator's peak is taken from a step
    # without it.
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        training.driver.whole()
    allocated = memory_bytes(device).get("mem-max-allocated-bytes", 0)
    # All weights are gathered when a run starts. The peak of the step must not include that.
    optimizer.live.peak = optimizer.live.bytes
    held = held_in_step(training, (run.config.model.padded_vocab_size or 0) // run.mesh.tp.size)
    sharded = optimizer.reduction().sharded
    gradients = sum(x.nbytes for b in sharded for x in b.parts)
    gradients += sum(b.grads.nbytes for b in optimizer.buffers if b not in sharded)
    # `live` has gathered weights and whole gradients together. All of it counts as weights.
    weights = _storages(x for m in run.modules for x in m.parameters()) | _storages(
        b.shard for b in optimizer.buffers
    )
    # A table that offloads or recomputes activations has inner hooks. They see the tensors first
    # and count the head's too.
    host = run.stages.engine.kept["offload"]
    moving = host.held.peak if host.sizes else 0
    parts = {
        "weights": float(sum(size for _, size in weights) + optimizer.live.peak),
        "gradients": float(gradients),
        "optimizer": float(sum(x.nbytes for flats in optimizer._kinds().values() for x in flats)),
        "activations": float(max(held.peak - held.of_head, moving)),
        "head": float(held.of_head),
    }
    if allocated:
        parts["other"] = max(0.0, allocated - sum(parts.values()))
    return parts


def _storages(tensors: Iterator[Tensor]) -> set[tuple[int, int]]:
    """Return the set of (id of the storage, its bytes) of the tensors, which may share storages."""
    return {(x.untyped_storage()._cdata, x.untyped_storage().nbytes()) for x in tensors}


def held_in_step(training: Training, wide: int = 0) -> Held:
    """Run a step and return the bytes that its autograd graphs held.

    Args:
        training: the training of a rank.
        wide: the size of the vocabulary on this rank. Tensors with this last dimension count as
            logits in `Held.of_head`; 0 counts none of them.
    """
    held = Held(training.run.modules, wide)
    with torch.autograd.graph.saved_tensors_hooks(held.pack, held.unpack):
        training.driver.whole()
    return held


class Held:
    """Counts the bytes that autograd graphs hold, by saved_tensors_hooks.

    `pack` and `unpack` are the two hooks, `add` counts a use of a storage.

    Attributes:
        bytes: the bytes that graphs hold now, without parameters. Each storage counts once.
        peak: the largest value of `bytes`.
        of_head: the bytes of the logits at the peak.
    """

    def __init__(self, modules: Sequence[nn.Module], wide: int) -> None:
        self.parameters = set()
        for module in modules:
            self.parameters |= {p.untyped_storage()._cdata for p in module.parameters()}
        self.wide = wide
        self.logits: dict[int, int] = {}
        self.uses: Counter[int] = Counter()
        self.bytes = 0
        self.peak = 0
        self.of_head = 0

    def pack(self, tensor: Tensor) -> Tensor | Kept:
        """Count a tensor that a graph saves; return the object that the graph keeps in its place.

        Parameters are not counted, as they live anyway: they are returned unchanged.
        """
        # Views share a storage, so the storage is counted, and not the tensor.
        storage = tensor.untyped_storage()
        if storage._cdata in self.parameters:
            return tensor
        kept = Kept(self, tensor, storage.data_ptr())
        if self.wide in tensor.shape[-1:]:
            self.logits[kept.key] = kept.size
        return kept

    def unpack(self, saved: Tensor | Kept) -> Tensor:
        """Return the tensor that `pack` was given.

        Args:
            saved: the object that `pack` returned.
        """
        if isinstance(saved, Kept):
            return saved.tensor
        return saved

    def add(self, key: int, size: int, uses: int) -> None:
        """Count one use more or less of a storage.

        Args:
            key: the address of the storage.
            size: the storage's bytes.
            uses: 1 for a tensor that is saved, -1 for one that is freed.
        """
        before = self.uses[key] > 0
        self.uses[key] += uses
        self.bytes += size * ((self.uses[key] > 0) - before)
        if not self.uses[key]:
            self.logits.pop(key, None)
        if self.bytes > self.peak:
            self.peak = self.bytes
            self.of_head = sum(self.logits.values())


class Kept:
    """The object that a graph saves in place of a tensor. When it is freed, `Held` counts down."""

    def __init__(self, held: Held, tensor: Tensor, key: int) -> None:
        self.held = held
        self.tensor = tensor
        self.key = key
        self.size = tensor.untyped_storage().nbytes()
        held.add(key, self.size, 1)

    # Autograd drops a saved tensor when its backward has used it, and nothing else tells us.
    def __del__(self) -> None:
        self.held.add(self.key, self.size, -1)
