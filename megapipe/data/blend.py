"""Split one dataset in three parts and blend several datasets, both as Megatron does.

A blend assigns samples to datasets one after another. After each sample, the share that a dataset
has given is as close to its weight as possible.
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
    """A blend: item i is item index[i] of dataset choice[i].

    Attributes:
        datasets: at most 32,767 datasets.
        choice: [N] the dataset of each item.
        index: [N] the position of each item in its dataset.
    """

    datasets: Sequence[TokenDataset]
    choice: NDArray[np.int16]
    index: NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.choice)

    def __getitem__(self, sample: int) -> Item:
        dataset = self.datasets[int(self.choice[sample])]
        return dataset[int(self.index[sample])]


def parse_data_path(data_path: Sequence[str]) -> tuple[list[str], list[float] | None]:
    """Return (prefixes, normalised weights) of the words of --data-path.

    The words 1 a 3 b give (["a", "b"], [0.25, 0.75]). The words a b are prefixes without weights,
    and give (["a", "b"], None). An odd number of words is a list of prefixes, too. Megatron's
    `get_blend_from_list` decides in the same way.

    Args:
        data_path: the words of the list.
    Raises: DataError for an empty list, or if some items in the places of weights are numbers and
        not all are positive ones. Also if their sum overflows.
    """
    if not data_path:
        raise DataError(
            "--data-path is missing. Give the prefix of a .bin/.idx pair, or --mock-data for no "
            "files."
        )
    weights = [_number(text) for text in data_path[::2]]
    if len(data_path) % 2 or all(weight is None for weight in weights):
        return list(data_path), None
    prefixes = list(data_path[1::2])
    problems = [
        f"--data-path weight {text} of {prefix} is not a positive number. A list of even length is "
        f"weight prefix weight prefix ..., such as --data-path 1 {prefix}, or has no weight at all"
        for text, weight, prefix in zip(data_path[::2], weights, prefixes, strict=True)
        if weight is None or not (math.isfinite(weight) and weight > 0)
    ]
    if problems:
        raise DataError(problems)
    numbers = [weight or 0.0 for weight in weights]
    if math.isinf(sum(numbers)):
        raise DataError(
            "the weights of --data-path have a sum that overflows float64. Give smaller ones, "
            "such as 1 and 2."
        )
    return prefixes, normalised(numbers)


def _number(text: str) -> float | None:
    """Return the number that a text gives; None for another text."""
    try:
        return float(text)
    except ValueError:
        return None


def normalised(weights: Sequence[float]) -> list[float]:
    """Return the weights divided by their sum, rounded exactly as Megatron's numpy code does."""
    array = np.array(weights, np.float64)
    shares: list[float] = (array / array.sum()).tolist()
    return shares


def split_ranges(split: str, count: int) -> list[tuple[int, int] | None]:
    """Return the sequences (begin, end) of train, validation and test, end excluded.

    None stands for one of the three with proportion 0.

    Args:
        split: up to three proportions, such as "969, 30, 1"; their sum is free.
        count: number of sequences to split.
    Raises: DataError for anything else than up to three numbers of at least 0 with one above 0.
    """
    # Megatron's own scripts quote the value twice.
    texts = re.findall(r"[^,/\s]+", split.strip("'\""))
    are_numbers = all(re.fullmatch(r"\d+\.?\d*|\.\d+", n) for n in texts)
    if not 1 <= len(texts) <= 3 or not are_numbers:
        raise DataError(
            f"--split {split!r} is not up to three numbers of at least 0, such as --split 969,30,1"
        )
    proportions = [float(n) for n in texts] + [0.0] * (3 - len(texts))
    if math.isinf(sum(proportions)):
        raise DataError(
            f"--split {split[:40]!r} has a sum that overflows float64. "
            "Use --split 969,30,1 or the like."
        )
    if not any(proportions):
        raise DataError(
            f"--split {split!r} leaves nothing: one proportion must be above 0, such as --split "
            "969,30,1"
        )
    # Megatron-LM adds up the shares first and rounds each sum when it is used. Any other order
    # moves a border by a sequence.
    edges = [0.0]
    for share in normalised(proportions):
        edges.append(edges[-1] + share)
    return [(round(a * count), round(b * count)) if b > a else None for a, b in pairwise(edges)]


def blend_indices(
    weights: Sequence[float], size: int, limits: Sequence[int]
) -> tuple[NDArray[np.int16], NDArray[np.int64]]:
    """Return, for each sample of a blend, its dataset (int16) and its position there (int64).

    Sample i comes from the dataset with the largest weight * max(i, 1) - taken, or the first of
    several such datasets. `taken` is the number of samples that the dataset has given before. A
    dataset that has given its limit is left out. If `weights` are equal to `limits`, and `size` to
    their sum, every sample therefore comes exactly once.

    Args:
        weights: one per dataset, not all 0; they are normalised here.
        size: number of samples of the blend.
        limits: number of samples of each dataset; the sum of the limits is at least `size`.
    """
    assert size <= sum(limits)
    w = np.array(normalised(weights))
    choice = np.empty(size, np.int16)
    index = np.empty(size, np.int64)
    done, taken = _deal_in_segments(w, choice, index, np.array(limits))
    _deal_one_by_one(w, choice, index, limits, done, taken)
    return choice, index


