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

from megapipe.data.gpt_dataset import Item, TokenDataset
from megapipe.errors import DataError


@dataclass(frozen=True)
class BlendedDataset:
    """Item i is item index[i] of dataset choice[i]."""

    datasets: Sequence[TokenDataset]
    choice: NDArray[np.int16]
    index: NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.choice)

    def __getitem__(self, sample: int) -> Item:
        return self.datasets[int(self.choice[sample])][int(self.index[sample])]


def parse_data_path(data_path: Sequence[str]) -> tuple[list[str], list[float] | None]:
    """Prefixes and normalised weights of weight, prefix, ...; of an odd list, or one that has no number where weights
    would be, every item is a prefix (weights None). As Megatron's `get_blend_from_list`.

    Raises: DataError for an empty list, or some weights that are no positive numbers beside others that are.
    """
    if not data_path:
        raise DataError("--data-path is missing. Give the prefix of a .bin/.idx pair, or --mock-data for no files.")
    weights = [_number(text) for text in data_path[::2]]
    if len(data_path) % 2 or all(weight is None for weight in weights):
        return list(data_path), None
    problems = [
        f"--data-path weight {text} of {prefix} is not a positive number. A list of even length is "
        f"weight prefix weight prefix ..., such as --data-path 1 {prefix}, or has no weight at all"
        for text, weight, prefix in zip(data_path[::2], weights, data_path[1::2], strict=True)
        if weight is None or not (math.isfinite(weight) and weight > 0)
    ]
    if not problems and math.isinf(sum(weight or 0.0 for weight in weights)):
        problems = [
            "the weights of --data-path have a sum that no number can hold. Give smaller ones, such as 1 and 2."
        ]
    if problems:
        raise DataError(problems)
    return list(data_path[1::2]), normalised([weight or 0.0 for weight in weights])


def _number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None


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
    if math.isinf(sum(values)):
        raise DataError(f"--split {split[:40]!r} has a sum that no number can hold. Use --split 969,30,1 or the like.")
    if not any(values):
        raise DataError(f"--split {split!r} leaves nothing: one proportion must be above 0, such as --split 969,30,1")
    # Edges are sums of shares, rounded at each use: that is how Megatron-LM cuts, to the sequence.
    edges = [0.0]
    for share in normalised(values):
        edges.append(edges[-1] + share)
    return [(round(a * count), round(b * count)) if b > a else None for a, b in pairwise(edges)]


def blend_indices(
    weights: Sequence[float], size: int, limits: Sequence[int]
) -> tuple[NDArray[np.int16], NDArray[np.int64]]:
    """The set (int16) of each of `size` samples, and which of the set's samples it is (int64).

    Sample i comes from the set with the largest w * max(i, 1) - taken, the first one in a tie. A set that
    has given `limits` samples is left out, so with sizes as weights every sample comes exactly once.
    """
    assert size <= sum(limits)
    w = np.array(normalised(weights))
    choice, index = np.empty(size, np.int16), np.empty(size, np.int64)
    done, taken = _deal_in_lanes(w, choice, index, np.array(limits))
    _deal_one_by_one(w, choice, index, limits, done, taken)
    return choice, index


_LANES, _LANE, _WARM_UP, _ROUNDS = 8192, 2048, 1024, 64
"""Most lanes, least samples of a lane, samples dealt before one, and how often lanes are dealt again."""


def _deal_one_by_one(
    w: NDArray[np.float64],
    choice: NDArray[np.int16],
    index: NDArray[np.int64],
    limits: Sequence[int],
    begin: int,
    taken: Sequence[int],
) -> None:
    """The rule as it is written, from sample `begin` on."""
    weights, given = w.tolist(), list(taken)
    unspent = [k for k in range(len(weights)) if given[k] < limits[k]]
    for i in range(begin, len(choice)):
        due = float(max(i, 1))
        best = max(unspent, key=lambda k: weights[k] * due - given[k])
        choice[i], index[i] = best, given[best]
        given[best] += 1
        if given[best] == limits[best]:
            unspent.remove(best)


def _deal_in_lanes(
    w: NDArray[np.float64], choice: NDArray[np.int16], index: NDArray[np.int64], limits: NDArray[np.int64]
) -> tuple[int, list[int]]:
    """Many stretches of the blend side by side, each from a guess of what was given before it.

    What has been given too much waits and what too little comes first, so that after a few samples the guess no longer
    shows. Whether it was right is seen afterwards: each lane must begin as the one before it has ended, and the first
    one begins with nothing. Lanes that do not are dealt again, from there.

    Returns: how many samples are dealt, as one by one, and how many of each set.
    """
    size, sets = len(choice), len(w)
    lanes = min(_LANES, size // _LANE)
    if lanes < 2:
        return 0, [0] * sets
    length = size // lanes
    starts = np.arange(lanes) * length
    before = np.maximum(starts - _WARM_UP, 0)
    begin = _deal(w, _about(w, before), before, _WARM_UP)
    begin[0] = 0
    rows, places = choice[: lanes * length].reshape(lanes, length), index[: lanes * length].reshape(lanes, length)
    end = _deal(w, begin.copy(), starts, length, rows, places)
    good = lanes
    for attempt in range(_ROUNDS + 1):
        # Each lane began with a guess of what the sets had given by then. One whose guess is not what the lane before
        # it ended with is dealt again, until all fit or the rounds are over.
        wrong = 1 + np.flatnonzero((begin[1:] != end[:-1]).any(axis=1))
        good = int(wrong[0]) if wrong.size else lanes
        if good == lanes or attempt == _ROUNDS:
            break
        begin[wrong] = end[wrong - 1]
        again, placed = rows[wrong], places[wrong]
        end[wrong] = _deal(w, begin[wrong], starts[wrong], length, again, placed)
        rows[wrong], places[wrong] = again, placed
    while good and (end[good - 1] > limits).any():  # a set was asked for more than it has
        good -= 1
    given = end[good - 1] if good else np.zeros(sets)
    return good * length, [int(n) for n in given]


def _deal(
    w: NDArray[np.float64],
    taken: NDArray[np.float64],
    starts: NDArray[np.int64],
    count: int,
    choice: NDArray[np.int16] | None = None,
    index: NDArray[np.int64] | None = None,
) -> NDArray[np.float64]:
    """`count` samples of each lane. taken: [lanes, sets], given before `starts`; counted on and returned."""
    # A view: what is counted on here is counted in `taken`.
    flat, rows = taken.reshape(-1), np.arange(len(taken)) * len(w)
    behind = np.empty_like(taken)
    for step in range(count):
        np.multiply(np.maximum(starts + step, 1)[:, None], w, out=behind)
        behind -= taken  # two roundings, as in the rule
        best = behind.argmax(axis=1)
        at = best + rows
        if choice is not None and index is not None:
            choice[:, step], index[:, step] = best, flat[at]
        flat[at] += 1
    return taken


def _about(w: NDArray[np.float64], at: NDArray[np.int64]) -> NDArray[np.float64]:
    """[lanes, sets]: what sets have given when `at` samples are dealt, to within one: shares by largest remainder."""
    share = at[:, None] * w
    taken: NDArray[np.float64] = np.floor(share)
    rank = np.argsort(np.argsort(taken - share, axis=1, kind="stable"), axis=1, kind="stable")
    taken += rank < (at - taken.sum(axis=1))[:, None]
    return taken
