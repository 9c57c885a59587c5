"""A run goes on from a checkpoint bit for bit, or says why it cannot."""

import json
import os
import pickle
import struct
from dataclasses import replace

import pytest
import torch
from torch import nn
from toy_run import CONFIG, SINGLE, Run, Toy, problems
from whole_step import take_step

from megapipe.checkpoint import commit
from megapipe.checkpoint.save_load import check_save, find_checkpoint, load_checkpoint, save_checkpoint
from megapipe.config import CheckpointConfig, Config, ModelConfig
from megapipe.distributed.meeting.together import together
from megapipe.errors import CheckpointError
from megapipe.optim.optimizer import Optimizer
from megapipe.pipeline_parallel.threads import run_threads


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_ten_steps_are_five_saved_loaded_and_five(tmp_path, dtype):
    def model():
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.LayerNorm(8), nn.Linear(8, 4)).to(dtype)

    def steps(net, optimizer, first, last):
        for step in range(first, last + 1):
            optimizer.zero_grad()
            x = torch.randn(3, 4, generator=torch.Generator().manual_seed(step)).to(dtype)
            net(x).float().square().mean().backward()
            take_step(optimizer, 1e-2)

    whole, half, resumed = model(), model(), model()
    config = Config().with_fields(micro_batch_size=1, train_iters=10, lr=1e-2)
    optimizers = [Optimizer([net], config.optimizer, SINGLE) for net in (whole, half, resumed)]
    steps(whole, optimizers[0], 1, 10)
    steps(half, optimizers[1], 1, 5)
    state = {"consumed_train_samples": 5, "consumed_valid_samples": 0}
    folder = save_checkpoint(tmp_path, 5, [half], optimizers[1], state, config, SINGLE)
    load_checkpoint(folder, [resumed], optimizers[2], config, SINGLE)
    steps(resumed, optimizers[2], 6, 10)
    assert all(torch.equal(a, b) for a, b in zip(whole.parameters(), resumed.parameters(), strict=True))
    for kind, tensors in optimizers[0].state().items():
        assert all(torch.equal(t, optimizers[2].state()[kind][name]) for name, t in tensors.items())


def test_the_state_comes_back(tmp_path):
    loaded = Run(SINGLE).load(Run(SINGLE).save(tmp_path, 3))
    assert (loaded.iteration, loaded.consumed_train_samples, loaded.consumed_valid_samples) == (3, 24, 3)
    assert (loaded.state["note"], loaded.schedule) == ("kept", None)


def test_finetune_takes_the_weights_and_nothing_else(tmp_path):
    saved = Run(SINGLE, torch.bfloat16).train(1, 2)
    run = Run(SINGLE, torch.bfloat16)
    loaded = run.load(saved.save(tmp_path, 2), finetune=True)
    assert (loaded.iteration, loaded.consumed_train_samples, run.optimizer.steps) == (0, 0, 0)
    ours, theirs = run.optimizer.buffers[0], saved.optimizer.buffers[0]
    assert torch.equal(ours.model, theirs.model)
    assert torch.equal(ours.main, theirs.model.float())
    assert not run.optimizer.moments["exp_avg"][0].any()


def test_no_load_optim_keeps_the_counters(tmp_path):
    run = Run(SINGLE)
    loaded = run.load(Run(SINGLE).train(1, 2).save(tmp_path, 2), no_load_optim=True)
    assert (loaded.iteration, loaded.consumed_train_samples, run.optimizer.steps) == (2, 16, 0)
    assert not run.optimizer.moments["exp_avg"][0].any()


def test_weights_load_without_an_optimizer(tmp_path):
    saved = Run(SINGLE).train(1, 2)
    toy = Toy(SINGLE)
    load_checkpoint(saved.save(tmp_path, 2), [toy], None, CONFIG, SINGLE)
    for name, param in toy.named_parameters():
        assert torch.equal(param, saved.stages[0]._parameters[name])


def test_a_checkpoint_without_optimizer_state_says_so(tmp_path):
    config = replace(CONFIG, checkpoint=CheckpointConfig(no_save_optim=True))
    folder = Run(SINGLE, config=config).save(tmp_path, 1)
    assert problems(lambda: Run(SINGLE).load(folder)) == (
        f"{folder} holds no optimizer state (--no-save-optim); add --no-load-optim",
    )
    assert Run(SINGLE).load(folder, no_load_optim=True).iteration == 1


