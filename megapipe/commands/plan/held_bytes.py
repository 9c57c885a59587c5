"""The bytes of a rank's memory at the most of a step: counted, and on a GPU as the allocator has it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn

from megapipe.distributed.device import memory_bytes
from megapipe.training.pretrain import Training


def parts_of(training: Training) -> dict[str, float]:
    """Bytes at the peak of one more step: counted, and on a GPU as allocated."""
    run, device, optimizer = training.run, training.run.mesh.device, training.run.optimizer
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        training.driver.whole()
    allocated = memory_bytes(device).get("mem-max-allocated-bytes", 0)
    # Of this step, not of the start, where all is whole.
    shares, optimizer.live.peak = optimizer.reduction().sharded, optimizer.live.bytes
    held = held_in_step(training, (run.config.model.padded_vocab_size or 0) // run.mesh.tp.size)
    # Of shares, and what was whole at the most, which `live` does not tell apart: weights are what runs read.
    gradients = sum(x.nbytes for b in shares for x in b.parts)
    gradients += sum(b.grads.nbytes for b in optimizer.buffers if b not in shares)
    weights = _storages(x for m in run.modules for x in m.parameters()) | _storages(b.shard for b in optimizer.buffers)
    # A table that moves activations has hooks of its own inside of these, and counts what is here, the head's with it.
    host = run.stages.engine.kept["offload"]
    moving = host.held.peak if host.sizes else 0
    parts = {
        "weights": float(sum(size for _, size in weights) + optimizer.live.peak),
        "gradients": float(gradients),
        "optimizer": float(sum(x.nbytes for flats in optimizer._kinds().values() for x in flats)),
        "activations": float(max(held.peak - held.of_head, moving)),
        "head": float(held.of_head),
    }
    return parts | ({"other": max(0.0, allocated - sum(parts.values()))} if allocated else {})


def _storages(tensors: Iterator[Tensor]) -> set[tuple[int, int]]:
    """Each storage once."""
    return {(x.untyped_storage()._cdata, x.untyped_storage().nbytes()) for x in tensors}


def held_in_step(training: Training, wide: int = 0) -> Held:
    """Return the bytes that graphs hold in one more step. wide: the last dimension of logits."""
    held = Held(training.run.modules, wide)
    with torch.autograd.graph.saved_tensors_hooks(held.pack, lambda x: x.tensor if isinstance(x, Kept) else x):
        training.driver.whole()
    return held


class Held:
    """Bytes that the graphs of this thread hold, as saved_tensors_hooks see them: at most, and of the logits then."""

    def __init__(self, modules: Sequence[nn.Module], wide: int) -> None:
        self.parameters = {p.untyped_storage()._cdata for module in modules for p in module.parameters()}
        self.wide, self.logits = wide, dict[int, int]()
        self.uses: Counter[int] = Counter()
        self.bytes = self.peak = self.of_head = 0

    def pack(self, tensor: Tensor) -> Tensor | Kept:
        storage = tensor.untyped_storage()
        if storage._cdata in self.parameters:
            return tensor
        kept = Kept(self, tensor, storage.data_ptr())
        if self.wide in tensor.shape[-1:]:
            self.logits[kept.key] = kept.size
        return kept

    def add(self, key: int, size: int, uses: int) -> None:
        """Count one use more or less."""
        before = self.uses[key] > 0
        self.uses[key] += uses
        self.bytes += size * ((self.uses[key] > 0) - before)
        if not self.uses[key]:
            self.logits.pop(key, None)
        if self.bytes > self.peak:
            self.peak = self.bytes
            self.of_head = sum(self.logits.values())


class Kept:
    """A saved tensor, counted as long as the graph has it."""

    def __init__(self, held: Held, tensor: Tensor, key: int) -> None:
        self.held, self.tensor, self.key, self.size = held, tensor, key, tensor.untyped_storage().nbytes()
        held.add(key, self.size, 1)

    def __del__(self) -> None:
        self.held.add(self.key, self.size, -1)
