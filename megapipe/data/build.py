"""Build the datasets of a run: open and check files, split and blend them, order the samples."""

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
"""Factor by which each dataset of a blend is longer than its share, as in Megatron-LM."""
_PARTS = ("train", "validation", "test")
# Tokens of each file that are checked before the run; the rest is checked as it is read.
_PREFLIGHT = 1 << 20
# Bytes that an index takes per sample in the cache, and at most without one: document, token offset
# and place in the shuffle.
_BYTES = 12

_Range = tuple[int, int] | None
_Member = tuple[TokenSource, NDArray[Any]]
Part = tuple[list[_Member], Blend, int]
"""Train, validation or test: (sources with ids of their sequences, the flag's blend, samples)."""


@dataclass(frozen=True)
class Datasets:
    """The datasets of train, validation and test; None if the split or the run does not use one."""

    train: TokenDataset | None
    valid: TokenDataset | None = None
    test: TokenDataset | None = None


def build_datasets(config: Config, tokenizer: Tokenizer) -> Datasets:
    """Build the datasets of a run, each with at least as many samples as the run reads from it.

    Raises: DataError with every file that is missing, damaged, too short or of another tokenizer.
    """
    parts = open_parts(config, tokenizer)
    built = [None if part is None else build_part(config, tokenizer, part) for part in parts]
    return Datasets(*built)


def open_parts(config: Config, tokenizer: Tokenizer) -> list[Part | None]:
    """Open the sources of train, validation and test, without the slow ordering of samples.

    Returns: for each of the three, a Part: (list of (source, ids of its sequences), blend, number
        of samples wanted); None for a part that the run does not read or --split leaves out.
    Raises: DataError with every file that is missing, damaged or of another tokenizer, and for a
    part without tokens.
    """
    data = config.data
    wanted = samples_wanted(config)
    parts: list[Part | None] = [None] * 3
    mock = Blend("--mock-data", [], None)
    given = (mock,) if data.mock_data else blends(data)
    # Flags such as --train-data-path give three blends; otherwise one blend is split.
    if len(given) == 3:
        for part, blend in enumerate(given):
            if blend is not None and wanted[part]:
                sources = _open(blend, tokenizer)
                empty = [source.prefix for source in sources if not source.lengths.any()]
                if empty:
                    raise DataError(
                        f"{blend.said} {' '.join(empty)}: no tokens for {_PARTS[part]}. "
                        "Leave that out."
                    )
                members = [(source, np.arange(len(source.lengths))) for source in sources]
                parts[part] = members, blend, wanted[part]
        return parts
    blend = given[0] or mock
    if data.mock_data:
        sources = [MockTokens(tokenizer.vocab_size, tokenizer.eod)]
        split = data.split or "1,1,1"
    else:
        sources = _open(blend, tokenizer)
        split = data.split or "969,30,1"
    # Each source is split by itself, as in Megatron-LM: every part has its share of every source.
    ranges = [split_ranges(split, len(source.lengths)) for source in sources]
    used = [part for part in range(3) if wanted[part] and ranges[0][part]]
    _refuse_empty(split, sources, ranges, used)
    for part in used:
        members = []
        for source, own in zip(sources, ranges, strict=True):
            members.append((source, np.arange(*(own[part] or (0, 0)))))
        parts[part] = members, blend, wanted[part]
    return parts


def samples_wanted(config: Config) -> tuple[int, int, int]:
    """Return the number of samples of (train, validation, test) that the run reads.

    Validation is read once per evaluation and once at the end, test once at the end. Without
    --eval-interval neither is read. With --skip-train, validation and test are each read once, and
    train is not read.
    """
    data = config.data
    train = config.train_samples
    once = data.eval_batches * config.evaluation.global_batch_size
    if data.skip_train:
        return 0, once, once
    if data.eval_interval is None:
        return train, 0, 0
    # Megatron-LM's number, which decides how its samples are ordered.
    skipped = (data.start_eval_at_iter or 0) // data.eval_interval
    evaluations = 1 + config.train_iters // data.eval_interval - skipped
    return train, max(0, evaluations) * once, once


