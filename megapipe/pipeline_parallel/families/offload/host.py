"""A rank's buffers on the host for activations that are out of the way, and what it counts of those that are not."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megapipe.distributed.device import CopyLane, Gauge

_ALIGNED = 512
"""Buffers on the host have sizes that are multiples of this."""
_PARTS = 8
"""Sizes of buffers between a power of two and the next: experts' rows differ in each microbatch, and need few sizes."""


def size_class(size: int) -> int:
    """Return the size of the buffer for so many bytes: at most an eighth more, or up to a multiple of _ALIGNED."""
    step = max(_ALIGNED, (1 << max(size - 1, 0).bit_length()) // (2 * _PARTS))
    return -(-size // step) * step


@dataclass(eq=False)
class Sizes:
    """Bytes of one microbatch of a stage, or of a slice by its place in one: what its graph saves, what goes to the
    host, what stays of its input where the forward runs twice, and the keys and values that it keeps for slices. Of the
    last that did so in a step."""

    saved: int = 0
    copied: int = 0
    input: int = 0
    keys: int = 0


class Buffer(NamedTuple):
    """Bytes on the host; `read` is what was begun last of those that read them."""

    bytes: Tensor
    read: Any = None


@dataclass(frozen=True)
class Copy:
    """An O or L that has begun on its lane. Call it to wait for what the next pass needs of its end.

    Attributes:
        needed: does anyone? The memory that an O frees is another's behind it.
    """

    lane: CopyLane
    begun: Any
    needed: bool

    def __call__(self) -> None:
        if self.needed:
            self.lane.wait(self.begun)

    def span(self) -> tuple[Any, Any]:
        """Marks of its beginning and end, once it is over."""
        return self.lane.span(self.begun)


class Host:
    """A rank's buffers on the host, kept from step to step, and its lanes there and back.

    Attributes:
        held, sizes: what the stages of the last step had on the device, and by stage what a microbatch of it is, or
            each of its slices, where the table has O, L or R.
        bytes: of all buffers together.
        modules: whose saved storages go, by Megatron-LM's names; all where none is named.
        share: of each microbatch's bytes of these that goes.
    """

    def __init__(self, device: torch.device) -> None:
        self.out, self.back = CopyLane(device), CopyLane(device)
        self._free: dict[int, list[Buffer]] = {}
        self._unused: dict[int, int] = {}  # by size: as many buffers were free all the time since the step began
        self.bytes, self.held, self.share = 0, Gauge(), 1.0
        self.modules: Collection[str] = ()
        self.sizes: dict[int, list[Sizes]] = {}

    def begin(self) -> None:
        """Begin a step: let go of the buffers that the step before had no use for."""
        for size, count in self._unused.items():
            del self._free[size][:count]
            self.bytes -= size * count
        self._free = {size: buffers for size, buffers in self._free.items() if buffers}
        self._unused = {size: len(buffers) for size, buffers in self._free.items()}

    def take(self, size: int) -> Buffer:
        """Take a buffer of at least so many bytes: the smallest free one that holds them, of at most twice the size."""
        size = size_class(size)
        fits = min((free for free, buffers in self._free.items() if buffers and size <= free <= 2 * size), default=None)
        if fits is None:
            self.bytes += size
            return Buffer(self.out.buffer(size))
        buffers = self._free[fits]
        buffer = buffers.pop()
        self._unused[fits] = min(self._unused.get(fits, 0), len(buffers))
        return buffer

    def give(self, buffer: Buffer) -> None:
        """Return a buffer to the free ones; its next writer waits for what reads it."""
        self._free.setdefault(buffer.bytes.numel(), []).append(buffer)