def test_another_model_is_refused_by_its_flags(tmp_path):
    folder = Run(SINGLE).save(tmp_path, 1)
    other = ModelConfig(num_layers=12, hidden_size=6, num_attention_heads=2, swiglu=True, hidden_dropout=0.0)
    run = Run(SINGLE, config=replace(CONFIG, model=other))
    assert problems(lambda: run.load(folder)) == (
        "--swiglu is True, but iter_0000001 has False",
        "--num-layers is 12, but iter_0000001 has 11",
        "--ffn-hidden-size is 0, but iter_0000001 has 24",
    )


def test_a_default_written_out_is_no_difference(tmp_path):
    folder = Run(SINGLE).save(tmp_path, 1)
    same = replace(CONFIG.model, ffn_hidden_size=24, kv_channels=3, group_query_attention=True, num_query_groups=2)
    assert Run(SINGLE, config=replace(CONFIG, model=same)).load(folder).iteration == 1


def test_missing_and_unexpected_parameters_are_few_words(tmp_path):
    folder = Run(SINGLE, layers=10).save(tmp_path, 1)
    (lacks,) = problems(lambda: Run(SINGLE).load(folder))
    assert lacks == (
        "iter_0000001 lacks parameters that this model has: layers.10.fc.weight, layers.10.proj.weight, "
        "layers.10.fc.bias and 6 more"
    )
    (more,) = problems(lambda: Run(SINGLE, layers=9).load(folder, no_load_optim=True))
    assert more.startswith("iter_0000001 has parameters that this model lacks: layers.9.")
    assert len(more) < 200


def test_shapes_and_types_are_not_converted(tmp_path):
    folder = Run(SINGLE).save(tmp_path, 1)
    run = Run(SINGLE, torch.bfloat16)
    before = run.optimizer.buffers[0].main.clone()
    (text,) = problems(lambda: run.load(folder, finetune=True))
    assert text.startswith(
        "iter_0000001 has other shapes or types (--bf16?) than this model: "
        "embedding.weight is [24, 6] float32, not [24, 6] bfloat16, "
    )
    assert torch.equal(run.optimizer.buffers[0].main, before)


def other_settings(**fields):
    return CONFIG.with_fields(**{"lr": 2e-2, "weight_decay": 0.5, **fields})


def test_other_learning_rate_settings_stop_the_run(tmp_path):
    folder = Run(SINGLE).save(tmp_path, 1)
    (text,) = problems(lambda: Run(SINGLE, config=other_settings()).load(folder))
    assert text == (
        "iter_0000001 was trained with other settings (checkpoint / here, lengths in samples): lr 0.01 / 0.02, "
        "weight_decay 0.01 / 0.5. Add --override-opt_param-scheduler to go on with the command line's, or "
        "--use-checkpoint-opt_param-scheduler with the checkpoint's"
    )


def test_the_command_lines_settings_or_the_checkpoints(tmp_path):
    folder = Run(SINGLE).save(tmp_path, 1)
    ours = Run(SINGLE, config=other_settings(override_opt_param_scheduler=True))
    assert (ours.load(folder).schedule, ours.optimizer.flags.weight_decay) == (None, 0.5)
    theirs = Run(SINGLE, config=other_settings(use_checkpoint_opt_param_scheduler=True))
    loaded = theirs.load(folder)
    assert (loaded.schedule.lr, loaded.schedule.weight_decay.end) == (1e-2, 0.01)
    again = theirs.save(tmp_path, 2, schedule=loaded.schedule)
    assert Run(SINGLE).load(again).iteration == 2


