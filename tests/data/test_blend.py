"""Splits, blends and sample counts against Megatron's values; every data path a user can get wrong."""

from __future__ import annotations

import contextlib
import dataclasses
import re
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from token_files import add_document

from megapipe.config import BatchConfig, Config, DataConfig, ModelConfig
from megapipe.data import blend
from megapipe.data.blend import blend_indices, parse_data_path, split_ranges
from megapipe.data.build import build_datasets, reads, samples_wanted
from megapipe.data.gpt_dataset import MockTokens, build_indices
from megapipe.data.indexed import IndexedWriter
from megapipe.data.tokenizers.tokenizer import NullTokenizer
from megapipe.errors import DataError

TOKENIZER = NullTokenizer(64)
MANY = 1000


def config(*data_path: str, **data: object) -> Config:
    fields = {"split": "1,1,0", "eval_iters": 1, "eval_interval": 2, **data}
    batch = BatchConfig(micro_batch_size=1, global_batch_size=2, seq_length=4, train_iters=5, seed=1234)
    return Config(model=ModelConfig(), batch=batch, data=DataConfig(data_path=data_path, **fields))  # type: ignore[arg-type]


def write(prefix: Path, num_documents: int, first: int = 0) -> str:
    with IndexedWriter(prefix, np.uint16) as writer:
        for i in range(num_documents):
            add_document(writer, [first + i % 10] * 5)
    return str(prefix)


@pytest.mark.parametrize(
    ("weights", "size", "limits", "choice", "index"),
    [  # Megatron-LM d98e8a64's helpers.cpp
        ([0.3, 0.7], 10, [MANY] * 2, "1 0 1 1 0 1 1 0 1 1", "0 0 1 2 1 3 4 2 5 6"),
        ([0.5, 0.25, 0.25], 12, [MANY] * 3, "0 1 2 0 0 1 2 0 0 1 2 0", "0 0 0 1 2 1 1 3 4 2 2 5"),
        ([1.0, 1.0], 6, [MANY] * 2, "0 1 0 1 0 1", "0 0 1 1 2 2"),
        ([2.0, 5.0], 7, [2, 5], "1 0 1 1 0 1 1", "0 0 1 2 1 3 4"),
    ],
)
def test_blends_equal_megatrons(weights: list[float], size: int, limits: list[int], choice: str, index: str) -> None:
    sets, samples = blend_indices(weights, size, limits)
    assert " ".join(map(str, sets)) == choice
    assert " ".join(map(str, samples)) == index
    assert (sets.dtype, samples.dtype) == (np.int16, np.int64)


@given(st.lists(st.integers(0, 20), min_size=1, max_size=5).filter(any))
def test_sizes_as_weights_give_every_sample_once(sizes: list[int]) -> None:
    sets, samples = blend_indices([float(n) for n in sizes], sum(sizes), sizes)
    pairs = list(zip(sets.tolist(), samples.tolist(), strict=True))
    assert sorted(pairs) == [(k, i) for k, n in enumerate(sizes) for i in range(n)]


@pytest.mark.parametrize(
    ("split", "count", "ranges"),
    [
        ("969, 30, 1", 1000, [(0, 969), (969, 999), (999, 1000)]),
        ("99,1,0", 100, [(0, 99), (99, 100), None]),
        ("1,1,1", 100_000, [(0, 33333), (33333, 66667), (66667, 100_000)]),
        ("1", 7, [(0, 7), None, None]),
        ("0,1,0", 7, [None, (0, 7), None]),
        (".5/.5", 7, [(0, 4), (4, 7), None]),
    ],
)
def test_splits_cut_at_rounded_shares(split: str, count: int, ranges: list[tuple[int, int] | None]) -> None:
    assert split_ranges(split, count) == ranges


@pytest.mark.parametrize("split", ["", "1,2,3,4", "-1,2", "a,b", "1,nan"])
def test_a_split_that_is_not_three_numbers_is_refused(split: str) -> None:
    with pytest.raises(DataError, match=r"--split '.*' is not up to three numbers"):
        split_ranges(split, 10)


def test_of_a_split_that_is_too_large_for_a_number_forty_digits_are_shown() -> None:
    with pytest.raises(DataError, match=rf"^--split '{'9' * 40}' has a sum that overflows"):
        split_ranges("9" * 400, 10)