def reads(config: Config, data: Datasets) -> str:
    """Return a text on the data that the run reads from the first step to the last.

    A line for each part gives its samples. After it, a line for each source of the part gives the
    documents, tokens and epochs.
    """
    lines = []
    seq = config.batch.sequence
    datasets = (data.train, data.valid, data.test)
    for part, dataset, wanted in zip(_PARTS, datasets, samples_wanted(config), strict=True):
        if dataset is None:
            continue
        lines.append(f"data: {wanted} samples of {seq} tokens for {part}")
        members = [dataset]
        counts = [wanted]
        # The blend may be longer than the run, so only the items that are read are counted.
        if isinstance(dataset, BlendedDataset):
            members = list(dataset.datasets)
            counts = np.bincount(dataset.choice[:wanted], minlength=len(members)).tolist()
        for member, count in zip(members, counts, strict=True):
            if not isinstance(member, GPTDataset):
                continue
            lengths = member.source.lengths[member.sequences]
            tokens = int(lengths.sum(dtype=np.int64))
            share = f"{count / wanted:.1%} from " if len(members) > 1 else "from "
            lines.append(
                f"  {share}{member.source.prefix}: {len(lengths)} documents, {tokens} tokens, "
                f"{count * seq / tokens:.3g} epochs"
            )
    return "\n".join(lines)


def _open(blend: Blend, tokenizer: Tokenizer) -> list[TokenSource]:
    """Open and check the files of a blend.

    Args:
        blend: the blend.
        tokenizer: the tokenizer that must have written the files.
    Raises: DataError with the problems of all files.
    """
    sources: list[TokenSource] = []
    problems: list[str] = []
    most = np.iinfo(np.int16).max
    if len(blend.prefixes) > most:
        raise DataError(
            f"{blend.said} names {len(blend.prefixes)} sets, and a blend has at most {most}. "
            "Merge some."
        )
    # Each .bin stays open, and the usual limit of a process is 1,024 open files.
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    files = len(blend.prefixes) + 512
    if soft < files <= hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (files, hard))
    # Collect the problems of all files, so that one start shows all of them.
    for prefix in blend.prefixes:
        try:
            source = IndexedDataset(prefix)
            refuse_foreign_tokens(prefix, source.tokens[:_PREFLIGHT], tokenizer.vocab_size)
            problems.extend(foreign(prefix, tokenizer))
            sources.append(source)
        except DataError as error:
            problems.extend(error.problems)
        except OSError as error:
            problems.append(
                f"--data-path {prefix}: {error.filename or ''}: {error.strerror} "
                f"(ulimit -n: {soft})"
            )
    if problems:
        raise DataError(said(blend.said, problems))
    return sources


def _split_for(source: TokenSource, counts: Sequence[int], used: Sequence[int]) -> str:
    """Return a value for --split, close to `counts`, that gives tokens to every used part.

    If there is no such value, the result is `counts` itself, or 1,0,0 if train has no sequences.

    Args:
        source: the tokens to split.
        counts: number of sequences of train, validation and test by the refused split.
        used: the parts that the run reads: 0 for train, 1 for validation, 2 for test.
    """
    # One sequence at least for each used part.
    wanted = [max(count, 1) if part in used else count for part, count in enumerate(counts)]
    # The largest part gives the sequences that the others get.
    most = wanted.index(max(wanted))
    wanted[most] -= sum(wanted) - len(source.lengths)
    split = ",".join(map(str, wanted))
    if min(wanted) >= 0 and max(wanted) > 0:
        ranges = split_ranges(split, len(source.lengths))
        # Shares are rounded, and a sequence may be empty: only trying the split gives certainty.
        if all(source.lengths[slice(*(ranges[part] or (0, 0)))].any() for part in used):
            return split
    return ",".join(map(str, counts)) if counts[0] else "1,0,0"


