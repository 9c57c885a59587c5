"""Where a run begins and ends in its data: length in samples, evaluation, the lines it prints."""

from __future__ import annotations

import os
import re
import shutil
import threading
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import short_run
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tiny import STYLES
from token_files import add_document

from megapipe.checkpoint.commit import iterations_in
from megapipe.config import CheckpointConfig, Config, LogConfig
from megapipe.data.build import Datasets, build_datasets, samples_wanted
from megapipe.data.gpt_dataset import TokenDataset
from megapipe.data.indexed import IndexedWriter
from megapipe.data.tokenizers.tokenizer import NullTokenizer
from megapipe.distributed.mesh import ProcessMesh
from megapipe.errors import CheckpointError, DataError
from megapipe.flags.parse import parse
from megapipe.models.provider import gpt_provider
from megapipe.pipeline_parallel.threads import run_threads
from megapipe.training.forward_step import forward_step
from megapipe.training.guards.process import triggered
from megapipe.training.hooks import Callback, Hooks
from megapipe.training.pretrain import Training, pretrain


class Reads:
    """The first samples of the mock data, and a list of those that were asked for."""

    def __init__(self, size: int) -> None:
        self.size, self.asked = size, list[int]()
        train = short_run.datasets().train
        assert train is not None
        self.data: TokenDataset = train

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, sample: int):
        self.asked.append(sample)
        return self.data[sample]


def config(*, batch: int = 4, micro: int = 2, data: dict[str, object] | None = None, pp: int = 1, **train) -> Config:
    """A run that prints every line."""
    base = short_run.config(STYLES["gpt2"], pp=pp)
    lengths = {"train_iters": None, "train_samples": None, "lr_warmup_iters": 0} | train
    return replace(
        base.with_fields(global_batch_size=batch, micro_batch_size=micro, **lengths),
        data=replace(base.data, **(data or {})),
        log=LogConfig(log_interval=1),
    )


def run(config: Config, mesh: ProcessMesh | None = None, **parts: Reads | None) -> Training:
    data = Datasets(**{"train": Reads(1000), "valid": None, "test": None} | parts)
    done = Training(config, mesh or ProcessMesh.single(), gpt_provider, forward_step, data, 126, time.monotonic())
    done.train()
    return done


@pytest.mark.parametrize(("batch", "iterations", "samples"), [(8, 7, 36), (2, 15, 40), (4, 10, 40)])
def test_a_run_of_samples_goes_on_to_its_last_sample_in_batches_of_another_size(
    tmp_path, capsys, batch, iterations, samples
):
    """It ended at once with 20 of 40 samples (batch 8), or went on to sample 50 (batch 2): iterations were counted."""
    flags = CheckpointConfig(save=str(tmp_path / "a"), save_interval=100)
    run(replace(config(train_samples=40, exit_interval=5), checkpoint=flags))
    capsys.readouterr()
    train = Reads(1000)
    goes_on = CheckpointConfig(load=str(tmp_path / "a"), override_on_load=("global-batch-size",))
    resumed = replace(config(train_samples=40, batch=batch), checkpoint=goes_on)
    progress = run(resumed, train=train).run.progress
    assert (progress.iteration, progress.consumed_train_samples) == (iterations, samples)
    assert sorted(train.asked) == list(range(20, samples))
    assert f"iteration {iterations:8d}/{iterations:8d} |" in capsys.readouterr().out


def test_training_data_that_would_end_stops_the_run_at_its_start():
    train = Reads(39)
    with pytest.raises(DataError, match=r"^the training data ends at sample 39, but this run reads until sample 40"):
        run(config(train_iters=10), train=train)
    assert train.asked == []
    with pytest.raises(DataError, match="leaves nothing to train on"):
        run(config(train_iters=10), train=None)


EVALUATE = {"eval_interval": 2, "eval_iters": 2}