def test_a_split_of_nothing_is_refused() -> None:
    with pytest.raises(DataError, match="--split '0,0,0' leaves nothing"):
        split_ranges("0,0,0", 10)


def test_lists_are_weights_and_prefixes_or_prefixes_alone() -> None:
    assert parse_data_path(["a"]) == (["a"], None)
    assert parse_data_path(["3", "a", "1", "b"]) == (["a", "b"], [0.75, 0.25])
    for prefixes in (["a", "b"], ["a", "b", "c"], ["a", "1", "c", "2"], ["1", "b", "c"]):
        assert parse_data_path(prefixes) == (prefixes, None)


@pytest.mark.parametrize("weight", ["0", "-1", "nan", "inf", "prefix"])
def test_a_weight_must_be_a_positive_number(weight: str) -> None:
    with pytest.raises(DataError, match=f"weight {weight} of b is not a positive number.*such as --data-path 1 b"):
        parse_data_path(["1", "a", weight, "b"])


@pytest.mark.parametrize("iters", [2**40, 2**63 - 1])
def test_an_index_that_no_machine_holds_is_refused(tmp_path: Path, iters: int) -> None:
    """numpy's ValueError, "array is too big", ended the run (found by drawn command lines)."""
    asked = config(write(tmp_path / "a", 4), split="1", eval_interval=None)
    asked = dataclasses.replace(asked, batch=dataclasses.replace(asked.batch, train_iters=iters))
    with pytest.raises(DataError, match=rf"an index of {2 * iters:,} samples does not fit in memory"):
        build_datasets(asked, TOKENIZER)


def test_no_data_path_is_refused() -> None:
    with pytest.raises(DataError, match="--data-path is missing"):
        build_datasets(config(), TOKENIZER)


def test_samples_wanted_are_megatrons_counts() -> None:
    assert samples_wanted(config()) == (10, 3 * 2, 2)  # 5 steps of 2; 5 // 2 + 1 evaluations of 1 batch
    never = config(eval_interval=None)
    assert samples_wanted(never) == (10, 0, 0)
    by_samples = dataclasses.replace(never, batch=dataclasses.replace(never.batch, train_iters=None, train_samples=9))
    assert samples_wanted(by_samples)[0] == 9


def test_one_prefix_is_split_and_repeated_as_needed(tmp_path: Path) -> None:
    datasets = build_datasets(config(write(tmp_path / "a", 4)), TOKENIZER)
    assert datasets.train is not None
    assert datasets.valid is not None
    assert datasets.test is None
    assert len(datasets.train) >= 10
    train = {int(t) for i in range(len(datasets.train)) for t in datasets.train[i]}
    valid = {int(t) for i in range(len(datasets.valid)) for t in datasets.valid[i]}
    assert (train, valid) == ({0, 1}, {2, 3})


def test_a_blend_takes_each_item_from_its_member(tmp_path: Path) -> None:
    prefixes = [write(tmp_path / "a", 4), write(tmp_path / "b", 4, first=20)]
    datasets = build_datasets(config("3", prefixes[0], "7", prefixes[1], split="1"), TOKENIZER)
    assert datasets.train is not None
    from_b = [bool(datasets.train[i][0] >= 20) for i in range(10)]
    assert from_b == [True, False, True, True, False, True, True, False, True, True]  # the golden blend .3 .7


def test_a_run_says_at_its_start_what_it_will_read(tmp_path: Path) -> None:
    one, two = (
        config(write(tmp_path / "a", 4)),
        config("3", write(tmp_path / "b", 4), "7", f"{tmp_path / 'a'}", split="1"),
    )
    assert reads(one, build_datasets(one, TOKENIZER)).splitlines() == [
        "data: 10 samples of 4 tokens for train",
        f"  from {tmp_path / 'a'}: 2 documents, 10 tokens, 4 epochs",
        "data: 6 samples of 4 tokens for validation",
        f"  from {tmp_path / 'a'}: 2 documents, 10 tokens, 2.4 epochs",
    ]
    assert reads(two, build_datasets(two, TOKENIZER)).splitlines()[1:] == [
        f"  30.0% from {tmp_path / 'b'}: 4 documents, 20 tokens, 0.6 epochs",
        f"  70.0% from {tmp_path / 'a'}: 4 documents, 20 tokens, 1.4 epochs",
    ]