def _refuse_empty(
    split: str,
    sources: Sequence[TokenSource],
    ranges: Sequence[Sequence[_Range]],
    used: Sequence[int],
) -> None:
    """Check that every used part of every source has tokens.

    Args:
        split: the value of --split.
        sources: the sources that it splits.
        ranges: for each source, (first sequence, end) of train, validation and test.
        used: the parts that the run reads: 0 for train, 1 for validation, 2 for test.
    Raises: DataError with every used part that has no tokens, and a better split.
    """
    problems = []
    for source, parts in zip(sources, ranges, strict=True):
        bounds = [own or (0, 0) for own in parts]
        # With several sources no split is sure to help all of them, so train gets everything.
        remedy = "1,0,0"
        if len(sources) == 1:
            remedy = _split_for(source, [end - begin for begin, end in bounds], used)
        problems += [
            f"--split {split} leaves no tokens for {_PARTS[part]}: {source.prefix} has "
            f"{len(source.lengths)} sequences, its part is {bounds[part][0]} to "
            f"{bounds[part][1]}.\n      Use more documents, or --split {remedy}"
            for part in used
            if not source.lengths[slice(*bounds[part])].any()
        ]
    if problems:
        raise DataError(problems)


def build_part(config: Config, tokenizer: Tokenizer, part: Part) -> TokenDataset:
    """Order the samples of one part that `open_parts` has returned, and blend its sources.

    Args:
        tokenizer: the tokenizer, whose number of ids bounds the tokens.
        part: a part from `open_parts`.
    Raises: DataError if a blend without weights has too few samples, or if an index does not fit in
    memory.
    """
    members, blend, wanted = part
    build = partial(_build_member, config, tokenizer.vocab_size)
    weights = blend.weights
    # A single source without a weight is not a blend and gets no surplus, as in Megatron-LM.
    if len(members) == 1 and weights is None:
        return build(members[0], wanted)
    if weights is None:
        size = wanted
        datasets = [build(member, None) for member in members]
        weights = [float(len(d)) for d in datasets]
        if wanted > sum(weights):
            raise DataError(
                f"{blend.said} without weights gives every sample once, "
                f"{sum(map(len, datasets))} of them; the run reads {wanted}. Train shorter, or put "
                "a weight before each prefix to repeat them."
            )
    else:
        # Each share is rounded up, so the blend may be longer than the run.
        shares = [math.ceil(wanted * w) for w in weights]
        size = sum(shares)
        datasets = []
        for member, share in zip(members, shares, strict=True):
            datasets.append(build(member, math.ceil(share * SURPLUS)))
    limits = [len(d) for d in datasets]
    key = {"blend": weights, "size": size, "limits": limits}
    choice, index = cached(
        config.data.data_cache_path, key, lambda: blend_indices(weights, size, limits)
    )
    return BlendedDataset(datasets, choice, index)


def _build_member(
    config: Config, vocab_size: int, member: _Member, wanted: int | None
) -> GPTDataset:
    """Build the dataset of one source of a part.

    Args:
        vocab_size: number of ids of the tokenizer.
        member: (source, ids of the sequences to use).
        wanted: the least number of samples; None for one epoch.
    Raises: DataError if its index does not fit in memory.
    """
    source, sequences = member
    seq_length = config.batch.seq_length
    seed = config.batch.seed
    assert seq_length is not None
    # Everything that `build_indices` depends on. The file's path and time are not part of it.
    key = {
        "lengths": _digest(source.lengths[sequences[0] : sequences[0] + len(sequences)]),
        "sequences": [int(sequences[0]), len(sequences)],
        "seq_length": seq_length,
        "num_samples": wanted,
        "seed": seed,
    }
    physical_bytes = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    try:
        # Linux grants more memory than it has and later kills the process, so refuse it here.
        if wanted is not None and wanted * _BYTES > physical_bytes:
            raise MemoryError
        build = partial(build_indices, source.lengths, sequences, seq_length, wanted, seed)
        if config.data.data_cache_path is None:
            indices = build()
        else:
            arrays = cached(config.data.data_cache_path, key, lambda: build().arrays())
            indices = SampleIndices(*arrays)
    except (MemoryError, OverflowError):
        raise DataError(
            f"--data-path {source.prefix}: an index of {wanted:,} samples does not fit in memory. "
            "The number follows from --train-iters or --train-samples; give a smaller one."
        ) from None
    return GPTDataset(source, indices, seq_length, vocab_size, sequences)


def _digest(lengths: NDArray[np.int32]) -> str:
    """Return a digest of the lengths of a source's sequences, for the key of the index cache.

    The order of samples depends on nothing else in the source. Equal files in another folder, or on
    another machine, thus find the same cache entry.
    """
    return hashlib.sha256(np.ascontiguousarray(lengths).data).hexdigest()
