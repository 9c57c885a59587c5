"""A damaged newest checkpoint costs iterations, not the run."""

from __future__ import annotations

import os

import pytest
from killed_saves import Toy, load_newest

from megapipe.checkpoint import commit
from megapipe.config import CheckpointConfig
from megapipe.distributed.mesh import ProcessMesh
from megapipe.errors import CheckpointError
from megapipe.pipeline_parallel.threads import run_threads
from megapipe.training.fallback import newest_sound


@pytest.fixture
def root(tmp_path):
    for iteration in (1, 2, 3):
        Toy(iteration).save(tmp_path)
    return tmp_path


def flip(path) -> None:
    data = path.read_bytes()
    path.write_bytes(data[:50] + bytes([data[50] ^ 1]) + data[51:])


def found(root, **flags):
    return newest_sound(CheckpointConfig(load=str(root), **flags), ProcessMesh.single())


def test_the_newest_sound_one_is_taken_and_the_damage_and_its_cost_told(root, capsys):
    flip(root / "iter_0000003" / "state.json")
    os.remove(root / "iter_0000002" / "manifest.json")
    assert found(root) == root / "iter_0000001"
    text = capsys.readouterr().out
    assert f"{root}/iter_0000003/state.json is damaged: its SHA-256 differs from manifest.json" in text
    assert f"{root}/iter_0000002 has no manifest.json" in text
    assert f"going on from {root}/iter_0000001: 2 iterations are lost\n" in text
    assert commit.iterations_in(root) == [1, 2, 3]  # a folder that is only read stays as it is


def test_in_the_folder_of_save_the_damaged_are_set_aside_and_the_next_saves_succeed(root):
    flip(root / "iter_0000003" / "state.json")
    assert found(root, save=str(root)) == root / "iter_0000002"
    assert commit.iterations_in(root) == [1, 2]
    assert len(list(root.glob("iter_0000003.damaged-*"))) == 1
    Toy(3).save(root)
    assert load_newest(root) == 3


def test_all_ranks_take_the_same_though_one_alone_sees_the_damage(root):
    for path in (root / "iter_0000003").glob("*.safetensors"):  # read by one of the ranks
        flip(path)
    config = CheckpointConfig(load=str(root), save=str(root))
    assert run_threads(lambda mesh: newest_sound(config, mesh), dp=2) == [root / "iter_0000002"] * 2


def test_an_explicit_choice_is_never_replaced(root):
    flip(root / "iter_0000003" / "state.json")
    with pytest.raises(CheckpointError, match=r"state\.json is damaged"):
        found(root, ckpt_step=3)


def test_nothing_sound_is_an_error_with_all_that_is_wrong_and_never_a_fresh_start(root):
    for folder in root.glob("iter_*"):
        flip(folder / "state.json")
    with pytest.raises(CheckpointError) as caught:
        found(root, save=str(root))
    assert len(caught.value.problems) == 3
    assert commit.iterations_in(root) == [1, 2, 3]


def test_a_checkpoint_of_a_newer_version_is_no_damage(root):
    path = root / "iter_0000003" / commit.MANIFEST
    path.write_text(path.read_text().replace('"format": 1', '"format": 2'))
    with pytest.raises(CheckpointError, match="has format 2, newer than 1; update megapipe"):
        found(root)