def _deal_one_by_one(
    w: NDArray[np.float64],
    choice: NDArray[np.int16],
    index: NDArray[np.int64],
    limits: Sequence[int],
    begin: int,
    taken: Sequence[int],
) -> None:
    """Fill `choice` and `index` in place from sample `begin` on, one sample after another.

    Args:
        w: [datasets] normalised weights.
        choice: [N] the dataset of each sample.
        index: [N] the position of each sample in its dataset.
        limits: [datasets] number of samples that each dataset has.
        begin: the first sample to fill in.
        taken: [datasets] number of samples that each dataset has given before `begin`.
    """
    weights = w.tolist()
    given = list(taken)
    # The datasets that have samples left; the order decides ties.
    unspent = [k for k in range(len(weights)) if given[k] < limits[k]]
    for i in range(begin, len(choice)):
        due = float(max(i, 1))
        best = max(unspent, key=lambda k: weights[k] * due - given[k])
        choice[i] = best
        index[i] = given[best]
        given[best] += 1
        if given[best] == limits[best]:
            unspent.remove(best)


# The loop above runs Python code for every sample, which is slow for a long blend. The functions
# below cut the blend into segments and advance all segments by one sample in each numpy call.

_MAX_SEGMENTS = 8192
# Least number of samples of a segment.
_MIN_SEGMENT = 2048
# Samples that are dealt before each segment, so that a wrong guess of its start is corrected.
_WARM_UP = 1024
# How often segments with a wrong start are dealt again.
_ROUNDS = 64


def _deal_in_segments(
    w: NDArray[np.float64],
    choice: NDArray[np.int16],
    index: NDArray[np.int64],
    limits: NDArray[np.int64],
) -> tuple[int, list[int]]:
    """Fill the beginning of `choice` and `index` in place, many segments of samples at a time.

    Each segment starts from a guess of the samples that the datasets have given before it. The rule
    corrects itself: a dataset that has given too much waits, one that has given too little comes
    first. After a few samples the error of the guess has therefore disappeared.

    The guess is checked afterwards. The first segment starts with nothing given, and each other one
    must start as its predecessor ended. A segment that starts otherwise is filled again, from its
    predecessor's end.

    Args:
        w: [datasets] normalised weights.
        choice, index: [N] the dataset of each sample, and the sample's position in that dataset.
        limits: [datasets] number of samples that each dataset has.
    Returns: (number of samples that follow the rule, number of these from each dataset).
    """
    size = len(choice)
    num_sets = len(w)
    segments = min(_MAX_SEGMENTS, size // _MIN_SEGMENT)
    if segments < 2:
        return 0, [0] * num_sets
    length = size // segments
    starts = np.arange(segments) * length
    before = np.maximum(starts - _WARM_UP, 0)
    # The first samples are dealt without being stored: they only correct the guess.
    begin = _deal(w, _about(w, before), before, _WARM_UP)
    begin[0] = 0
    # Views with one row per segment: writing to them fills `choice` and `index`.
    choices = choice[: segments * length].reshape(segments, length)
    positions = index[: segments * length].reshape(segments, length)
    end = _deal(w, begin.copy(), starts, length, choices, positions)
    good = segments
    for attempt in range(_ROUNDS + 1):
        differs = (begin[1:] != end[:-1]).any(axis=1)
        wrong = 1 + np.flatnonzero(differs)
        good = int(wrong[0]) if wrong.size else segments
        if good == segments or attempt == _ROUNDS:
            break
        begin[wrong] = end[wrong - 1]
        # Indexing by an array copies, so the result is written back.
        new_choices = choices[wrong]
        new_positions = positions[wrong]
        end[wrong] = _deal(w, begin[wrong], starts[wrong], length, new_choices, new_positions)
        choices[wrong] = new_choices
        positions[wrong] = new_positions
    # `_deal` knows no limits: segments in which a dataset has given more than it has are dropped.
    while good and (end[good - 1] > limits).any():
        good -= 1
    given = end[good - 1] if good else np.zeros(num_sets)
    return good * length, [int(n) for n in given]


def _deal(
    w: NDArray[np.float64],
    taken: NDArray[np.float64],
    starts: NDArray[np.int64],
    count: int,
    choice: NDArray[np.int16] | None = None,
    index: NDArray[np.int64] | None = None,
) -> NDArray[np.float64]:
    """Assign `count` samples of each segment to datasets, and return `taken` after these samples.

    Args:
        w: [datasets] normalised weights.
        taken: [segments, datasets] samples given before `starts`; changed in place.
        starts: [segments] number of each segment's first sample.
        count: samples per segment.
        choice: [segments, count], filled with the dataset of each sample; None to count only.
        index: [segments, count], filled with the position of each sample in its dataset.
    """
    # A view, so that an increment in `flat` is one in `taken`.
    flat = taken.reshape(-1)
    rows = np.arange(len(taken)) * len(w)
    deficit = np.empty_like(taken)
    for step in range(count):
        # Two roundings, of the product and of the difference, as in `_deal_one_by_one`.
        np.multiply(np.maximum(starts + step, 1)[:, None], w, out=deficit)
        deficit -= taken
        best = deficit.argmax(axis=1)
        at = best + rows
        if choice is not None and index is not None:
            choice[:, step] = best
            index[:, step] = flat[at]
        flat[at] += 1
    return taken


def _about(w: NDArray[np.float64], at: NDArray[np.int64]) -> NDArray[np.float64]:
    """Estimate how many samples each dataset has given before a sample of the blend, to within one.

    The fractions are rounded by the largest-remainder method, so that each row has the right sum.

    Args:
        w: [datasets] normalised weights.
        at: [segments] index of the sample, one for each segment.
    Returns: [segments, datasets].
    """
    share = at[:, None] * w
    taken: NDArray[np.float64] = np.floor(share)
    order = np.argsort(taken - share, axis=1, kind="stable")
    rank = np.argsort(order, axis=1, kind="stable")
    missing = at - taken.sum(axis=1)
    taken += rank < missing[:, None]
    return taken