def test_load_chooses_and_refuses(tmp_path, capsys):
    def find(**settings):
        return find_checkpoint(CheckpointConfig(load=str(tmp_path), **settings), SINGLE)

    assert find_checkpoint(CheckpointConfig(), SINGLE) is None
    assert capsys.readouterr().out == ""
    assert find() is None
    assert capsys.readouterr().out == f"--load {tmp_path} holds no checkpoint; starting from random weights\n"
    assert problems(lambda: find(exit_on_missing_checkpoint=True)) == (
        f"--load {tmp_path} holds no checkpoint, and --exit-on-missing-checkpoint is given",
    )
    run = Run(SINGLE)
    assert find_checkpoint(CheckpointConfig(load=str(tmp_path / "nowhere")), SINGLE) is None
    older, newer = run.save(tmp_path, 5), run.save(tmp_path, 10)
    assert (find(), find(ckpt_step=5)) == (newer, older)
    assert problems(lambda: find(ckpt_step=7)) == (
        f"--ckpt-step 7: {tmp_path} has no such checkpoint. Choose one with --ckpt-step: 5, 10",
    )
    config = CheckpointConfig(load=str(older))
    assert problems(lambda: find_checkpoint(config)) == (
        f"{older} is one checkpoint; give the folder above it and choose with --ckpt-step: "
        f"--load {tmp_path} --ckpt-step 5",
    )


def test_a_save_folder_of_another_run_is_refused_at_the_start(tmp_path):
    check_save(tmp_path / "new", 0, SINGLE)
    assert (tmp_path / "new").is_dir()
    Run(SINGLE).save(tmp_path, 5)
    check_save(tmp_path, 5, SINGLE)
    assert problems(lambda: check_save(tmp_path, 0, SINGLE))[0].startswith(f"--save {tmp_path} has checkpoints of")
    (tmp_path / "file").write_text("")
    assert problems(lambda: check_save(tmp_path / "file", 0, SINGLE)) == (f"{tmp_path / 'file'}: File exists",)


# No pickle.


class Payload:
    def __init__(self, marker):
        self.marker = marker

    def __reduce__(self):
        return (os.mkdir, (self.marker,))


def test_a_checkpoint_is_json_and_safetensors(tmp_path):
    folder = Run(SINGLE).save(tmp_path, 1)
    for path in folder.iterdir():
        data = path.read_bytes()
        if path.suffix == ".safetensors":
            (size,) = struct.unpack("<Q", data[:8])
            data = data[8 : 8 + size]
        json.loads(data)


def test_a_pickle_is_never_run(tmp_path):
    marker = tmp_path / "marker"
    payload = pickle.dumps(Payload(str(marker)))
    folder = Run(SINGLE).save(tmp_path / "save", 1)
    shard = next(folder.glob("*.safetensors"))
    (folder / ".metadata").write_bytes(payload)
    assert Run(SINGLE).load(folder).iteration == 1
    for path in (shard, folder / "state.json"):  # by someone who can also write the manifest
        good = path.read_bytes()
        path.write_bytes(payload)
        names = [shard.name, "state.json"]
        text = {"format": 1, "iteration": 1, "files": commit.digest(folder, names)}
        (folder / "manifest.json").write_text(json.dumps(text, indent=1, sort_keys=True) + "\n")
        assert str(folder) in problems(lambda: Run(SINGLE).load(folder))[0]
        path.write_bytes(good)
    assert not marker.exists()
    os.mkdir(marker)  # the payload would have worked


def test_an_error_of_our_own_on_one_rank_does_not_leave_the_others_to_their_timeout():
    """`together` knew three classes of errors; any other left the rest of the ranks waiting."""

    def body(mesh):
        def work():
            if mesh.world.rank == 1:
                raise ZeroDivisionError("by zero")

        try:
            together(mesh, work)
        except (CheckpointError, ZeroDivisionError) as error:
            return type(error).__name__, str(error)

    text = "on rank 1: ZeroDivisionError: by zero"
    assert run_threads(body, dp=3) == [
        ("CheckpointError", text),
        ("ZeroDivisionError", "by zero"),
        ("CheckpointError", text),
    ]


def test_a_state_that_names_two_iterations_is_none(tmp_path):
    folder = Run(SINGLE).save(tmp_path, 3)
    state = json.loads((folder / "state.json").read_text())
    state["state"]["iteration"] = 4
    (folder / "state.json").write_text(json.dumps(state))
    files = commit.digest(folder, [path.name for path in folder.iterdir() if path.name != "manifest.json"])
    (folder / "manifest.json").write_text(commit._manifest_text(3, files))
    assert problems(lambda: Run(SINGLE).load(folder)) == (f"{folder / 'state.json'} is not the state of a run",)
