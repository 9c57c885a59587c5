"""Print the unigram entropy of the validation tokens.

A model that knows only how frequent each token is has this loss. A lower one shows that the model
uses the context:

python -m megapipe.commands.start.entropy --data-path data/stdlib_text_document --split 969,30,1
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from megapipe.data.blend import split_ranges
from megapipe.data.indexed import IndexedDataset
from megapipe.errors import ConfigError, DataError
from megapipe.flags.parse import parse, run


@dataclass(frozen=True)
class Flags:
    """Print the entropy of validation tokens. Give the flags as to the training."""

    data_path: str | None = None
    """Prefix of a .bin/.idx pair."""
    split: str = "969,30,1"
    """Proportions of train, validation and test."""


def main(argv: Sequence[str]) -> None:
    """Print the entropy. Raises: ConfigError, DataError if there are no validation tokens."""
    flags = parse(Flags, argv)
    if flags.data_path is None:
        raise ConfigError("--data-path is missing: --data-path data/stdlib_text_document")
    dataset = IndexedDataset(flags.data_path)
    begin, end = split_ranges(flags.split, len(dataset))[1] or (0, 0)
    # Lengths are int32, and their sum may be larger.
    count = int(dataset.lengths[begin:end].sum(dtype=np.int64))
    if not count:
        raise DataError(
            f"--split {flags.split} leaves no validation tokens in {flags.data_path}. "
            "Give validation a larger part: --split 80,10,10"
        )
    # Documents stand one after another, so their tokens are one range of the file.
    first = dataset.start(begin)
    tokens = dataset.tokens[first : first + count]
    nats = entropy(np.bincount(tokens))
    print(f"Unigram entropy of {tokens.size} validation tokens: {nats:.4f} nats")


def entropy(counts: NDArray[np.int64]) -> float:
    """Return -sum p ln p in nats, where p = counts / sum(counts)."""
    # 0 ln 0 counts as 0, but numpy makes it NaN.
    p = counts[counts > 0] / counts.sum()
    return float(-(p * np.log(p)).sum())


if __name__ == "__main__":
    run(main)