def test_prefixes_without_weights_give_every_sample_once_or_say_so(tmp_path: Path) -> None:
    prefixes = [write(tmp_path / name, 4, first) for name, first in (("a", 0), ("b", 20), ("c", 40))]
    datasets = build_datasets(config(*prefixes, split="1"), TOKENIZER)  # 20 tokens each: 4 samples each
    assert datasets.train is not None
    assert len(datasets.train) == 10
    too_long = config(*prefixes, split="1").with_fields(train_iters=7, seed=1234)
    with pytest.raises(DataError, match="gives every sample once, 12 of them; the run reads 14"):
        build_datasets(too_long, TOKENIZER)


def test_the_cache_changes_nothing_not_even_when_files_are_written_again(tmp_path: Path) -> None:
    prefix = str(tmp_path / "a")
    for num_documents in (30, 31):
        write(tmp_path / "a", num_documents)
        plain = build_datasets(config("1", prefix, "2", prefix), TOKENIZER)
        for _ in range(2):
            kept = build_datasets(config("1", prefix, "2", prefix, data_cache_path=str(tmp_path / "cache")), TOKENIZER)
            assert plain.train is not None
            assert kept.train is not None
            assert [x.tolist() for x in kept.train] == [x.tolist() for x in plain.train]


def test_a_copy_of_the_files_finds_the_entry_of_the_first(tmp_path: Path) -> None:
    """Path and time were in its name: each node with the data on its own disk built the index again."""
    cache, entries = tmp_path / "cache", []
    for node in ("a", "b"):
        build_datasets(config(write(tmp_path / node / "x", 30), data_cache_path=str(cache)), TOKENIZER)
        entries.append(sorted(path.name for path in cache.iterdir()))
    assert entries[0] == entries[1] != []


def test_a_blend_of_more_sets_than_its_index_can_name_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="names 32768 sets, and a blend has at most 32767"):
        build_datasets(config(*(f"none{i}" for i in range(32768))), TOKENIZER)


def test_all_missing_files_are_named_at_once(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="2 problems") as error:
        build_datasets(config("1", str(tmp_path / "a"), "1", str(tmp_path / "b")), TOKENIZER)
    assert all(f"--data-path {tmp_path / name}: no file" in str(error.value) for name in "ab")


def test_a_part_without_tokens_is_refused_with_a_split_that_works(tmp_path: Path) -> None:
    prefix = write(tmp_path / "a", 20)
    message = r"--split 969,30,1 leaves no tokens for test: .* 20 sequences, its part is 20 to 20\.\n.* --split 18,1,1$"
    with pytest.raises(DataError, match=message):
        build_datasets(config(prefix, split=None), TOKENIZER)
    assert build_datasets(config(prefix, split="18,1,1"), TOKENIZER).test is not None


@pytest.mark.parametrize(("documents", "eval_interval"), [(1, None), (2, 2), (3, 2), (7, 2), (50, 2)])
@pytest.mark.parametrize("split", ["969,30,1", "1,0,99", "1,1,998"])
def test_the_split_that_a_refusal_names_is_taken(tmp_path: Path, documents: int, eval_interval: int | None, split: str):
    prefix = write(tmp_path / "a", documents)
    with contextlib.suppress(DataError):
        build_datasets(config(prefix, split=split, eval_interval=eval_interval), TOKENIZER)
        return
    with pytest.raises(DataError) as refused:
        build_datasets(config(prefix, split=split, eval_interval=eval_interval), TOKENIZER)
    (named, *_) = re.findall(r"or --split (\S+)", str(refused.value))
    found = build_datasets(config(prefix, split=named, eval_interval=eval_interval), TOKENIZER)
    wanted = [part for part, share in zip(("train", "valid", "test"), split.split(","), strict=True) if share != "0"]
    if documents > 2 and eval_interval:  # each part that was asked for has tokens
        assert all(getattr(found, part) is not None for part in wanted)


def test_data_of_another_tokenizer_is_refused_before_the_run(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="holds token 29, but the tokenizer has ids 0 to 19"):
        build_datasets(config(write(tmp_path / "a", 10, first=20)), NullTokenizer(20))


