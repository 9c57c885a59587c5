"""Our checkpoints in Megatron-LM's layouts, read by torch under the names that Megatron asks for."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.state_dict_loader import load

from megapipe.convert import export_megatron, import_megatron
from megapipe.convert.checkpoints import write_checkpoint
from megapipe.convert.megatron.args import args_of
from megapipe.convert.megatron.export import open_export
from tests.convert.megatron.by_hand import MODEL, ours, read_all, run, whole


@pytest.mark.parametrize("bf16", [False, True])
def test_what_goes_out_as_torch_dist_comes_in_again_to_the_bit(tmp_path, bf16):
    folder = ours(tmp_path / "ours", bf16)
    export_megatron(folder, tmp_path / "theirs")
    again = import_megatron(tmp_path / "theirs", tmp_path / "again").folder
    got, want = read_all(again), read_all(folder)
    assert got.keys() == want.keys()
    assert all(torch.equal(got[key], want[key]) for key in want)


def test_torch_reads_what_goes_out_under_the_keys_that_megatron_asks_for(tmp_path):
    theirs = export_megatron(ours(tmp_path / "ours", False), tmp_path / "theirs").folder
    want = whole(False)
    fc1 = torch.stack([want[f"decoder.layers.{n}.mlp.linear_fc1.weight"].flatten(0, 1) for n in range(3)])
    norm = torch.stack([want[f"optimizer.exp_avg.decoder.layers.{n}.input_layernorm.bias"] for n in range(3)])
    asked = {
        "decoder.layers.mlp.linear_fc1.weight": torch.empty(3, 12, 8),
        "optimizer.state.param.decoder.layers.mlp.linear_fc1.weight": torch.empty(3, 12, 8),
        "optimizer.state.exp_avg.decoder.layers.self_attention.linear_qkv.layer_norm_bias": torch.empty(3, 8),
    }
    load(asked, storage_reader=FileSystemReader(theirs), no_dist=True)
    for got, value in zip(asked.values(), (fc1, fc1, norm), strict=True):
        assert torch.equal(got, value)


@pytest.mark.parametrize("bf16, fused", [(False, None), (False, True), (True, None), (True, False)])
def test_steps_are_by_parameter_for_torchs_adam_and_in_the_groups_for_the_fused_ones(tmp_path, bf16, fused):
    theirs = export_megatron(ours(tmp_path / "ours", bf16), tmp_path / "theirs", fused=fused)
    held = torch.load(theirs.folder / "common.pt", weights_only=False)["optimizer"]
    assert (held["state"] == {}) == (bf16 if fused is None else fused)
    assert all(group["step"] == 4 for group in held["param_groups"])
    assert theirs.notes[0].startswith("the state of t" if held["state"] else "the state of T")


def test_what_megatron_asks_for_beside_weights_has_its_keys(tmp_path):
    """Each module of its layers has an extra state; the optimizer's state stands below its own name too."""
    theirs = export_megatron(ours(tmp_path / "ours", False), tmp_path / "theirs").folder
    keys = FileSystemReader(theirs).read_metadata().state_dict_metadata.keys()
    attention = ("core_attention", "linear_proj", "linear_qkv", "q_layernorm", "k_layernorm")
    modules = [*(f"self_attention.{name}" for name in attention), "mlp.linear_fc1", "mlp.linear_fc2"]
    asked = {f"decoder.layers.{name}._extra_state/shard_{n}_3" for name in modules for n in range(3)}
    assert {key for key in keys if "decoder.layers" in key and "_extra_state" in key} == asked
    optimizer = torch.load(theirs / "common.pt", weights_only=False)["optimizer"]
    assert optimizer["optimizer"] == {name: optimizer[name] for name in ("state", "param_groups")}


@pytest.mark.parametrize("erf", [False, True])
def test_megatron_is_told_which_form_of_gelu_runs(erf):
    """Its fused bias and GELU compute the tanh form."""
    config = replace(run(False), model=replace(MODEL, swiglu=False, no_bias_gelu_fusion=erf))
    assert args_of(config)["bias_gelu_fusion"] == (not erf)


def test_groups_and_curve_of_the_optimizer_go_out_in_megatrons_words(tmp_path):
    """Weights of matrices decay, biases and norms do not; the decay goes from its start to its end."""
    decay = {"start_weight_decay": 0.02, "end_weight_decay": 0.06, "weight_decay_incr_style": "linear"}
    config = run(False).with_fields(**decay)
    state = {"iteration": 5, "consumed_train_samples": 10, "skipped_samples": 2}
    folder = write_checkpoint(tmp_path / "ours", config, whole(False).items(), state, 4)
    export = open_export(folder, tmp_path / "theirs", optimizer=True, fused=False)
    assert [(group["wd_mult"], group["weight_decay"]) for group in export.groups()] == [(1.0, 0.06), (0.0, 0.0)]
    curve = export.scheduler()
    assert (curve["start_wd"], curve["end_wd"], curve["num_steps"]) == (0.02, 0.06, 8)
