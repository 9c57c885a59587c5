"""What --save-retain-interval and --save-keep-last remove, and that the newest sound checkpoint is never among it."""

from __future__ import annotations

import os
from dataclasses import replace

import pytest
from killed_saves import CONFIG, Toy, load_newest

from megapipe.config import CheckpointConfig
from megapipe.distributed.mesh import ProcessMesh
from megapipe.training import commit
from megapipe.training.checkpoint import save_checkpoint
from megapipe.training.retention import retain, surplus


@pytest.mark.parametrize(
    "every, last, kept",
    [
        (None, None, [10, 20, 30, 40, 50, 60, 65]),
        (30, None, [30, 60, 65]),  # as in Megatron-LM
        (None, 1, [65]),
        (None, 3, [50, 60, 65]),
        (None, 9, [10, 20, 30, 40, 50, 60, 65]),
        (40, 2, [40, 60, 65]),
    ],
)
def test_multiples_of_the_interval_and_the_newest_are_kept(every, last, kept):
    there = [10, 20, 30, 40, 50, 60, 65]
    assert [n for n in there if n not in surplus(there, every, last)] == kept


def save(root, iteration, **flags):
    toy, config = Toy(iteration), replace(CONFIG, checkpoint=CheckpointConfig(**flags))
    state = {"consumed_train_samples": iteration, "consumed_valid_samples": 0}
    save_checkpoint(root, iteration, [toy.stage], toy.optimizer, state, config, ProcessMesh.single())


def test_each_save_removes_what_has_become_surplus_and_leaves_nothing_behind(tmp_path):
    for iteration in range(1, 7):
        save(tmp_path, iteration, save_retain_interval=3, save_keep_last=2)
    assert commit.iterations_in(tmp_path) == [3, 5, 6]
    assert len(os.listdir(tmp_path)) == 4  # and the pointer
    assert load_newest(tmp_path) == 6


def test_nothing_is_removed_while_the_newest_lacks_a_file(tmp_path):
    for iteration in (1, 2):
        save(tmp_path, iteration)
    newest = tmp_path / "iter_0000002"
    next(newest.glob("*.safetensors")).unlink()
    assert retain(newest, None, 1) == []
    assert commit.iterations_in(tmp_path) == [1, 2]


def test_what_is_newer_or_set_aside_stays(tmp_path):
    for iteration in (1, 2, 3):
        save(tmp_path, iteration)
    (tmp_path / commit.POINTER).write_text("1\n")
    save(tmp_path, 2, save_keep_last=1)
    assert commit.iterations_in(tmp_path) == [2, 3]
    assert len(list(tmp_path.glob("iter_0000002.old-*"))) == 1


def test_a_checkpoint_that_cannot_be_removed_stops_nothing(tmp_path, monkeypatch):
    save(tmp_path, 1)
    rename = os.rename

    def refuse(source, target):
        if "iter_0000001" in str(source):
            raise PermissionError(13, "Permission denied", str(source))
        rename(source, target)

    monkeypatch.setattr(os, "rename", refuse)
    save(tmp_path, 2, save_keep_last=1)
    assert commit.iterations_in(tmp_path) == [1, 2]
