"""What --save-retain-interval and --save-keep-last remove, and that the newest sound checkpoint is never among it."""

from __future__ import annotations

import os
from dataclasses import replace

import pytest
import short_run
from killed_saves import CONFIG, Toy, load_newest
from tiny import STYLES

from megapipe.checkpoint import commit
from megapipe.checkpoint.retention import retain, surplus
from megapipe.checkpoint.save_load import check_save, save_checkpoint
from megapipe.config import CheckpointConfig, LogConfig
from megapipe.distributed.mesh import ProcessMesh


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


def save(root, iteration):
    toy = Toy(iteration)
    state = {"consumed_train_samples": iteration, "consumed_valid_samples": 0}
    return save_checkpoint(root, iteration, [toy.stage], toy.optimizer, state, CONFIG, ProcessMesh.single())


def run(root, *iterations, every=None, last=None):
    """What each save of a run removes, which has no earlier one."""
    removed = {}
    for n, iteration in enumerate(iterations):
        removed[iteration] = retain(save(root, iteration), (every, last, iterations[:n]))
    return removed


def test_each_save_removes_what_has_become_surplus_and_leaves_nothing_behind(tmp_path):
    removed = run(tmp_path, *range(1, 7), every=3, last=2)
    assert removed == {1: [], 2: [], 3: [1], 4: [2], 5: [], 6: [4]}
    assert commit.iterations_in(tmp_path) == [3, 5, 6]
    assert len(os.listdir(tmp_path)) == 4  # and the pointer
    assert load_newest(tmp_path) == 6


@pytest.mark.parametrize("every, last", [(None, 1), (10, None), (10, 2)])
def test_another_runs_checkpoint_stays_unless_all_may_go(tmp_path, every, last):
    for iteration in (1, 2, 3):
        save(tmp_path, iteration)
    newest = save(tmp_path, 4)
    assert retain(newest, (every, last, ())) == []
    assert retain(newest, (every, last, (2,))) == [2]
    assert retain(newest, (every, last, None)) == ([1, 3] if last != 2 else [1])


LOG = LogConfig(log_interval=100)


def trained(folder, capsys, iterations, load=None, **flags):
    """What a run of the whole program says that saves at each iteration, and goes on from `load` or where it saves."""
    base = short_run.config(STYLES["gpt2"])
    base = base.with_fields(train_iters=5, exit_interval=iterations, lr_decay_iters=5)
    checkpoint = CheckpointConfig(save=str(folder), load=str(load or folder), save_interval=1, **flags)
    training = short_run.run_of(ProcessMesh.single(), replace(base, checkpoint=checkpoint, log=LOG))
    training.train()
    return capsys.readouterr().out


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_run_removes_its_own_and_says_so_and_what_becomes_of_others(tmp_path, capsys, asynchronous):
    said = trained(tmp_path, capsys, 2)
    assert f"saving checkpoint at iteration {1:7d} to {tmp_path} in safetensors format\n" in said  # as it is
    assert "earlier runs" not in said
    assert "removed" not in said
    said = trained(tmp_path, capsys, 4, save_keep_last=1, async_save=asynchronous)
    assert (
        f"--save {tmp_path} has 1 checkpoint(s) of earlier runs, iterations 1: they stay. "
        "To let --save-keep-last 1 remove them too add --save-remove-earlier\n"
    ) in said
    line = "  removed checkpoint of iteration {:7d} from {} (--save-keep-last 1)\n"
    assert [said.count(line.format(n, tmp_path)) for n in range(1, 5)] == [0, 1, 1, 0]  # 2 is what it went on from
    assert commit.iterations_in(tmp_path) == [1, 4]
    said = trained(tmp_path, capsys, 5, save_keep_last=1, save_remove_earlier=True, async_save=asynchronous)
    assert "iterations 1: all that --save-keep-last 1 does not keep will be removed (--save-remove-earlier)\n" in said
    assert [said.count(line.format(n, tmp_path)) for n in range(1, 6)] == [1, 0, 0, 1, 0]
    assert commit.iterations_in(tmp_path) == [5]


def test_a_checkpoint_of_the_iteration_that_a_run_goes_on_from_is_not_its_own_in_another_folder(tmp_path, capsys):
    """--save had an iteration 2 of somebody else's run, and --load is elsewhere."""
    trained(tmp_path / "a", capsys, 2)
    trained(tmp_path / "b", capsys, 2)
    said = trained(tmp_path / "b", capsys, 4, load=tmp_path / "a", save_keep_last=1)
    assert f"--save {tmp_path}/b has 2 checkpoint(s) of earlier runs, iterations 1, 2: they stay." in said
    assert commit.iterations_in(tmp_path / "b") == [1, 2, 4]


def test_what_an_interrupted_save_has_left_is_named_when_it_is_removed(tmp_path, capsys):
    (tmp_path / "iter_0000007.tmp-1").mkdir(parents=True)
    check_save(tmp_path, 0, ProcessMesh.single())
    assert capsys.readouterr().out == f"removed from {tmp_path} what interrupted saves had left: iter_0000007.tmp-1\n"


def test_nothing_is_removed_while_the_newest_lacks_a_file(tmp_path):
    for iteration in (1, 2):
        save(tmp_path, iteration)
    newest = tmp_path / "iter_0000002"
    next(newest.glob("*.safetensors")).unlink()
    assert retain(newest, (None, 1, None)) == []
    assert commit.iterations_in(tmp_path) == [1, 2]


def test_what_is_newer_or_set_aside_stays(tmp_path):
    for iteration in (1, 2, 3):
        save(tmp_path, iteration)
    (tmp_path / commit.POINTER).write_text("1\n")
    assert retain(save(tmp_path, 2), (None, 1, None)) == [1]
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
    assert retain(save(tmp_path, 2), (None, 1, None)) == []
    assert commit.iterations_in(tmp_path) == [1, 2]
