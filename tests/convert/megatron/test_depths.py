"""Depths of multi-token prediction in Megatron-LM's checkpoints, laid out here by hand as its own code writes them."""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from random_models import refused
from torch import Tensor
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.state_dict_loader import load

from megapipe.config import Config, ModelConfig
from megapipe.convert import SavedTensors, Sizes, export_megatron, export_ranks, import_megatron
from megapipe.convert.checkpoints import write_checkpoint
from megapipe.convert.megatron.args import args_of
from megapipe.convert.tensors import is_trained, our_layouts

MODEL = ModelConfig(
    num_layers=2,
    hidden_size=8,
    num_attention_heads=4,
    ffn_hidden_size=6,
    max_position_embeddings=8,
    padded_vocab_size=16,
    position_embedding_type="rope",
    normalization="RMSNorm",
    swiglu=True,
    disable_bias_linear=True,
    untie_embeddings_and_output_weights=True,
    mtp_num_layers=2,
    mtp_loss_scaling_factor=0.3,
)
SPARSE = replace(MODEL, num_experts=2, moe_layer_freq="[0, 1]", multi_latent_attention=True, q_lora_rank=6)
RUN = Config().with_fields(micro_batch_size=1, global_batch_size=2, seq_length=8, train_iters=9, lr=0.1)
WORDS = "embedding.word_embeddings.weight"
LAST_STAGE = (
    "embedding.word_embeddings decoder.layers.0.input_layernorm decoder.layers.0.self_attention.linear_proj "
    "decoder.layers.0.self_attention.linear_qkv decoder.layers.0.pre_mlp_layernorm decoder.layers.0.mlp.linear_fc1 "
    "decoder.layers.0.mlp.linear_fc2 decoder.final_layernorm mtp.layers.0.enorm mtp.layers.0.hnorm "
    "mtp.layers.0.eh_proj mtp.layers.0.mtp_model_layer.input_layernorm "
    "mtp.layers.0.mtp_model_layer.self_attention.linear_proj mtp.layers.0.mtp_model_layer.self_attention.linear_qkv "
    "mtp.layers.0.mtp_model_layer.pre_mlp_layernorm mtp.layers.0.mtp_model_layer.mlp.linear_fc1 "
    "mtp.layers.0.mtp_model_layer.mlp.linear_fc2 mtp.layers.0.final_layernorm mtp.layers.1.enorm mtp.layers.1.hnorm "
    "mtp.layers.1.eh_proj mtp.layers.1.mtp_model_layer.input_layernorm "
    "mtp.layers.1.mtp_model_layer.self_attention.linear_proj mtp.layers.1.mtp_model_layer.self_attention.linear_qkv "
    "mtp.layers.1.mtp_model_layer.pre_mlp_layernorm mtp.layers.1.mtp_model_layer.mlp.linear_fc1 "
    "mtp.layers.1.mtp_model_layer.mlp.linear_fc2 mtp.layers.1.final_layernorm output_layer"
)
"""What Megatron-LM's own file of the last of two stages has, in its order."""
KINDS = ("exp_avg", "exp_avg_sq")


def whole(model: ModelConfig) -> dict[str, Tensor]:
    """A run's tensors under our keys."""
    torch.manual_seed(1)
    found = {}
    for name, layout in our_layouts(model).items():
        if layout.tied_to is None:
            found[name] = torch.randn(layout.full)
            found |= {f"optimizer.{kind}.{name}": torch.randn(layout.full) for kind in KINDS if is_trained(name)}
    return found


def written(root: Path, model: ModelConfig) -> Path:
    state = {"iteration": 5, "consumed_train_samples": 10}
    return write_checkpoint(root, replace(RUN, model=model), whole(model).items(), state, 4)


def same_as(folder: Path, want: dict[str, Tensor]) -> bool:
    saved = SavedTensors(folder)
    return saved.shapes.keys() == want.keys() and all(torch.equal(saved.read(key), want[key]) for key in want)


