"""Cut shuffled documents into samples of s + 1 tokens, as Megatron's GPTDataset does.

Three indices define all samples. The document index is the order of the documents, repeated for
each epoch. The sample index says where each sample begins. The shuffle index orders the samples.

The indices are pure functions of the lengths, the split, the number of samples and the seed. Every
rank therefore builds or maps equal ones without communication.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from megapipe.errors import DataError

# If less than this fraction of the last epoch is used, it is shuffled separately.
_SEPARATE_BELOW = 0.80


class TokenSource(Protocol):
    """Sequences of token ids, such as an IndexedDataset or MockTokens.

    Attributes:
        prefix: the path without .bin or .idx, for messages.
        lengths: [S] tokens of each sequence.
    """

    prefix: str
    lengths: NDArray[np.int32]

    def read(self, sequence: int, begin: int, end: int) -> NDArray[Any]:
        """Return the tokens begin..end-1 of a sequence."""


Item = NDArray[np.int64] | Mapping[str, NDArray[Any]]
"""One sample: [s + 1] int64 token ids, or arrays by name, one of them `tokens` with those ids."""


class TokenDataset(Protocol):
    """A dataset that the loader can read.

    An item has s + 1 tokens: the first s are inputs, and the last s are labels.
    """

    def __len__(self) -> int: ...

    def __getitem__(self, sample: int) -> Item: ...


@dataclass(frozen=True)
class SampleStarts:
    """The first token of each sample: rows of Megatron's sample index, each made when it is read.

    Sample j begins at token j * seq_length of all documents back to back. A run on mock data reads
    a few of millions of rows, and would wait seconds for all of them.

    Attributes:
        begins: [documents + 1] int64, number of tokens before each document in reading order, and
            of all.
        samples: number of samples.
        seq_length: tokens of a sample, without the last label.
    """

    begins: NDArray[np.int64]
    samples: int
    seq_length: int

    @classmethod
    def of(cls, lengths: NDArray[np.int32], samples: int, seq_length: int) -> SampleStarts:
        """Return the starts in documents of these lengths, in reading order."""
        begins = np.zeros(len(lengths) + 1, np.int64)
        np.cumsum(lengths, dtype=np.int64, out=begins[1:])
        return cls(begins, samples, seq_length)

    def __getitem__(self, rows: slice) -> NDArray[Any]:
        """Return rows of `array()`; the slice has no step."""
        start, stop, _ = rows.indices(self.samples + 1)
        tokens = np.arange(start, stop, dtype=np.int64) * self.seq_length
        # The last document that begins at the token or before it, so never an empty one.
        documents = np.searchsorted(self.begins, tokens, side="right") - 1
        offsets = tokens - self.begins[documents]
        # Megatron's loop skips empty documents too, but not before its first step.
        documents[tokens == 0] = 0
        return np.stack((documents, offsets), -1).astype(self._type)

    @property
    def _type(self) -> type[np.integer[Any]]:
        return np.int32 if len(self.begins) - 1 <= np.iinfo(np.int32).max else np.int64

    def array(self) -> NDArray[Any]:
        """Return all rows, [samples + 1, 2]: position in the document index, and token offset."""
        # The number of samples that begin in each document: none in an empty one.
        begin = np.diff(-(-self.begins // self.seq_length))
        index = np.empty((self.samples + 1, 2), self._type)
        index[:, 0] = np.repeat(np.arange(len(begin), dtype=index.dtype), begin)
        first_tokens = np.arange(self.samples + 1, dtype=np.int64) * self.seq_length
        index[:, 1] = first_tokens - np.repeat(self.begins[:-1], begin)
        index[0, 0] = 0
        return index


class SampleIndices(NamedTuple):
    """The three indices that define the samples of a source.

    Attributes:
        documents: [epochs x sequences] int32, sequence ids in reading order.
        samples: [N + 1, 2], position in `documents` and token offset of each sample's first token.
        shuffle: [N], the row of `samples` that item i reads.
    """

    documents: NDArray[Any]
    samples: NDArray[Any] | SampleStarts
    shuffle: NDArray[Any]

    def arrays(self) -> list[NDArray[Any]]:
        """Return the three as arrays, for a file."""
        samples = self.samples
        if isinstance(samples, SampleStarts):
            samples = samples.array()
        return [self.documents, samples, self.shuffle]


def build_indices(
    lengths: NDArray[np.int32],
    sequences: NDArray[Any],
    seq_length: int,
    num_samples: int | None,
    seed: int,
) -> SampleIndices:
    """Build the three indices, bitwise equal to Megatron-LM's.

    Compare megatron/core/datasets/gpt_dataset.py and helpers.cpp.

    Args:
        lengths: [S] tokens of every sequence of the source.
        sequences: ids of the sequences to use; they hold at least one token in total.
        seq_length: tokens of a sample, without the last label.
        num_samples: least number of samples, for which epochs are repeated; None for one epoch.
        seed: seed of both shuffles.
    """
    per_epoch = int(lengths[sequences].sum(dtype=np.int64))
    assert per_epoch > 0
    epochs = 1
    if num_samples is not None:
        # Neighbouring samples share a token, so only the last one needs a token more.
        needed = num_samples * seq_length + 1
        epochs = max(1, math.ceil(needed / per_epoch))
    samples = (epochs * per_epoch - 1) // seq_length
    # Numbers, types and the order of the random draws follow Megatron-LM: equal seeds must give
    # equal samples.
    before_last = ((epochs - 1) * per_epoch - 1) // seq_length
    # If little of the last epoch is used, it is shuffled separately. Otherwise the few samples from
    # it would appear anywhere in the run.
    separate = (
        num_samples is not None
        and epochs > 1
        and num_samples - before_last < int(_SEPARATE_BELOW * ((per_epoch - 1) // seq_length))
    )
    documents_cut = (epochs - 1) * len(sequences) if separate else 0
    samples_cut = before_last if separate else 0
    # Both shuffles draw from one generator, documents first.
    random = np.random.RandomState(seed)
    documents = np.tile(sequences.astype(np.int32), epochs)
    _shuffle(documents, documents_cut, random)
    # Megatron-LM's limit for this type.
    fits_uint32 = samples < np.iinfo(np.uint32).max - 1
    narrow: type[np.integer[Any]] = np.uint32 if fits_uint32 else np.int64
    shuffle = np.arange(samples, dtype=narrow)
    _shuffle(shuffle, samples_cut, random)
    starts = SampleStarts.of(lengths[documents], samples, seq_length)
    # Of many short documents the rows take less memory than what makes them.
    if samples < len(documents):
        return SampleIndices(documents, starts.array(), shuffle)
    return SampleIndices(documents, starts, shuffle)


def _shuffle(values: NDArray[Any], cut: int, random: np.random.RandomState) -> None:
    """Shuffle values[:cut] in place, and then values[cut:].

    Args:
        values: the array.
        cut: the index that separates the two ranges.
        random: the generator.
    """
    random.shuffle(values[:cut])
    random.shuffle(values[cut:])


@dataclass(frozen=True)
class GPTDataset:
    """Items of seq_length + 1 token ids of one source.

    Reading an item raises DataError with file and id if an id is not in the vocabulary. It also
    does if the cached index is damaged there.

    Attributes:
        source: the token sequences.
        indices: which tokens each item holds.
        seq_length: tokens of an item, without the last label.
        vocab_size: number of ids that the tokenizer has.
        sequences: indices of the source's sequences that the items are made of.
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
        # An IndexError here is not damage: it ends an iteration over the items.
        at = int(shuffle[sample])
        out = np.empty(self.seq_length + 1, np.int64)
        filled = 0
        try:
            (first, first_offset), (last, last_offset) = samples[at : at + 2].tolist()
            # A sample runs through as many documents as it needs. Its last token, which is only a
            # label, is the first token of the next sample.
            for position in range(first, last + 1):
                sequence = int(documents[position])
                begin = 0
                end = int(self.source.lengths[sequence])
                if position == first:
                    begin = first_offset
                if position == last:
                    end = last_offset + 1
                piece = self.source.read(sequence, begin, end)
                out[filled : filled + len(piece)] = piece
                filled += len(piece)
            if filled != len(out):
                raise ValueError
        # Sizes and types of a cached index are checked when it is mapped, its numbers only here.
        except (IndexError, ValueError):
            raise DataError(
                f"--data-cache-path: the index of {self.source.prefix} is damaged at sample "
                f"{sample}. Delete it."
            ) from None
        refuse_foreign_tokens(self.source.prefix, out, self.vocab_size)
        return out


