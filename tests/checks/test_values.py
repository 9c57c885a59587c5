"""Values and pairs of flags that ended in a trace, an hour later or in nothing: each is one sentence at the start."""

from __future__ import annotations

import signal
from dataclasses import replace
from pathlib import Path
from typing import get_args

import pytest

from megapipe.checks.run import flag_problems, validate
from megapipe.config import Config
from megapipe.config.notes import Range, note_of
from megapipe.errors import ConfigError
from megapipe.flags.parse import flags_of, parse

from .sound import SOUND, problems


def test_the_largest_seed_is_good():
    validate(parse(Config, f"{SOUND} --seed {2**32 - 1}".split()), has_cuda=False)


def test_no_number_with_a_rule_may_be_infinite_or_nan():
    floats = [flag for flag in flags_of(Config).values() if flag.kind is float and has_range(flag)]
    assert len(floats) > 20
    for value in ("inf", "nan"):
        found = problems(" ".join(f"{flag.name} {value}" for flag in floats))
        for flag in floats:
            assert any(line.startswith(f"{flag.name} {value} must be ") for line in found), (flag.name, found)


def test_a_save_that_is_a_file_is_named_by_its_flag(tmp_path: Path):
    (tmp_path / "file").touch()
    assert problems(f"--save {tmp_path}/file --save-interval 5") == [
        f"--save {tmp_path}/file is a file, not a folder. Give another name."
    ]


def test_a_window_of_more_digits_than_python_reads_is_refused():
    (told,) = problems(f"--window-size {'9' * 5000},0")
    assert told.endswith(
        ": two numbers LEFT,RIGHT, and a causal model has RIGHT 0. Use --window-size 127,0 for a window of 128 tokens."
    )


def test_help_where_a_text_belongs_is_no_call_for_help(capsys):
    with pytest.raises(ConfigError) as caught:
        parse(Config, ["--save", "--help"])
    assert "--save needs a value: a text; one that begins with a dash is written --save=-..." in caught.value.problems
    assert parse(Config, ["--save=--help"]).checkpoint.save == "--help"
    with pytest.raises(SystemExit):
        parse(Config, ["--num-layers", "2", "--help"])
    assert "--micro-batch-size" in capsys.readouterr().out


def has_range(flag):
    return flag.field in note_of(flag.owner, Range)


def number_flags():
    for flag in flags_of(Config).values():
        kind = get_args(flag.kind)[0] if flag.count == "many" else flag.kind
        if kind in (int, float):
            yield flag


def test_every_number_has_a_rule():
    assert [flag.name for flag in number_flags() if not has_range(flag)] == []


@pytest.mark.parametrize("size", ["100000", "1000000", "1000000000000000000"])
def test_no_number_is_so_large_that_there_is_no_answer(size):
    """Ranks, layers and microbatches are listed, and tables of them made, before anything starts."""

    def late(*_):
        raise TimeoutError(f"{flags}: no answer in 10 s")

    before = signal.signal(signal.SIGALRM, late)
    for flags in [f"{flag.name} {size}" for flag in number_flags()] + [
        f"--world-size {size} --pipeline-model-parallel-size {size}",
        f"--world-size {size} --tensor-model-parallel-size 3",
        f"--num-layers {size} --num-layers-per-virtual-pipeline-stage 1",
    ]:
        signal.alarm(10)
        given = parse(Config, f"{SOUND} {flags}".split())
        flag_problems(replace(given, world_size=given.check.world_size or 1))
        signal.alarm(0)
    signal.signal(signal.SIGALRM, before)