def test_every_evaluation_goes_on_where_the_last_one_ended_and_all_are_on_the_board(tmp_path):
    """The last one began at sample 0 again, and neither it nor the test set's was on the board."""
    valid, test = Reads(1000), Reads(1000)
    flags = replace(config(train_iters=5, data=EVALUATE), log=LogConfig(tensorboard_dir=str(tmp_path)))
    progress = run(flags, valid=valid, test=test).run.progress
    assert valid.asked == list(range(24))  # at 2, at 4, at the end: 2 batches of 4 each
    assert test.asked == list(range(8))
    assert progress.consumed_valid_samples == 24
    events = EventAccumulator(str(tmp_path))
    events.Reload()
    assert [e.step for e in events.Scalars("lm loss validation")] == [2, 4, 5, 5]
    assert [e.step for e in events.Scalars("lm loss validation vs samples")] == [8, 16, 20, 20]


def test_evaluations_may_begin_later(tmp_path):
    valid = Reads(1000)
    run(config(train_iters=6, data=EVALUATE | {"start_eval_at_iter": 4}), valid=valid)
    assert valid.asked == list(range(24))  # at 4, at 6, at the end
    assert samples_wanted(config(train_iters=6, data=EVALUATE | {"start_eval_at_iter": 4})) == (24, 16, 8)


def test_a_run_that_skips_training_evaluates_what_it_loads(tmp_path, capsys):
    saves = CheckpointConfig(save=str(tmp_path), save_interval=100)
    run(replace(config(train_iters=5, data=EVALUATE), checkpoint=saves), valid=Reads(1000), test=Reads(1000))
    said = capsys.readouterr().out.splitlines()
    train, valid, test = Reads(0), Reads(1000), Reads(1000)
    flags = {"skip_train": True, "eval_iters": 2}
    asked = replace(config(train_iters=9, data=flags), checkpoint=replace(saves, load=str(tmp_path)))
    run(asked, train=train, valid=valid, test=test)
    assert (train.asked, valid.asked, test.asked) == ([], list(range(8)), list(range(8)))
    again = capsys.readouterr().out.splitlines()
    on_test = " validation loss at iteration 5 on test set"
    assert [x for x in again if x.startswith(on_test)] == [x for x in said if x.startswith(on_test)] != []
    assert iterations_in(tmp_path) == [5]
    assert samples_wanted(asked) == (0, 8, 8)


def test_a_file_asks_for_a_checkpoint_and_another_for_the_end(tmp_path, capsys):
    """--trigger-path"""
    flags = CheckpointConfig(save=str(tmp_path / "a"), save_interval=100, trigger_path=str(tmp_path))
    (tmp_path / "save").touch()
    run(replace(config(train_iters=3, lr_decay_iters=9), checkpoint=flags))
    assert iterations_in(tmp_path / "a") == [1, 3]
    assert not (tmp_path / "save").exists()
    (tmp_path / "exit").touch()
    run(replace(config(train_iters=9), checkpoint=replace(flags, load=flags.save)))
    assert iterations_in(tmp_path / "a") == [1, 3, 4]
    assert "[exiting program after finding exit in --trigger-path]" in capsys.readouterr().out


def test_a_file_of_the_trigger_path_that_others_have_removed_is_obeyed_without_a_warning(tmp_path, capsys, monkeypatch):
    """Runs that share the folder see the same file, and the first removes it."""
    flags = replace(config(), checkpoint=CheckpointConfig(trigger_path=str(tmp_path)))
    monkeypatch.setattr(Path, "exists", lambda path: path.name == "exit")
    assert triggered(flags, ProcessMesh.single(), 1) == ["exit"]
    assert capsys.readouterr().out == ""


def test_a_resumed_run_that_evaluates_more_often_reads_validation_from_its_beginning_again(tmp_path):
    """It was a DataError at the first evaluation, hours into the run, about --train-iters."""
    flags = CheckpointConfig(save=str(tmp_path), save_interval=100)
    run(replace(config(train_iters=4, data=EVALUATE), checkpoint=flags), valid=Reads(24))
    valid = Reads(24)
    more = config(train_iters=6, data={"eval_interval": 1, "eval_iters": 4}, override_opt_param_scheduler=True)
    run(replace(more, checkpoint=CheckpointConfig(load=str(tmp_path))), valid=valid)
    assert valid.asked == [i % 24 for i in range(16, 16 + 3 * 16)]  # saved before the evaluation at its end