def cut(name: str, x: Tensor, t: int) -> Tensor:
    """The part of tensor-parallel rank t of 2: [gate_r; up_r], rows, columns."""
    if "linear_fc1" in name:
        return torch.cat([x[0].chunk(2)[t], x[1].chunk(2)[t]])
    if any(word in name for word in ("word_embeddings", "output_layer", "linear_qkv", "eh_proj")):
        return x.chunk(2)[t].clone()
    return x.chunk(2, dim=1)[t].clone() if "linear" in name else x


def megatrons(root: Path, fused: bool = False, copy: float = 0.0) -> Path:
    """Format `torch`, tp 2 x pp 2, both depths on the last stage with the embedding once more (copy: how much greater);
    fused: under Transformer Engine's names."""
    tensors = whole(MODEL)
    last = [f"{module}.weight" for module in LAST_STAGE.split()]
    first = [WORDS, *(name for name in last if name.startswith("decoder.layers.0."))]
    for t, p in ((t, p) for t in range(2) for p in range(2)):
        model, state = {}, []
        for name in last if p else first:
            ours = name.replace("decoder.layers.0", f"decoder.layers.{p}")
            its = name
            if fused:
                its = its.replace("input_layernorm.", "self_attention.linear_qkv.layer_norm_")
                its = its.replace("pre_mlp_layernorm.", "mlp.linear_fc1.layer_norm_")
            model[its] = cut(name, tensors[ours], t) + copy * (name == WORDS and p == 1)
            state.append({kind: cut(name, tensors[f"optimizer.{kind}.{ours}"], t) for kind in KINDS})
        wide = [[n for n, x in enumerate(model.values()) if (x.ndim > 1) == matrix] for matrix in (True, False)]
        numbers = {n: number for number, n in enumerate(wide[0] + wide[1])}
        groups = [
            {"wd_mult": wd, "step": 4, "params": [numbers[n] for n in its]}
            for wd, its in zip((1.0, 0.0), wide, strict=True)
        ]
        optimizer = {"state": {numbers[n]: held for n, held in enumerate(state)}, "param_groups": groups}
        args = argparse.Namespace(**args_of(replace(RUN, model=MODEL)), consumed_train_samples=10)
        folder = root / "iter_0000005" / f"mp_rank_{t:02d}_{p:03d}"
        folder.mkdir(parents=True)
        content = {"args": args, "iteration": 5, "model": model, "optimizer": optimizer}
        torch.save(content, folder / "model_optim_rng.pt")
    return root


@pytest.mark.parametrize("fused", [False, True])
def test_depths_of_the_last_stage_and_their_state_come_in_to_the_bit(tmp_path, fused):
    done = import_megatron(megatrons(tmp_path / "theirs", fused), tmp_path / "ours")
    assert same_as(done.folder, whole(MODEL))
    assert (done.config.model.depths, done.config.model.mtp_loss_scaling_factor, done.steps) == (2, 0.3, 4)
    assert not any("copy" in note for note in done.notes)


def test_a_later_stages_embedding_that_is_another_is_left_with_a_note(tmp_path):
    done = import_megatron(megatrons(tmp_path / "theirs", copy=1.0), tmp_path / "ours")
    assert same_as(done.folder, whole(MODEL))
    assert f"{WORDS} is the first stage's; a later one has other numbers in its copy" in done.notes


def test_a_file_of_the_last_stage_has_megatrons_names_in_its_order(tmp_path):
    """By hand: both depths behind the last norm, with the embedding before all and its state beside the others'."""
    folder = written(tmp_path / "ours", MODEL)
    theirs = export_ranks(folder, tmp_path / "theirs", Sizes(2, 2, local=True)).folder
    content = torch.load(theirs / "mp_rank_01_001" / "model_optim_rng.pt", weights_only=False)
    named = [name for name in content["model"] if not name.endswith("_extra_state")]
    assert named == [f"{module}.weight" for module in LAST_STAGE.split()]
    assert "mtp.layers.0.eh_proj._extra_state" in content["model"]
    want = whole(MODEL)
    for name in (WORDS, "mtp.layers.1.eh_proj.weight"):
        assert torch.equal(content["model"][name], cut(name, want[name], 1))
    assert torch.equal(content["optimizer"]["state"][0]["exp_avg"], want[f"optimizer.exp_avg.{WORDS}"][8:])
    assert (content["args"].mtp_num_layers, content["args"].mtp_loss_scaling_factor) == (2, 0.3)
    assert same_as(import_megatron(tmp_path / "theirs", tmp_path / "again").folder, want)


