"""Read numbers from the device in one copy: each copy to the host waits for all work under way."""

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
    """A result, equal on all ranks, that the device is still computing.

    Call the object to wait for the result and get it.

    Attributes:
        tensor: returns the numbers in float64 on the device, without waiting for them.
        read: takes the numbers as a flat list and returns the result.
    """

    tensor: Callable[[], Tensor]
    read: Callable[[Sequence[float]], T]

    def __call__(self) -> T:
        return self.read(self.tensor().flatten().tolist())


def read_together(*results: Late[Any]) -> list[Any]:
    """Wait for one or more results and return them in order, with a single copy to the host."""
    # All are started before the copy, so that the device computes them without a pause.
    parts = [result.tensor().flatten() for result in results]
    # The copy waits for the device; each result then takes its numbers from one flat list.
    values = iter(torch.cat(parts).tolist())
    found = []
    for result, part in zip(results, parts, strict=True):
        found.append(result.read(list(islice(values, part.numel()))))
    return found
