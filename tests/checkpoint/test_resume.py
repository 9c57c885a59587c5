"""Every setting has a row that says what becomes of it when it is not the checkpoint's."""

from __future__ import annotations

import itertools
import json
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from short_run import config, run_of
from tiny import STYLES
from token_files import add_document

from megapipe.checkpoint.resume import ORDER, RULES, changed_settings, resume_problems, unnamed
from megapipe.config import SECTION_OF, CheckpointConfig, DataConfig
from megapipe.data.gpt_dataset import GPTDataset, MockTokens, build_indices
from megapipe.data.indexed import IndexedWriter
from megapipe.data.loader import SampleOrder
from megapipe.distributed.mesh import ProcessMesh
from megapipe.training.guards.ranks import TOKENS, contents

BASE = config(STYLES["gpt2"])
SAVED = json.loads(json.dumps(asdict(BASE)))
RESERVED = {"must match", "curve", "contents", "when named", "microbatch", "free"}


def test_every_field_has_a_row_and_every_row_a_field():
    sections = {section for name, section in SECTION_OF.items() if name in RULES}
    assert RULES.keys() == {field.name for section in sections for field in fields(getattr(BASE, section))}
    assert set(RULES.values()) <= RESERVED
    assert {field.name for field in fields(BASE)} - sections == {
        "parallel",  # any layout and schedule goes on from any other's
        "checkpoint",
        "log",
        "check",
        "world_size",
        "noop_flags",
    }


def other(value: Any) -> Any:
    if isinstance(value, bool):
        return not value
    return "another" if isinstance(value, str | None) else [*value, 1] if isinstance(value, list) else value + 1


@pytest.mark.parametrize("section", sorted({SECTION_OF[name] for name in RULES}))
def test_a_setting_that_may_change_when_named_is_refused_without_its_name(section):
    for name in (n for n, rule in RULES.items() if rule == "when named" and SECTION_OF[n] == section):
        saved = SAVED | {section: SAVED[section] | {name: other(SAVED[section][name])}}
        if (of := name.partition("_")[0]) in ("muon", "sgd"):  # decides nothing under another optimizer
            assert changed_settings(saved, None, BASE, None) == {}
            saved["optimizer"]["optimizer"] = of
            run = replace(BASE, optimizer=replace(BASE.optimizer, optimizer=of))
        else:
            run = BASE
        changed = changed_settings(saved, None, run, None)
        assert list(changed) == [name]
        (text,) = unnamed(changed, BASE, "iter_0000001")
        assert text.endswith(f" add --override-on-load {name}")
        assert unnamed(changed, replace(BASE, checkpoint=CheckpointConfig(override_on_load=(name,))), "") == []


def test_a_free_setting_changes_without_a_word():
    for section in {SECTION_OF[name] for name in RULES}:
        free = {name: other(value) for name, value in SAVED[section].items() if RULES[name] == "free"}
        assert changed_settings(SAVED | {section: SAVED[section] | free}, {}, BASE, {}) == {}
        if section == "model":
            assert resume_problems(SAVED["model"] | free, None, BASE, "iter_0000001") == []


def test_a_name_that_is_none_is_refused():
    wrong = replace(BASE, checkpoint=CheckpointConfig(override_on_load=("lr", "seed")))
    (text,) = unnamed({}, wrong, "")
    assert text.startswith("--override-on-load lr: no setting that may be overridden so. There are adam_beta1 ")


NO_DROPOUT = replace(BASE.model, attention_dropout=0.0, hidden_dropout=0.0)
DATA, BATCH = BASE.data, BASE.batch


@pytest.mark.parametrize(
    "here, why",
    [
        ({"model": replace(NO_DROPOUT, attention_dropout=0.1)}, "draws other dropout"),
        ({"model": replace(NO_DROPOUT, hidden_dropout=0.1)}, "draws other dropout"),
        ({"data": replace(DATA, eod_mask_loss=True)}, "weighs tokens otherwise under --eod-mask-loss"),
        ({"data": replace(DATA, dataloader_type="cyclic")}, "reads other samples under --dataloader-type cyclic"),
        ({}, None),
        ({"data": replace(DATA, eod_mask_loss=True), "batch": replace(BATCH, calculate_per_token_loss=True)}, None),
        ({"data": replace(DATA, reset_position_ids=True, reset_attention_mask=True)}, None),
    ],
)
def test_another_micro_batch_is_refused_where_it_decides_numbers(here, why):
    config = replace(BASE, **{"model": NO_DROPOUT} | here)
    saved = json.loads(json.dumps(asdict(config)))
    saved["batch"]["micro_batch_size"] = 4
    changed = changed_settings(saved, None, config, None)
    assert changed == ({"micro_batch_size": f"--micro-batch-size is 2, and was 4, which {why}"} if why else {})
    if why:
        (text,) = unnamed(changed, config, "iter_0000001")
        assert text.endswith(" add --override-on-load micro_batch_size")
        may = replace(config, checkpoint=CheckpointConfig(override_on_load=("micro-batch-size",)))
        assert unnamed(changed, may, "") == []