def test_mock_data_is_split_in_thirds() -> None:
    mocked = config(mock_data=True, split=None)
    mocked = dataclasses.replace(mocked, batch=dataclasses.replace(mocked.batch, seq_length=1000))
    valid = build_datasets(mocked, TOKENIZER).valid
    mock = MockTokens(64, 63)
    indices = build_indices(mock.lengths, np.arange(33333, 66667), 1000, 6, 1234)
    assert valid is not None
    assert len(valid) == len(indices.shuffle)
    first = int(indices.shuffle[0])
    ((position, offset),) = indices.samples[first : first + 1].tolist()
    assert valid[0][0] == mock[int(indices.documents[position])][offset]


def by_the_rule(weights: list[float], size: int) -> tuple[list[int], list[int]]:
    """Megatron's loop (helpers.cpp, build_blending_indices), as it is written."""
    total = np.array(weights, np.float64).sum()
    w, taken = [float(np.float64(x) / total) for x in weights], [0] * len(weights)
    sets, samples = [], []
    for i in range(size):
        due, best, most = max(float(i), 1.0), 0, w[0] * max(float(i), 1.0) - taken[0]
        for k in range(1, len(w)):
            if w[k] * due - taken[k] > most:
                best, most = k, w[k] * due - taken[k]
        sets.append(best)
        samples.append(taken[best])
        taken[best] += 1
    return sets, samples


@pytest.mark.parametrize(
    "weights",
    [
        [0.3, 0.7],
        [1.0] * 7,  # ties everywhere
        [1 / n**2 for n in range(1, 31)],
        [1.0, 1e-3, 1e-4, 0.3],  # some seldom or never in a stretch: guesses are wrong there and dealt again
        [2.0**-n for n in range(12)],
    ],
)
def test_a_long_blend_dealt_in_stretches_is_the_rule_bit_for_bit(weights: list[float]) -> None:
    sets, samples = blend_indices(weights, 30_000, [MANY * MANY] * len(weights))
    assert (sets.tolist(), samples.tolist()) == by_the_rule(weights, 30_000)


@given(st.lists(st.floats(1e-4, 1.0), min_size=1, max_size=6))
@settings(max_examples=15, deadline=None)
def test_any_long_blend_is_the_rule_bit_for_bit(weights: list[float]) -> None:
    sets, samples = blend_indices(weights, 9_000, [MANY * MANY] * len(weights))
    assert (sets.tolist(), samples.tolist()) == by_the_rule(weights, 9_000)


def test_a_long_blend_of_sizes_gives_every_sample_once_and_stops_at_a_limit() -> None:
    sizes = [17, 9000, 1, 4000]
    sets, samples = blend_indices([float(n) for n in sizes], sum(sizes), sizes)
    assert [sorted(samples[sets == k].tolist()) for k in range(4)] == [list(range(n)) for n in sizes]
    early, _ = blend_indices([1.0, 1.0], 9000, [1000, 8000])
    assert np.bincount(early).tolist() == [1000, 8000]
    assert early[:2000].tolist() == [0, 1] * 1000
    assert set(early[2000:].tolist()) == {1}


def test_a_long_blend_is_not_dealt_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """It was: 0.8 to 3.7 microseconds of Python for each sample of a run, on every rank at every start."""
    begins: list[int] = []
    real = blend._deal_one_by_one

    def spy(*args: object) -> None:
        begins.append(args[4])  # type: ignore[arg-type]
        real(*args)  # type: ignore[arg-type]

    monkeypatch.setattr(blend, "_deal_one_by_one", spy)
    blend_indices([0.5, 0.2, 0.3], 50_010, [MANY * MANY] * 3)
    assert begins == [50_010 // 24 * 24]


@pytest.mark.parametrize("split", ["9" * 400, "1" + "0" * 308 + "," + "1" + "0" * 308])
def test_proportions_whose_sum_is_no_number_are_refused(split: str) -> None:
    """Their shares were nan, with a warning of numpy's, or all 0; found by drawn command lines."""
    with pytest.raises(DataError, match="has a sum that overflows float64"):
        split_ranges(split, 100)


def test_weights_whose_sum_is_no_number_are_refused() -> None:
    """Both shares were 0."""
    with pytest.raises(DataError, match="have a sum that overflows float64"):
        parse_data_path(["1e308", "a", "1e308", "b"])