def test_a_run_that_freezes_its_layers_trains_nothing_and_goes_to_its_end(capsys):
    """Its passes are forwards alone, which no table of a step is compared with."""
    run(config(train_iters=3, freeze_all_layers=True))
    assert re.findall(r"iteration +(\d)/.* grad norm: (\S+) ", capsys.readouterr().out) == [
        ("1", "0.000"),
        ("2", "0.000"),
        ("3", "0.000"),
    ]


class Limits(Callback):
    """Notes how long a message of each step may take."""

    def __init__(self) -> None:
        self.seconds = list[float | None]()

    def before_step(self, run) -> None:
        self.seconds.append(run.mesh.position.limit_s)


def test_a_message_may_take_long_in_the_first_step_alone():
    limits, base = Limits(), config(train_iters=3)
    par = replace(base.parallel, distributed_timeout_minutes=2, distributed_timeout_seconds_after_init=7.0)
    mesh = ProcessMesh.single()
    mesh.set_timeout(120.0)
    short_run.run_of(mesh, replace(base, parallel=par), Hooks(callbacks=(limits,))).train()
    assert limits.seconds == [120.0, 7.0, 7.0]


def test_a_middle_stage_reads_nothing():
    """Every rank read all samples of its share: x tp x pp."""
    read = []

    def body(mesh: ProcessMesh) -> None:
        train, valid = Reads(1000), Reads(1000)
        run(config(train_iters=2, pp=4, data=EVALUATE), mesh, train=train, valid=valid)
        read.append((mesh.pp.rank, len(train.asked), len(valid.asked)))

    run_threads(body, pp=4)
    assert sorted(read) == [(0, 8, 16), (1, 0, 0), (2, 0, 0), (3, 8, 16)]


def test_the_first_regular_line_keeps_the_first_iteration(capsys):
    """Its mean was over 2..4; Megatron's line of the first iteration comes beside the regular ones."""

    def losses(interval: int) -> dict[int, float]:
        run(replace(config(train_iters=8), log=LogConfig(log_interval=interval)))
        return {int(n): float(x) for n, x in re.findall(r"iteration +(\d+)/.*lm loss: (\S+)", capsys.readouterr().out)}

    each, some = losses(1), losses(4)
    assert some.keys() == {1, 4, 8}
    assert some[1] == each[1]
    assert some[4] == pytest.approx(sum(each[n] for n in (1, 2, 3, 4)) / 4, abs=1e-6)
    assert some[8] == pytest.approx(sum(each[n] for n in (5, 6, 7, 8)) / 4, abs=1e-6)


def write_ten(path: Path, document: list[int]) -> None:
    """Write ten documents."""
    with IndexedWriter(path, np.uint16) as writer:
        for _ in range(10):
            add_document(writer, document)


def test_data_sets_that_nothing_is_evaluated_on_are_not_asked_for(tmp_path: Path):
    """Ten documents and the default split were refused for their empty test part, though nothing was evaluated."""
    write_ten(tmp_path / "ten", [1] * 40)
    data = {"mock_data": False, "data_path": (str(tmp_path / "ten"),), "split": None, "eval_iters": 10}
    parts = build_datasets(config(train_iters=5, data=data), NullTokenizer(127))
    assert parts.train is not None
    assert (parts.valid, parts.test) == (None, None)


def test_no_load_optim_begins_the_curve_anew(tmp_path, capsys):
    """As in Megatron-LM: the rate went on at full height on moments that were zero."""
    flags = config(train_iters=6, lr_warmup_iters=3, exit_interval=4)
    run(replace(flags, checkpoint=CheckpointConfig(save=str(tmp_path), save_interval=2)))
    fresh = re.findall(r"learning rate: (\S+)", capsys.readouterr().out)[:2]
    resumed = replace(flags, guards=replace(flags.guards, exit_interval=None))
    run(replace(resumed, checkpoint=CheckpointConfig(load=str(tmp_path), no_load_optim=True)))
    assert re.findall(r"iteration +(\d+)/.*learning rate: (\S+)", capsys.readouterr().out) == [
        ("5", fresh[0]),
        ("6", fresh[1]),
    ]


