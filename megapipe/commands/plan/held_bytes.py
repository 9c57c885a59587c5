"""The bytes of a rank's memory at the most of a step: counted, and on a GPU as the allocator has it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn

from megapipe.commands.compare import Held, Kept
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
    held = _Parts(run.modules, (run.config.model.padded_vocab_size or 0) // run.mesh.tp.size)
    with torch.autograd.graph.saved_tensors_hooks(held.pack, lambda x: x.tensor if isinstance(x, Kept) else x):
        training.driver.whole()
    # Of shares, and what was whole at the most, which `live` does not tell apart: weights are what runs read.
    gradients = sum(x.nbytes for b in shares for x in b.parts)
    gradients += sum(b.grads.nbytes for b in optimizer.buffers if b not in shares)
    weights = _storages(x for m in run.modules for x in m.parameters()) | _storages(b.shard for b in optimizer.buffers)
    # A table that moves activations has hooks of its own inside of these, and counts what is here, the head's with it.
    host = run.stages.host
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


class _Parts(Held):
    """Bytes that graphs hold, those of the logits apart. wide: their last dimension."""

    def __init__(self, modules: Sequence[nn.Module], wide: int) -> None:
        super().__init__(modules)
        self.wide, self.sizes, self.of_head = wide, dict[int, int](), 0

    def pack(self, tensor: Tensor) -> Tensor | Kept:
        kept = super().pack(tensor)
        if isinstance(kept, Kept) and self.wide in tensor.shape[-1:]:
            self.sizes[kept.key] = kept.size
        return kept

    def add(self, key: int, size: int, uses: int) -> None:
        before = self.peak
        super().add(key, size, uses)
        if not self.uses[key]:
            self.sizes.pop(key, None)
        if self.peak > before:
            self.of_head = sum(self.sizes.values())
