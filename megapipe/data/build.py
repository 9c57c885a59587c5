"""The three datasets of a run, by its configuration: files opened and checked, split, blended, long enough."""

from __future__ import annotations

import hashlib
import math
import os
import resource
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megapipe.config import Config
from megapipe.data.blend import BlendedDataset, blend_indices, split_ranges
from megapipe.data.fingerprint import foreign
from megapipe.data.gpt_dataset import (
    GPTDataset,
    MockTokens,
    SampleIndices,
    TokenDataset,
    TokenSource,
    build_indices,
    refuse_foreign_tokens,
)
from megapipe.data.index_cache import cached
from megapipe.data.indexed import IndexedDataset
from megapipe.data.sources import Blend, blends, said
from megapipe.data.tokenizers.tokenizer import Tokenizer
from megapipe.errors import DataError

SURPLUS = 1.005
"""Members of a blend are built for this much more than their share."""
_PARTS = ("train", "validation", "test")
_PREFLIGHT = 1 << 20  # tokens of each file looked at before the run; items check the rest

_BYTES = 12  # least of an index's sample: document, token, and its place in the shuffle

_Range = tuple[int, int] | None
_Member = tuple[TokenSource, NDArray[Any]]
Part = tuple[list[_Member], Blend, int]
"""Files and their documents, where they were named, and how many samples the run reads."""


@dataclass(frozen=True)
class Datasets:
    """One dataset per part of the split, None where the split or the run has no use for it."""

    train: TokenDataset | None
    valid: TokenDataset | None = None
    test: TokenDataset | None = None


def build_datasets(config: Config, tokenizer: Tokenizer) -> Datasets:
    """The datasets of a run, each with at least the samples that the run reads from it.

    Raises: DataError with every missing, damaged, foreign or too small file.
    """
    return Datasets(*(part and build_part(config, tokenizer, part) for part in open_parts(config, tokenizer)))


def open_parts(config: Config, tokenizer: Tokenizer) -> list[Part | None]:
    """The sources of train, validation and test, None for what the run does not read; no sample is put in order.

    Raises: DataError as `build_datasets`, but for files that have too few samples.
    """
    data, vocab_size, wanted = config.data, tokenizer.vocab_size, samples_wanted(config)
    mock = Blend("--mock-data", [], None)
    given = (mock,) if data.mock_data else blends(data)
    parts: list[Part | None] = [None] * 3
    if len(given) == 3:
        for part, blend in enumerate(given):
            if blend is not None and wanted[part]:
                sources = _open(blend, tokenizer)
                if empty := [source.prefix for source in sources if not source.lengths.any()]:
                    raise DataError(f"{blend.said} {' '.join(empty)}: no tokens for {_PARTS[part]}. Leave that out.")
                parts[part] = [(x, np.arange(len(x.lengths))) for x in sources], blend, wanted[part]
        return parts
    blend = given[0] or mock
    sources = [MockTokens(vocab_size, tokenizer.eod)] if data.mock_data else _open(blend, tokenizer)
    split = data.split or ("1,1,1" if data.mock_data else "969,30,1")
    # Each source is cut by itself, as in Megatron-LM: every part has its share of every source.
    ranges = [split_ranges(split, len(source.lengths)) for source in sources]
    used = [part for part in range(3) if wanted[part] and ranges[0][part]]
    _refuse_empty(split, sources, ranges, used)
    for part in used:
        members = [(source, np.arange(*(r[part] or (0, 0)))) for source, r in zip(sources, ranges, strict=True)]
        parts[part] = members, blend, wanted[part]
    return parts


def samples_wanted(config: Config) -> tuple[int, int, int]:
    """Samples of train, validation and test that the run reads: validation also once at the end, and neither it nor
    test without --eval-interval, but once with --skip-train."""
    data, train = config.data, config.train_samples
    once = data.eval_batches * config.evaluation.global_batch_size
    if data.skip_train:
        return 0, once, once
    if (every := data.eval_interval) is None:
        return train, 0, 0
    evaluations = 1 + config.train_iters // every - (data.start_eval_at_iter or 0) // every  # Megatron-LM's number
    return train, max(0, evaluations) * once, once


def reads(config: Config, data: Datasets) -> str:
    """A line on what the run reads from its first step to its last: of each part and each set in it."""
    lines, seq = [], config.train.sequence
    for part, dataset, wanted in zip(_PARTS, (data.train, data.valid, data.test), samples_wanted(config), strict=True):
        if dataset is None:
            continue
        lines.append(f"data: {wanted} samples of {seq} tokens for {part}")
        sets, counts = [dataset], [wanted]
        if isinstance(dataset, BlendedDataset):
            sets, counts = list(dataset.datasets), np.bincount(dataset.choice[:wanted], minlength=len(sets)).tolist()
        for one, count in zip(sets, counts, strict=True):
            if isinstance(one, GPTDataset):
                lengths = one.source.lengths[one.sequences]
                tokens = int(lengths.sum(dtype=np.int64))
                share = f"{count / wanted:.1%} from " if len(sets) > 1 else "from "
                lines.append(
                    f"  {share}{one.source.prefix}: {len(lengths)} documents, {tokens} tokens, "
                    f"{count * seq / tokens:.3g} epochs"
                )
    return "\n".join(lines)


