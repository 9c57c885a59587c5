"""Samples of s + 1 tokens cut from a shuffled stream of documents, as Megatron's GPTDataset cuts them.

Three arrays say everything: the document index (order of the documents, repeated for every epoch), the sample index
(where each sample begins) and the shuffle index (order of the samples). They are pure functions of the lengths, the
split, the number of samples and the seed, so every rank builds or maps the same ones without talking to another.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from megapipe.errors import DataError

_SEPARATE_BELOW = 0.80  # share of an epoch under which the last one is shuffled apart


class TokenSource(Protocol):
    """Sequences of token ids: an IndexedDataset or MockTokens."""

    prefix: str
    lengths: NDArray[np.int32]

    def read(self, sequence: int, begin: int, end: int) -> NDArray[Any]: ...


Item = NDArray[np.int64] | Mapping[str, NDArray[Any]]
"""[s + 1] int64 token ids, or arrays by name: `tokens`, which are such ids, and any others."""


class TokenDataset(Protocol):
    """A data set as the loader reads it; inputs and labels overlap by all but one token."""

    def __len__(self) -> int: ...

    def __getitem__(self, sample: int) -> Item: ...


class SampleIndices(NamedTuple):
    """Attributes:
    documents: [E x sequences] int32, sequence ids in reading order.
    samples: [N + 1, 2], position in `documents` and token offset of each sample's first token.
    shuffle: [N] sample read as item i.
    """

    documents: NDArray[Any]
    samples: NDArray[Any]
    shuffle: NDArray[Any]


def build_indices(
    lengths: NDArray[np.int32], sequences: NDArray[Any], seq_length: int, num_samples: int | None, seed: int
) -> SampleIndices:
    """Megatron's three indices, equal to the bit (megatron/core/datasets/gpt_dataset.py and helpers.cpp).

    Args:
        lengths: [S] tokens of every sequence of the source.
        sequences: ids of the sequences to use, at least one token in total.
        num_samples: samples wanted; as many epochs are chained as they need. None: one epoch, whatever it gives.
    """
    per_epoch = int(lengths[sequences].sum(dtype=np.int64))
    assert per_epoch > 0
    epochs = 1 if num_samples is None else max(1, math.ceil((num_samples * seq_length + 1) / per_epoch))
    samples = (epochs * per_epoch - 1) // seq_length
    # All numbers, types and the order of draws are Megatron-LM's: the same seed gives its very samples.
    before_last = ((epochs - 1) * per_epoch - 1) // seq_length
    # A last epoch of which little is used is shuffled apart, or its few samples would come from anywhere in it.
    separate = (
        num_samples is not None
        and epochs > 1
        and num_samples - before_last < int(_SEPARATE_BELOW * ((per_epoch - 1) // seq_length))
    )
    random = np.random.RandomState(seed)  # one stream for both shuffles, in this order
    documents = np.tile(sequences.astype(np.int32), epochs)
    _shuffle(documents, (epochs - 1) * len(sequences) if separate else 0, random)
    shuffle = np.arange(samples, dtype=np.uint32 if samples < np.iinfo(np.uint32).max - 1 else np.int64)
    _shuffle(shuffle, before_last if separate else 0, random)
    return SampleIndices(documents, _sample_index(lengths[documents], samples, seq_length), shuffle)


def _shuffle(values: NDArray[Any], cut: int, random: np.random.RandomState) -> None:
    """Shuffle in place, each side of the cut apart."""
    for part in (values[:cut], values[cut:]):
        random.shuffle(part)


def _sample_index(lengths: NDArray[np.int32], samples: int, seq_length: int) -> NDArray[Any]:
    """[samples + 1, 2]: sample j begins at token j * s of the stream; the document that holds that token, and where."""
    ends = np.cumsum(lengths, dtype=np.int64)
    # Samples that begin in each document. None does in an empty one; Megatron's walk too passes over those, but not
    # before its first step.
    begin = np.diff(-(-ends // seq_length), prepend=0)
    narrow = len(lengths) <= np.iinfo(np.int32).max
    index = np.empty((samples + 1, 2), np.int32 if narrow else np.int64)
    index[:, 0] = np.repeat(np.arange(len(lengths), dtype=index.dtype), begin)
    index[:, 1] = np.arange(samples + 1, dtype=np.int64) * seq_length - np.repeat(ends - lengths, begin)
    index[0, 0] = 0
    return index


@dataclass(frozen=True)
class GPTDataset:
    """Items of seq_length + 1 token ids. `sequences`: ids of those of the source that it is made of.

    Raises: DataError from an item that holds an id outside the vocabulary, naming file, sequence and id.
    """

    source: TokenSource
    indices: SampleIndices
    seq_length: int
    vocab_size: int
    sequences: NDArray[Any]

    def __len__(self) -> int:
        return len(self.indices.shuffle)

    def __getitem__(self, sample: int) -> NDArray[np.int64]:
        documents, samples, shuffle = self.indices
        at = int(shuffle[sample])  # beyond the last an IndexError, which ends an iteration
        out = np.empty(self.seq_length + 1, np.int64)
        filled = 0
        try:
            (first, begin), (last, end) = samples[at : at + 2].tolist()
            # A sample goes over as many documents as it takes, and ends with the token that the next one begins with.
            for position in range(first, last + 1):
                sequence = int(documents[position])
                until = end + 1 if position == last else int(self.source.lengths[sequence])
                piece = self.source.read(sequence, begin if position == first else 0, until)
                out[filled : filled + len(piece)] = piece
                filled += len(piece)
            if filled != len(out):
                raise ValueError
        except (IndexError, ValueError):  # its size and types are looked at when it is mapped, its numbers here
            raise DataError(
                f"--data-cache-path: the index of {self.source.prefix} is damaged at sample {sample}. Delete it."
            ) from None
        refuse_foreign_tokens(self.source.prefix, out, self.vocab_size)
        return out


def refuse_foreign_tokens(prefix: str, tokens: NDArray[Any], vocab_size: int) -> None:
    """Raise DataError if an id lies outside 0..vocab_size-1: the file was made with another tokenizer."""
    low, high = int(tokens.min()), int(tokens.max())
    if low < 0 or high >= vocab_size:
        raise DataError(
            f"--data-path {prefix} holds token {high if low >= 0 else low}, but the tokenizer has ids 0 to "
            f"{vocab_size - 1}.\n      Give --tokenizer-model the model that the data was preprocessed with."
        )


class MockTokens:
    """Megatron's mock data: 100,000 documents that count up modulo the vocabulary and end with eod."""

    prefix = "mock"

    def __init__(self, vocab_size: int, eod: int) -> None:
        self._vocab_size, self._eod = vocab_size, eod
        self.lengths: NDArray[np.int32] = np.random.default_rng(0).integers(1, 4096, 100_000, np.int32)

    def __getitem__(self, sequence: int) -> NDArray[np.int64]:
        tokens = np.arange(1, int(self.lengths[sequence]) + 1) % self._vocab_size
        tokens[-1] = self._eod
        return tokens

    def read(self, sequence: int, begin: int, end: int) -> NDArray[np.int64]:
        """Tokens begin..end-1 of a sequence."""
        return self[sequence][begin:end]
