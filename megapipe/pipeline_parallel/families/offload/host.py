"""Keep a rank's buffers on the host for activations, and count the activations on the device."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megapipe.distributed.device import CopyLane, Gauge

_ALIGNED = 512
"""The sizes of buffers on the host are multiples of this number of bytes."""
_PARTS = 8
"""Number of buffer sizes between a power of two and the next."""


def size_class(size: int) -> int:
    """Return the bytes to allocate for `size` bytes, rounded up to one of few sizes.

    A freed buffer thus fits a later request of nearly this size. The result is at most an eighth
    more than `size`, or the next multiple of _ALIGNED if that is larger.
    """
    # Experts' rows differ in number with each microbatch. With few sizes buffers fit again.
    step = max(_ALIGNED, (1 << max(size - 1, 0).bit_length()) // (2 * _PARTS))
    return -(-size // step) * step


@dataclass(eq=False)
class Sizes:
    """The measured activation bytes of one microbatch on a stage, or of its slice n.

    Each microbatch overwrites the sizes, so after a step they are those from the last one.

    Attributes:
        saved: bytes that autograd saved in the forward.
        copied: bytes that are copied to the host.
        input: bytes of the input, which is kept for a forward that runs again.
        keys: bytes of keys and values that are kept for later slices.
    """

    saved: int = 0
    copied: int = 0
    input: int = 0
    keys: int = 0


class Buffer(NamedTuple):
    """A buffer on the host.

    Attributes:
        bytes: the memory.
        read: the last copy that reads it, as `CopyLane.begin` returned it; None if there is none.
    """

    bytes: Tensor
    read: Any = None


@dataclass(frozen=True)
class Copy:
    """A copy to the host or back (O or L) that has begun.

    Calling the object waits for the end of the copy, if the next pass needs that. `span` returns
    when the copy ran.

    Attributes:
        stream: the stream of copies in one direction.
        begun: the copies, as `CopyLane.begin` returned them.
        needed: whether the next pass must wait for the copies, as after L. After O it need not: the
            memory that O frees is given only to work that the device runs after the copy.
    """

    stream: CopyLane
    begun: Any
    needed: bool

    def __call__(self) -> None:
        if self.needed:
            self.stream.wait(self.begun)

    def span(self) -> tuple[Any, Any]:
        """Return (beginning, end) of the copy as marks, points in time, once the copy is over."""
        return self.stream.span(self.begun)


class Host:
    """A rank's buffers on the host, kept from step to step, and its streams of copies.

    `take` returns a buffer, `give` frees one, and `begin` starts a step.

    Attributes:
        out, back: the streams of copies to the host, and to the device.
        held: counts the bytes of activations that the rank's stages have on the device.
        sizes: {stage: `Sizes` of a microbatch or of each of its slices}, from the last table with
            O, L or R.
        bytes: bytes of all buffers together.
        modules: Megatron-LM's names of modules whose saved tensors are offloaded; () for all.
        share: the fraction of the bytes of these tensors to offload, in each microbatch.
    """

    def __init__(self, device: torch.device) -> None:
        self.out = CopyLane(device)
        self.back = CopyLane(device)
        self._free: dict[int, list[Buffer]] = {}
        # By size, the number of buffers that have been free ever since the step began.
        self._unused: dict[int, int] = {}
        self.bytes = 0
        self.held = Gauge()
        self.share = 1.0
        self.modules: Collection[str] = ()
        self.sizes: dict[int, list[Sizes]] = {}

    # A step of another table, or with other routing, may need fewer buffers than the one before.
    def begin(self) -> None:
        """Begin a step: release the buffers that the previous step did not use."""
        for size, count in self._unused.items():
            del self._free[size][:count]
            self.bytes -= size * count
        self._free = {size: buffers for size, buffers in self._free.items() if buffers}
        self._unused = {size: len(buffers) for size, buffers in self._free.items()}

    def take(self, size: int) -> Buffer:
        """Return a buffer of at least `size` bytes.

        The smallest free buffer of at most twice the size (rounded up by `size_class`) is returned,
        or else a new one.
        """
        size = size_class(size)
        fitting = [free for free in self._free if size <= free <= 2 * size and self._free[free]]
        # Page-locked memory is slow to allocate, so a free buffer that is too large is better.
        if not fitting:
            self.bytes += size
            return Buffer(self.out.buffer(size))
        fits = min(fitting)
        buffers = self._free[fits]
        # From the end: the first ones stay unused then, and `begin` releases these.
        buffer = buffers.pop()
        self._unused[fits] = min(self._unused.get(fits, 0), len(buffers))
        return buffer

    def give(self, buffer: Buffer) -> None:
        """Return a buffer to the free list.

        Whoever writes to it next waits for a copy that still reads it.
        """
        self._free.setdefault(buffer.bytes.numel(), []).append(buffer)