def refuse_foreign_tokens(prefix: str, tokens: NDArray[Any], vocab_size: int) -> None:
    """Raise DataError if an id is not in 0..vocab_size-1: another tokenizer wrote the file.

    Args:
        prefix: the file's path without .bin, for the message.
        tokens: ids of any shape, at least one.
    """
    low = int(tokens.min())
    high = int(tokens.max())
    if low < 0 or high >= vocab_size:
        wrong = low if low < 0 else high
        raise DataError(
            f"--data-path {prefix} holds token {wrong}, but the tokenizer has ids 0 to "
            f"{vocab_size - 1}.\n"
            "      Give --tokenizer-model the model that the data was preprocessed with."
        )


class MockTokens:
    """Megatron's mock data: 100,000 documents that count up modulo the vocabulary.

    Each document ends with the end-of-document id.

    Args:
        vocab_size: number of ids.
        eod: the end-of-document id.
    """

    prefix = "mock"

    def __init__(self, vocab_size: int, eod: int) -> None:
        self._vocab_size = vocab_size
        self._eod = eod
        random = np.random.default_rng(0)
        self.lengths: NDArray[np.int32] = random.integers(1, 4096, 100_000, np.int32)

    def __getitem__(self, sequence: int) -> NDArray[np.int64]:
        # Computed at each access: 100,000 documents would take 1.6 GB.
        tokens = np.arange(1, int(self.lengths[sequence]) + 1) % self._vocab_size
        tokens[-1] = self._eod
        return tokens

    def read(self, sequence: int, begin: int, end: int) -> NDArray[np.int64]:
        """Return the tokens begin..end-1 of a sequence."""
        return self[sequence][begin:end]
