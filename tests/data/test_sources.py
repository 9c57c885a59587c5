"""Data by part and lists in files: each part reads its own files whole, a list in a file is the list of the flag."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from token_files import add_document

from megapipe.checks.inputs import data_problems, path_problems
from megapipe.config import BatchConfig, Config, DataConfig
from megapipe.data.build import build_datasets
from megapipe.data.indexed import IndexedWriter
from megapipe.data.sources import blends
from megapipe.data.tokenizers.tokenizer import NullTokenizer
from megapipe.errors import DataError
from megapipe.flags.parse import parse

TOKENIZER = NullTokenizer(64)


def config(**data: object) -> Config:
    batch = BatchConfig(micro_batch_size=1, global_batch_size=2, seq_length=4, train_iters=5, seed=1234)
    return Config(batch=batch, data=DataConfig(eval_iters=1, eval_interval=2, **data))  # type: ignore[arg-type]


@pytest.fixture
def abc(tmp_path: Path) -> list[str]:
    """Three pairs of 4 documents of 5 tokens: 0 to 3, 20 to 23, 40 to 43."""
    for name, first in (("a", 0), ("b", 20), ("c", 40)):
        with IndexedWriter(tmp_path / name, np.uint16) as writer:
            for i in range(4):
                add_document(writer, [first + i] * 5)
    return [str(tmp_path / name) for name in "abc"]


def tokens(dataset) -> set[int]:
    return {int(t) for i in range(len(dataset)) for t in dataset[i]}


def problem(**data: object) -> str:
    (only,) = data_problems(config(**data))
    return only


def test_each_part_reads_all_documents_of_its_own_files(abc: list[str]) -> None:
    a, b, c = abc
    made = build_datasets(config(train_data_path=(a,), valid_data_path=(b,), test_data_path=(c,)), TOKENIZER)
    assert tokens(made.train) == {0, 1, 2, 3}
    assert tokens(made.valid) == {20, 21, 22, 23}
    assert tokens(made.test) == {40, 41, 42, 43}
    whole = build_datasets(config(data_path=(a,), split="1"), TOKENIZER).train
    assert [x.tolist() for x in made.train] == [x.tolist() for x in whole]


def test_a_part_without_files_is_not_read(abc: list[str]) -> None:
    made = build_datasets(config(train_data_path=(abc[0],), valid_data_path=(abc[1],)), TOKENIZER)
    assert made.test is None


def test_a_part_may_be_a_blend_and_the_weight_of_an_only_set_means_nothing(abc: list[str]) -> None:
    a, b, c = abc
    made = build_datasets(config(train_data_path=("3", a, "7", b), valid_data_path=("5", c)), TOKENIZER)
    from_b = [bool(made.train[i][0] >= 20) for i in range(10)]
    assert from_b == [True, False, True, True, False, True, True, False, True, True]  # the golden blend .3 .7
    plain = build_datasets(config(train_data_path=(a,), valid_data_path=(c,)), TOKENIZER)
    assert [x.tolist() for x in made.valid] == [x.tolist() for x in plain.valid]


def test_a_list_in_a_file_is_the_list_of_the_flag(abc: list[str], tmp_path: Path) -> None:
    a, b, c = abc
    (tmp_path / "blend.txt").write_text(f"0.3 {a}\n0.7 {b}\n")
    (from_file,) = blends(DataConfig(data_args_path=str(tmp_path / "blend.txt")))
    assert (from_file.prefixes, from_file.weights) == ([a, b], [0.3, 0.7])
    (tmp_path / "parts.json").write_text(json.dumps({"train": ["1", a, "3", b], "valid": c, "test": None}))
    train, valid, test = blends(DataConfig(per_split_data_args_path=str(tmp_path / "parts.json")))
    assert (train.prefixes, train.weights) == ([a, b], [0.25, 0.75])
    assert (valid.prefixes, valid.weights, test) == ([c], None, None)


def test_the_flags_are_parsed_as_megatrons() -> None:
    data = parse(Config, ["--train-data-path", "1", "a", "2", "b", "--valid-data-path", "c"]).data
    assert (data.train_data_path, data.valid_data_path) == (("1", "a", "2", "b"), ("c",))


def test_ways_to_name_data_exclude_each_other() -> None:
    assert problem(data_path=("a",), data_args_path="f") == (
        "--data-path and --data-args-path each say where tokens come from. Leave all but one out."
    )
    assert problem(train_data_path=("a",), test_data_path=("b",), mock_data=True) == (
        "--mock-data and --train-data-path --test-data-path each say where tokens come from. Leave all but one out."
    )
    assert problem(train_data_path=("a",), split="1,0,0") == (
        "--split 1,0,0 cuts one blend in three, --train-data-path names one for each part. Leave --split out."
    )
    assert problem(valid_data_path=("a",)) == (
        "--train-data-path is missing, the data to train on. Give it too, or --data-path and --split."
    )
    assert problem(train_data_path=("0", "a")).startswith("--train-data-path weight 0 of a is not a positive number.")


def test_what_cannot_be_read_is_named_as_it_was_given(abc: list[str], tmp_path: Path) -> None:
    def lines(**data: object) -> list[str]:
        found = path_problems(config(tokenizer_type="NullTokenizer", vocab_size=64, **data))
        return [line.replace(f"{tmp_path}/", "") for line in found]

    (missing,) = lines(train_data_path=(abc[0],), valid_data_path=(str(tmp_path / "none"),))
    assert missing.startswith("--valid-data-path none: no file")
    assert lines(data_args_path=str(tmp_path / "none")) == [
        "--data-args-path none cannot be read: No such file or directory"
    ]
    (tmp_path / "parts.json").write_text("{")
    (no_json,) = lines(per_split_data_args_path=str(tmp_path / "parts.json"))
    assert no_json.startswith("--per-split-data-args-path parts.json is no JSON: ")
    for odd in ({"train": [["a"]]}, {"train": [None]}, {"train": 3}, {"train": {"a": 1}}, ["a"]):
        (tmp_path / "parts.json").write_text(json.dumps(odd))
        (line,) = lines(per_split_data_args_path=str(tmp_path / "parts.json"))
        assert line.startswith('--per-split-data-args-path parts.json: expected {"train": [')
    with pytest.raises(DataError, match=r"--train-data-path .*/none: no file"):
        build_datasets(config(train_data_path=(str(tmp_path / "none"),)), TOKENIZER)
