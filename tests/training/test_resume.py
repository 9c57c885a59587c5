"""Every setting has a row that says what becomes of it when it is not the checkpoint's."""

from __future__ import annotations

import json
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from short_run import config
from tiny import STYLES

from megapipe.config import CheckpointConfig, DataConfig
from megapipe.data.indexed import IndexedWriter
from megapipe.training.resume import RULES, changed_settings, unnamed
from megapipe.training.same import contents

BASE = config(STYLES["gpt2"])
SAVED = json.loads(json.dumps(asdict(BASE)))
RESERVED = {"must match", "curve", "contents", "when named", "free"}


def test_every_field_has_a_row_and_every_row_a_field():
    for section, rules in RULES.items():
        assert rules.keys() == {field.name for field in fields(getattr(BASE, section))}, section
        assert set(rules.values()) <= RESERVED
    assert {field.name for field in fields(BASE)} - RULES.keys() == {
        "parallel",  # any layout and schedule goes on from any other's
        "checkpoint",
        "log",
        "check",
        "world_size",
        "holding",
    }


def other(value: Any) -> Any:
    if isinstance(value, bool):
        return not value
    return "another" if isinstance(value, str | None) else [*value, 1] if isinstance(value, list) else value + 1


@pytest.mark.parametrize("section", RULES)
def test_a_setting_that_may_change_when_named_is_refused_without_its_name(section):
    for name in (n for n, rule in RULES[section].items() if rule == "when named"):
        saved = SAVED | {section: SAVED[section] | {name: other(SAVED[section][name])}}
        changed = changed_settings(saved, None, BASE, None)
        assert list(changed) == [name]
        (text,) = unnamed(changed, BASE, "iter_0000001")
        assert text.endswith(f" add --override-on-load {name}")
        assert unnamed(changed, replace(BASE, checkpoint=CheckpointConfig(override_on_load=(name,))), "") == []


def test_a_free_setting_changes_without_a_word():
    for section, rules in RULES.items():
        free = {name: other(SAVED[section][name]) for name, rule in rules.items() if rule == "free"}
        assert changed_settings(SAVED | {section: SAVED[section] | free}, {}, BASE, {}) == {}


def test_a_name_that_is_none_is_refused():
    wrong = replace(BASE, checkpoint=CheckpointConfig(override_on_load=("lr", "seed")))
    (text,) = unnamed({}, wrong, "")
    assert text.startswith("--override-on-load lr: no setting that may be overridden so. There are adam_beta1 ")


def test_data_and_tokenizer_count_by_their_contents_wherever_they_lie(tmp_path: Path):
    def written(folder: str, lengths: list[int], tokenizer: str):
        with IndexedWriter(tmp_path / folder / "d", np.uint16) as writer:
            for length in lengths:
                writer.add_document([1] * length)
        (tmp_path / folder / "t").write_text(tokenizer)
        data = DataConfig(data_path=(str(tmp_path / folder / "d"),), tokenizer_model=str(tmp_path / folder / "t"))
        return replace(BASE, data=data)

    first, moved, longer = written("a", [5, 7], "x"), written("b", [5, 7], "x"), written("c", [7, 5], "y")
    saved = json.loads(json.dumps(asdict(first)))
    assert changed_settings(saved, contents(first), moved, contents(moved)) == {}
    assert list(changed_settings(saved, contents(first), longer, contents(longer))) == ["data_path", "tokenizer_model"]