def test_what_decides_the_numbers_stays_unless_it_is_named(tmp_path, capsys):
    """--seq-length 8 for 16, another seed, other betas, ids, batches and data went on without a word."""
    run(replace(config(train_iters=1), checkpoint=CheckpointConfig(save=str(tmp_path), save_interval=1)))
    assert "WARNING" not in capsys.readouterr().out
    other = config(train_iters=1, seed=7, adam_beta2=0.95, data={"vocab_size": 120})
    with pytest.raises(CheckpointError) as caught:
        run(replace(other, checkpoint=CheckpointConfig(load=str(tmp_path))))
    assert str(caught.value) == (
        "this would not be the training of iter_0000001 any more: --seed is 7, and was 1234; --adam-beta2 is 0.95, and "
        "was 0.999; --vocab-size is 120, and was 127. Give its settings, or to go on with yours add "
        "--override-on-load adam_beta2 seed vocab_size"
    )
    named = CheckpointConfig(load=str(tmp_path), override_on_load=("adam_beta2", "seed", "--vocab-size"))
    run(replace(other, checkpoint=named))
    text = "WARNING: goes on with other settings than iter_0000001: --seed is 7, and was 1234; --adam-beta2 is 0.95, "
    assert text in capsys.readouterr().out


def test_a_failed_start_leaves_no_folder(tmp_path):
    flags = CheckpointConfig(save=str(tmp_path / "new"), save_interval=1)
    with pytest.raises(DataError):
        run(replace(config(train_iters=10), checkpoint=flags), train=Reads(3))
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize("policy", ["stop", "continue"])
def test_a_checkpoint_that_does_not_fit_ends_the_run_or_is_told_and_tried_again(tmp_path, capsys, monkeypatch, policy):
    free = iter([10**12] * 2 + [0, 10**12])  # at the start, and at iterations 1, 2 and 3
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: SimpleNamespace(free=next(free)))
    flags = CheckpointConfig(save=str(tmp_path), save_interval=1, save_failure=policy)
    if policy == "stop":
        with pytest.raises(CheckpointError, match=r"a checkpoint takes .* GiB, and 0 are free"):
            run(replace(config(train_iters=3, lr_decay_iters=9), checkpoint=flags))
    else:
        run(replace(config(train_iters=3, lr_decay_iters=9), checkpoint=flags))
        text = capsys.readouterr().out
        assert "= ALARM: CHECKPOINT NOT SAVED =" in text
        assert (
            "\n  going on from iteration 1's checkpoint alone until the next save (--save-failure continue)\n" in text
        )
    assert iterations_in(tmp_path) == ([1] if policy == "stop" else [1, 3])


def test_threads_and_files_of_a_run_end_with_it(tmp_path):
    """They lived until Python looked for cycles, which it does ever more seldom: three files more with each restart."""
    flags = (
        "--num-layers 1 --hidden-size 8 --num-attention-heads 1 --seq-length 8 --max-position-embeddings 8 "
        f"--data-path {tmp_path}/ten --split 4,3,3 --eval-interval 1 --eval-iters 1 --lr 1e-3 --train-iters 2 "
        "--tokenizer-type NullTokenizer --vocab-size 15 --num-workers 1 --micro-batch-size 1 --global-batch-size 1"
    )
    write_ten(tmp_path / "ten", [1] * 40)
    threads, files = set(threading.enumerate()), set(os.listdir("/proc/self/fd"))
    pretrain(parse(Config, flags.split()), gpt_provider, forward_step)
    for thread in set(threading.enumerate()) - threads:
        thread.join(10)  # it has been told
        assert not thread.is_alive(), thread
    assert set(os.listdir("/proc/self/fd")) <= files  # what other tests have left may end too
