"""Numbers that the host reads from the device, several in one copy: each copy waits for all that is under way."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

T = TypeVar("T")


@dataclass(frozen=True)
class Late(Generic[T]):
    """A result of all ranks that is still on the device.

    Attributes:
        tensor: its numbers in float64, once they are there; the host goes on.
        read: what they mean, given as a flat list.
    """

    tensor: Callable[[], Tensor]
    read: Callable[[Sequence[float]], T]

    def __call__(self) -> T:
        """Wait for it."""
        return self.read(self.tensor().flatten().tolist())


def read_together(*results: Late[Any]) -> list[Any]:
    """Results of all of them, in one copy to the host."""
    parts = [result.tensor().flatten() for result in results]
    values = iter(torch.cat(parts).tolist())
    return [result.read(list(islice(values, part.numel()))) for result, part in zip(results, parts, strict=True)]