@pytest.mark.parametrize(
    "model, sizes",
    [
        (MODEL, None),
        (SPARSE, None),
        (SPARSE, Sizes(1, 2, 2)),
        (replace(MODEL, untie_embeddings_and_output_weights=False), Sizes(1, 2)),
    ],
)
def test_what_goes_out_comes_in_again_to_the_bit(tmp_path, model, sizes):
    folder = written(tmp_path / "ours", model)
    if sizes is None:
        export_megatron(folder, tmp_path / "theirs")
    else:
        export_ranks(folder, tmp_path / "theirs", sizes)
    again = import_megatron(tmp_path / "theirs", tmp_path / "again")
    assert same_as(again.folder, whole(model))
    assert (again.config.model.depths, again.config.model.mtp_loss_scaling_factor, again.steps) == (2, 0.3, 4)


def test_torch_reads_depths_under_the_keys_that_megatron_asks_for(tmp_path):
    """Layers of the model are stacked under one key; a depth is not, and its layer is `transformer_layer` there."""
    theirs = export_megatron(written(tmp_path / "ours", MODEL), tmp_path / "theirs").folder
    want, here, there = whole(MODEL), "mtp.layers.1.mtp_model_layer.", "mtp.layers.1.transformer_layer."
    asked = {
        "mtp.layers.0.hnorm.weight": want["mtp.layers.0.hnorm.weight"],
        f"{there}mlp.linear_fc1.weight": want[f"{here}mlp.linear_fc1.weight"].flatten(0, 1),
        f"{there}self_attention.linear_qkv.layer_norm_weight": want[f"{here}input_layernorm.weight"],
        f"optimizer.state.exp_avg.{there}mlp.linear_fc1.layer_norm_weight": want[
            f"optimizer.exp_avg.{here}pre_mlp_layernorm.weight"
        ],
    }
    empty = {key: torch.empty_like(x) for key, x in asked.items()}
    load(empty, storage_reader=FileSystemReader(theirs), no_dist=True)
    assert all(torch.equal(empty[key], x) for key, x in asked.items())
    states = FileSystemReader(theirs).read_metadata().state_dict_metadata
    assert {key.split(".")[0] for key in states if "_extra_state" in key} == {"decoder", "mtp"}
    assert {"mtp.layers.1.eh_proj._extra_state/shard_0_1", f"{there}mlp.linear_fc2._extra_state/shard_0_1"} <= {*states}


def test_a_norm_has_the_names_of_both_kinds_of_layers_where_attention_is_latent(tmp_path):
    """Before a dense MLP there was Transformer Engine's alone, and Megatron-LM's own layers did not find theirs."""
    theirs = export_megatron(written(tmp_path / "ours", SPARSE), tmp_path / "theirs").folder
    keys = FileSystemReader(theirs).read_metadata().state_dict_metadata.keys()
    assert {"decoder.layers.0.pre_mlp_layernorm.weight", "decoder.layers.0.mlp.linear_fc1.layer_norm_weight"} <= keys


def test_latents_over_ranks_of_megatrons_own_layers_are_refused(tmp_path):
    folder = written(tmp_path / "ours", SPARSE)
    (said,) = refused(lambda: export_ranks(folder, tmp_path / "theirs", Sizes(2, local=True)))
    flags = "--target-tensor-parallel-size 2 does not go with --transformer-impl local"
    assert said.startswith(f"{flags} here: each of its ranks has a part of the latents. ")


def test_depths_beside_learned_positions_are_not_exported(tmp_path):
    folder = written(tmp_path / "ours", replace(MODEL, position_embedding_type="learned_absolute"))
    (said,) = refused(lambda: export_megatron(folder, tmp_path / "theirs"))
    flags = "--mtp-num-layers 2 with --position-embedding-type learned_absolute"
    assert said == f"iter_0000005: {flags} has no equivalent in Megatron-LM, which refuses it"
