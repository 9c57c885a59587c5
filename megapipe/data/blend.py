"""Splits of one set and blends of several, as Megatron cuts and deals them.

A blend deals samples so that every set stays as close to its weight as it can after each one.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from megapipe.data.gpt_dataset import TokenDataset
from megapipe.errors import DataError


@dataclass(frozen=True)
class BlendedDataset:
    """Item i is item index[i] of dataset choice[i]."""

    datasets: Sequence[TokenDataset]
    choice: NDArray[np.int16]
    index: NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.choice)

    def __getitem__(self, sample: int) -> NDArray[np.int64]:
        return self.datasets[int(self.choice[sample])][int(self.index[sample])]


def parse_data_path(data_path: Sequence[str]) -> tuple[list[str], list[float] | None]:
    """Prefixes and normalised weights: even lists are weight, prefix, ...; odd ones prefixes (weights None).

    Raises: DataError for an empty list or a weight that is not a positive number.
    """
    if not data_path:
        raise DataError("--data-path is missing. Give the prefix of a .bin/.idx pair, or --mock-data for no files.")
    if len(data_path) % 2:
        return list(data_path), None
    problems, weights = [], []
    for text, prefix in zip(data_path[::2], data_path[1::2], strict=True):
        try:
            weights.append(float(text))
        except ValueError:
            weights.append(math.nan)
        if not (math.isfinite(weights[-1]) and weights[-1] > 0):
            problems.append(
                f"--data-path weight {text} of {prefix} is not a positive number. A list of even length is "
                f"weight prefix weight prefix ..., such as --data-path 1 {prefix}"
            )
    if problems:
        raise DataError(problems)
    return list(data_path[1::2]), normalised(weights)


def normalised(weights: Sequence[float]) -> list[float]:
    """The weights divided by their sum, rounded as Megatron's numpy does."""
    array = np.array(weights, np.float64)
    shares: list[float] = (array / array.sum()).tolist()
    return shares


def split_ranges(split: str, count: int) -> list[tuple[int, int] | None]:
    """Sequences [begin, end) of train, validation and test; None for a part of proportion 0.

    Args:
        split: up to three proportions, such as "969, 30, 1"; they need not sum to anything.
    """
    numbers = re.findall(r"[^,/\s]+", split.strip("'\""))  # Megatron's own scripts quote it twice
    if not 1 <= len(numbers) <= 3 or not all(re.fullmatch(r"\d+\.?\d*|\.\d+", n) for n in numbers):
        raise DataError(f"--split {split!r} is not up to three numbers of at least 0, such as --split 969,30,1")
    values = [float(n) for n in numbers] + [0.0] * (3 - len(numbers))
    if not any(values):
        raise DataError(f"--split {split!r} leaves nothing: one proportion must be above 0, such as --split 969,30,1")
    edges = [0.0]
    for share in normalised(values):
        edges.append(edges[-1] + share)
    return [(round(a * count), round(b * count)) if b > a else None for a, b in pairwise(edges)]


def blend_indices(
    weights: Sequence[float], size: int, limits: Sequence[int]
) -> tuple[NDArray[np.int16], NDArray[np.int64]]:
    """Which set (int16) and which of its samples (int64) each of `size` samples is.

    Sample i comes from the set with the largest w * max(i, 1) - taken, the first one in a tie. A set that
    has given `limits` samples is left out, so with sizes as weights every sample comes exactly once.
    """
    assert size <= sum(limits)
    w = normalised(weights)
    choice, index = np.empty(size, np.int16), np.empty(size, np.int64)
    taken = [0] * len(w)
    unspent = [k for k in range(len(w)) if limits[k]]
    for i in range(size):
        due = float(max(i, 1))
        best = max(unspent, key=lambda k: w[k] * due - taken[k])
        choice[i], index[i] = best, taken[best]
        taken[best] += 1
        if taken[best] == limits[best]:
            unspent.remove(best)
    return choice, index