@pytest.mark.parametrize("kind, refused", [("cyclic", True), ("single", False)])
def test_cyclic_order_belongs_to_its_replicas(kind, refused):
    """As Megatron-LM's sampler does: under 2 and 4 replicas the same 8 consumed samples are others."""
    read = {dp: {i for r in range(dp) for i in SampleOrder(64, 2, r, dp, kind).microbatch(0)} for dp in (2, 4)}
    assert (read[2] <= read[4]) != refused
    config = replace(BASE, data=replace(DATA, dataloader_type=kind), world_size=4)
    saved = json.loads(json.dumps(asdict(replace(config, world_size=2))))
    text = "--dataloader-type cyclic reads other samples on 4 data-parallel ranks than on 2, as then"
    assert changed_settings(saved, None, config, None) == ({"dataloader_type": text} if refused else {})


def reading(num_samples):
    """Data of 40 documents of which so many samples are read."""
    source = MockTokens(32, 31)
    documents = np.arange(40)
    return GPTDataset(source, build_indices(source.lengths, documents, 64, num_samples, 1), 64, 32, documents)


def test_a_length_by_which_data_is_read_more_often_is_refused_as_the_rest_would_be_other_samples():
    """The shuffles follow the number of epochs: another --train-iters dealt other samples without a word."""
    epoch = len(reading(1))
    order = {n: contents(BASE, reading(n))[ORDER] for n in (epoch // 3, epoch // 2, 2 * epoch, 5 * epoch)}
    first = {n: [reading(n)[i].tolist() for i in range(20)] for n in order}
    for a, b in itertools.combinations(order, 2):
        assert (order[a] == order[b]) == (first[a] == first[b])
    assert order[epoch // 3] == order[epoch // 2] != order[2 * epoch] != order[5 * epoch]

    longer = replace(BASE, batch=replace(BATCH, train_iters=2 * BATCH.train_iters))
    changed = changed_settings(SAVED, {ORDER: order[epoch // 2]}, longer, {ORDER: order[2 * epoch]})
    assert [*changed] == ["train_iters"]
    assert changed["train_iters"].startswith("--train-iters is 40, and was 20: data that is read more than once is")
    (text,) = unnamed(changed, longer, "iter_0000001")
    assert text.endswith(" add --override-on-load train_iters")
    may = replace(longer, checkpoint=CheckpointConfig(override_on_load=("train-iters",)))
    assert unnamed(changed, may, "") == []
    assert changed_settings(SAVED, {}, longer, {ORDER: order[2 * epoch]}) == {}, "an older checkpoint says nothing"


def test_a_refusal_follows_what_the_numbers_do():
    """The oracle of the rule: the first steps, in microbatches of 1 and of 2."""

    def norms(**changes):
        made = []
        for micro in (1, 2):
            base = replace(BASE, **changes)
            training = run_of(ProcessMesh.single(), replace(base, batch=replace(base.batch, micro_batch_size=micro)))
            made.append(training.driver.whole().grad_norm)
        return made

    one, two = norms(model=NO_DROPOUT)
    assert one == pytest.approx(two, rel=1e-5)
    masked = replace(DATA, eod_mask_loss=True, null_tokenizer_eod_id=5)
    per_token = replace(BATCH, calculate_per_token_loss=True)
    for changes in ({"model": BASE.model}, {"model": NO_DROPOUT, "data": masked}):
        one, two = norms(**changes)
        assert abs(one - two) > 1e-4 * one, changes
    one, two = norms(model=NO_DROPOUT, data=masked, batch=per_token)
    assert one == pytest.approx(two, rel=1e-5)


def test_data_and_tokenizer_count_by_their_contents_wherever_they_lie(tmp_path: Path):
    def written(folder: str, lengths: list[int], tokenizer: str, token: int = 1):
        with IndexedWriter(tmp_path / folder / "d", np.uint16) as writer:
            for length in lengths:
                add_document(writer, [token] * length)
        (tmp_path / folder / "t").write_text(tokenizer)
        data = DataConfig(data_path=(str(tmp_path / folder / "d"),), tokenizer_model=str(tmp_path / folder / "t"))
        return replace(BASE, data=data)

    first, moved, longer = written("a", [5, 7], "x"), written("b", [5, 7], "x"), written("c", [7, 5], "y")
    saved = json.loads(json.dumps(asdict(first)))
    assert changed_settings(saved, contents(first), moved, contents(moved)) == {}
    assert list(changed_settings(saved, contents(first), longer, contents(longer))) == ["data_path", "tokenizer_model"]
    replaced = written("d", [5, 7], "x", token=2)
    text = "--data-path has other tokens than the run trained with, in files of the same sizes"
    assert changed_settings(saved, contents(first), replaced, contents(replaced)) == {"data_path": text}
    of_the_first_version = {name: value for name, value in contents(first).items() if name != TOKENS}
    assert changed_settings(saved, of_the_first_version, first, contents(first)) == {}