def _open(blend: Blend, tokenizer: Tokenizer) -> list[TokenSource]:
    sources: list[TokenSource] = []
    problems: list[str] = []
    if len(blend.prefixes) > (most := np.iinfo(np.int16).max):
        raise DataError(f"{blend.said} names {len(blend.prefixes)} sets, and a blend has at most {most}. Merge some.")
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)  # a .bin stays open; often no more than 1,024 files may
    if soft < (wanted := len(blend.prefixes) + 512) <= hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    for prefix in blend.prefixes:
        try:
            source = IndexedDataset(prefix)
            refuse_foreign_tokens(prefix, source.tokens[:_PREFLIGHT], tokenizer.vocab_size)
            problems.extend(foreign(prefix, tokenizer))
            sources.append(source)
        except DataError as error:
            problems.extend(error.problems)
        except OSError as error:
            problems.append(f"--data-path {prefix}: {error.filename or ''}: {error.strerror} (ulimit -n: {soft})")
    if problems:
        raise DataError(said(blend.said, problems))
    return sources


def _split_for(source: TokenSource, counts: Sequence[int], used: Sequence[int]) -> str:
    """Return a split close to these counts of sequences by which every part that is used has tokens.

    Where there is none, parts that would be empty are left out.
    """
    wanted = [max(count, 1) if part in used else count for part, count in enumerate(counts)]
    most = wanted.index(max(wanted))
    wanted[most] -= sum(wanted) - len(source.lengths)
    split = ",".join(map(str, wanted))
    if min(wanted) >= 0 and max(wanted) > 0:
        ranges = split_ranges(split, len(source.lengths))
        if all(source.lengths[slice(*(ranges[part] or (0, 0)))].any() for part in used):
            return split
    return ",".join(map(str, counts)) if counts[0] else "1,0,0"


def _refuse_empty(
    split: str,
    sources: Sequence[TokenSource],
    ranges: Sequence[Sequence[_Range]],
    used: Sequence[int],
) -> None:
    problems = []
    for source, parts in zip(sources, ranges, strict=True):
        bounds = [r or (0, 0) for r in parts]
        remedy = _split_for(source, [end - begin for begin, end in bounds], used) if len(sources) == 1 else "1,0,0"
        problems += [
            f"--split {split} leaves no tokens for {_PARTS[part]}: {source.prefix} has {len(source.lengths)} "
            f"sequences, its part is {bounds[part][0]} to {bounds[part][1]}.\n"
            f"      Use more documents, or --split {remedy}"
            for part in used
            if not source.lengths[slice(*bounds[part])].any()
        ]
    if problems:
        raise DataError(problems)


def build_part(config: Config, tokenizer: Tokenizer, part: Part) -> TokenDataset:
    """Put the samples of one of `open_parts` in order.

    Raises: DataError for files that have too few samples.
    """
    members, blend, wanted = part
    dataset, weights = partial(_build_member, config, tokenizer.vocab_size), blend.weights
    if len(members) == 1 and weights is None:
        return dataset(members[0], wanted)
    if weights is None:
        size = wanted
        datasets = [dataset(member, None) for member in members]
        weights = [float(len(d)) for d in datasets]
        if wanted > sum(weights):
            raise DataError(
                f"{blend.said} without weights gives every sample once, {sum(map(len, datasets))} of them; the run "
                f"reads {wanted}. Train shorter, or put a weight before each prefix to repeat them."
            )
    else:
        shares = [math.ceil(wanted * w) for w in weights]
        size = sum(shares)
        datasets = [dataset(member, math.ceil(n * SURPLUS)) for member, n in zip(members, shares, strict=True)]
    limits = [len(d) for d in datasets]
    key = {"blend": weights, "size": size, "limits": limits}
    choice, index = cached(config.data.data_cache_path, key, lambda: blend_indices(weights, size, limits))
    return BlendedDataset(datasets, choice, index)


def _build_member(config: Config, vocab_size: int, member: _Member, wanted: int | None) -> GPTDataset:
    source, sequences = member
    seq_length, seed = config.train.seq_length, config.train.seed
    assert seq_length is not None
    key = {
        "lengths": _digest(source.lengths[sequences[0] : sequences[0] + len(sequences)]),
        "sequences": [int(sequences[0]), len(sequences)],
        "seq_length": seq_length,
        "num_samples": wanted,
        "seed": seed,
    }
    try:
        if wanted is not None and wanted * _BYTES > os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"):
            raise MemoryError
        arrays = cached(
            config.data.data_cache_path, key, lambda: build_indices(source.lengths, sequences, seq_length, wanted, seed)
        )
    except (MemoryError, OverflowError):
        raise DataError(
            f"--data-path {source.prefix}: an index of {wanted:,} samples does not fit in memory. The number follows "
            "from --train-iters or --train-samples; give a smaller one."
        ) from None
    return GPTDataset(source, SampleIndices(*arrays), seq_length, vocab_size, sequences)


def _digest(lengths: NDArray[np.int32]) -> str:
    """The digest of all that the order of samples takes from a source: a copy elsewhere finds the first one's entry."""
    return hashlib.sha256(np.ascontiguousarray(lengths).data).hexdigest()
