"""Experts in Megatron-LM's checkpoints, laid out here by hand as its own code writes them, and ours in its layout."""

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

from megapipe.config import BatchConfig, Config, ModelConfig, OptimizerConfig
from megapipe.config.model.moe import MoEConfig
from megapipe.convert import SavedTensors, Sizes, export_megatron, export_ranks, import_megatron
from megapipe.convert.checkpoints import write_checkpoint
from megapipe.convert.megatron.args import args_of
from megapipe.convert.tensors import is_trained, whole_model
from megapipe.distributed.layout import layout_of, saved_tensors

MODEL = ModelConfig(
    num_layers=2,
    hidden_size=8,
    num_attention_heads=4,
    ffn_hidden_size=12,
    max_position_embeddings=8,
    padded_vocab_size=16,
    swiglu=True,
    disable_bias_linear=True,
    untie_embeddings_and_output_weights=True,
    num_experts=4,
    moe_layer_freq="[0, 1]",
    moe_ffn_hidden_size=6,
    moe_router_score_function="sigmoid",
    moe_router_enable_expert_bias=True,
    moe_shared_expert_intermediate_size=10,
    moe_shared_expert_gate=True,
    moe_router_load_balancing_type=("seq_aux_loss", "aux_loss"),
    moe_aux_loss_coeff=(1e-3, 1e-2),
)
CONFIG = Config(
    model=MODEL,
    batch=BatchConfig(micro_batch_size=1, global_batch_size=2, seq_length=8, train_iters=9),
    optimizer=OptimizerConfig(lr=0.1),
)
EXPERTS = "decoder.layers.1.mlp.experts."


def whole(config: Config = CONFIG) -> dict[str, Tensor]:
    """A run's tensors under our keys."""
    torch.manual_seed(1)
    dtype, found = torch.bfloat16 if config.precision.bf16 else torch.float32, {}
    for name, param in saved_tensors(whole_model(config.model)):
        main = torch.randn(layout_of(param).full)
        found[name] = main.to(dtype) if is_trained(name) else main
        kinds = ["exp_avg", "exp_avg_sq", *(["master"] if config.precision.bf16 else [])] if is_trained(name) else []
        found |= {f"optimizer.{kind}.{name}": main if kind == "master" else torch.randn_like(main) for kind in kinds}
    return found


def written(root: Path, config: Config = CONFIG) -> Path:
    return write_checkpoint(root, config, whole(config).items(), {"iteration": 5, "consumed_train_samples": 10}, 4)


def read_all(folder: Path) -> dict[str, Tensor]:
    saved = SavedTensors(folder)
    return {key: saved.read(key) for key in saved.shapes}


def of_rank(name: str, x: Tensor, t: int, e: int, etp: int, grouped: bool) -> dict[str, Tensor]:
    """What rank (t, e) of two times two has of a tensor, by Megatron-LM's names: experts 2e and 2e + 1."""
    if name.startswith(EXPERTS):
        kind = name.removeprefix(EXPERTS).removesuffix(".weight")
        names = [f"{kind}.weight{j}" if grouped else f"local_experts.{j}.{kind}.weight" for j in range(2)]
        parts = [cut(f"{kind}.weight", x[2 * e + j], t, etp) for j in range(2)]
        return dict(zip([EXPERTS + its for its in names], parts, strict=True))
    return {name: cut(name, x, t, 2)}


def cut(name: str, x: Tensor, t: int, size: int) -> Tensor:
    """[gate_r; up_r], rows of whole groups, columns."""
    if size == 1:
        return x.flatten(0, 1) if "linear_fc1" in name else x
    if "linear_fc1" in name:
        return torch.cat([x[0].chunk(2)[t], x[1].chunk(2)[t]])
    if any(word in name for word in ("word_embeddings", "output_layer", "linear_qkv")):
        return x.chunk(2)[t].clone()
    return x.chunk(2, dim=1)[t].clone() if name.endswith(("linear_proj.weight", "linear_fc2.weight")) else x


def megatrons(root: Path, etp: int, grouped: bool) -> Path:
    """Format `torch`, tp 2 x ep 2, after 4 steps of two optimizers, of dense parameters and of experts.

    With an expert tensor parallelism of 1 the ranks of experts are those of tensor parallelism: there are two files.
    """
    args = args_of(CONFIG) | {
        "expert_model_parallel_size": 2,
        "expert_tensor_parallel_size": etp,
        "tensor_model_parallel_size": 2,
        "consumed_train_samples": 10,
    }
    tensors = whole()
    for t, e in [(0, 0), (1, 1)] if etp == 1 else [(t, e) for t in range(2) for e in range(2)]:
        model = {
            key: part
            for name, x in tensors.items()
            if not name.startswith("optimizer.")
            for key, part in of_rank(name, x, t, e, etp, grouped).items()
        }
        optimizers = []
        for expert in (False, True):
            names = [key for key in model if is_trained(key) and key.startswith(EXPERTS) == expert]
            ordered = [[n for n in names if (model[n].ndim > 1) == wide] for wide in (True, False)]
            numbers, state, groups = iter(range(len(names))), {}, []
            for wd, its in zip((1.0, 0.0), ordered, strict=True):
                mine = [next(numbers) for _ in its]
                for n, key in zip(mine, its, strict=True):
                    state[n] = {kind: moment(tensors, kind, key, (t, e, etp, grouped)) for kind in KINDS}
                groups += [{"wd_mult": wd, "step": 4, "params": mine, "is_expert_parallel": expert}] if mine else []
            optimizers.append({"state": state, "param_groups": groups})
        folder = root / "iter_0000005" / f"mp_rank_{t:02d}_{e:03d}"
        folder.mkdir(parents=True)
        content = {"args": argparse.Namespace(**args), "iteration": 5, "model": model, "optimizer": optimizers}
        torch.save(content, folder / "model_optim_rng.pt")
    return root


def said(config: Config) -> dict[str, object]:
    """Of the experts."""
    return {name: getattr(config.model, name) for name in MoEConfig.__dataclass_fields__}


KINDS = ("exp_avg", "exp_avg_sq")


def moment(tensors: dict[str, Tensor], kind: str, key: str, rank: tuple[int, int, int, bool]) -> Tensor:
    held = {name.removeprefix(f"optimizer.{kind}."): x for name, x in tensors.items() if f".{kind}." in name}
    return next(parts[key] for name, x in held.items() if key in (parts := of_rank(name, x, *rank)))


@pytest.mark.parametrize("etp, grouped", [(1, False), (2, True)])
def test_experts_of_two_ranks_become_one_tensor_with_the_optimizer_to_the_bit(tmp_path, etp, grouped):
    done = import_megatron(megatrons(tmp_path / "theirs", etp, grouped), tmp_path / "ours")
    want, got = whole(), read_all(done.folder)
    assert got.keys() == want.keys()
    assert all(torch.equal(got[key], want[key]) for key in want)
    assert (said(done.config), done.steps) == (said(CONFIG), 4)


@pytest.mark.parametrize("bf16", [False, True])
@pytest.mark.parametrize("moe_layer_freq", ["1", "[0, 1]"])
def test_what_goes_out_as_torch_dist_comes_in_again_to_the_bit(tmp_path, bf16, moe_layer_freq):
    model = replace(MODEL, moe_layer_freq=moe_layer_freq)
    config = replace(CONFIG, model=model, precision=replace(CONFIG.precision, bf16=bf16))
    folder = written(tmp_path / "ours", config)
    export_megatron(folder, tmp_path / "theirs")
    again = import_megatron(tmp_path / "theirs", tmp_path / "again")
    got, want = read_all(again.folder), read_all(folder)
    assert got.keys() == want.keys()
    assert all(torch.equal(got[key], want[key]) and got[key].dtype == want[key].dtype for key in want)
    assert said(again.config) == said(config)


@pytest.mark.parametrize(
    "sizes, bf16, last",
    [
        (Sizes(1, 1, 1), True, "mp_rank_00"),
        (Sizes(2, 2, 2), False, "mp_rank_01_001_001"),
        (Sizes(2, 1, 4, local=True), True, "mp_rank_01_003"),
    ],
)
def test_what_goes_out_as_a_file_for_each_rank_comes_in_again_to_the_bit(tmp_path, sizes, bf16, last):
    folder = written(tmp_path / "ours", replace(CONFIG, precision=replace(CONFIG.precision, bf16=bf16)))
    theirs = export_ranks(folder, tmp_path / "theirs", sizes).folder
    assert sorted(path.name for path in theirs.iterdir())[-1] == last
    again = import_megatron(tmp_path / "theirs", tmp_path / "again")
    got, want = read_all(again.folder), read_all(folder)
    assert got.keys() == want.keys()
    assert all(torch.equal(got[key], want[key]) and got[key].dtype == want[key].dtype for key in want)
    assert (said(again.config), again.steps) == (said(CONFIG), 4)


def test_a_ranks_file_has_its_slices_under_megatrons_own_names(tmp_path):
    """By hand: rank (1, 1, 1) of 2 x 2 x 2 has layer 1 as its layer 0, and of experts 2 and 3 the second half."""
    theirs = export_ranks(written(tmp_path / "ours"), tmp_path / "theirs", Sizes(2, 2, 2, local=True)).folder
    content = torch.load(theirs / "mp_rank_01_001_001" / "model_optim_rng.pt", weights_only=False)
    want, model, (dense, experts) = whole(), content["model"], content["optimizer"]
    fc1 = cut("linear_fc1.weight", want[f"{EXPERTS}linear_fc1.weight"][2], 1, 2)
    assert torch.equal(model["decoder.layers.0.mlp.experts.local_experts.0.linear_fc1.weight"], fc1)
    assert torch.equal(model["output_layer.weight"], want["output_layer.weight"][8:])
    assert "embedding.word_embeddings.weight" not in model
    assert model["decoder.layers.0.self_attention.linear_proj._extra_state"] is None
    assert [group["is_expert_parallel"] for group in dense["param_groups"] + experts["param_groups"]] == [False] * 2 + [
        True
    ]
    # Experts one by one: fc1 and fc2 of the first, then of the second.
    moment = want[f"optimizer.exp_avg.{EXPERTS}linear_fc2.weight"][2].chunk(2, 1)[1]
    assert torch.equal(experts["state"][1]["exp_avg"], moment)
    assert (experts["state"][1]["step"], content["opt_param_scheduler"]["num_steps"]) == (4, 10)


def test_sizes_that_do_not_divide_the_model_are_named_all_at_once(tmp_path):
    folder = written(tmp_path / "ours")
    assert refused(lambda: export_ranks(folder, tmp_path / "theirs", Sizes(4, 3, 3))) == (
        "--target-tensor-parallel-size 4 does not divide the model's 6 --moe-ffn-hidden-size",
        "--target-tensor-parallel-size 4 does not divide the model's 10 --moe-shared-expert-intermediate-size",
        "--target-pipeline-parallel-size 3 does not divide the model's 2 layers",
        "--target-expert-parallel-size 3 does not divide the model's 4 experts",
    )


def test_torch_reads_what_goes_out_under_the_keys_that_megatron_asks_for(tmp_path):
    """Layers that differ lie under their numbers; the norm before experts under the names of both kinds of layers."""
    theirs = export_megatron(written(tmp_path / "ours"), tmp_path / "theirs").folder
    want = whole()
    norm = want["decoder.layers.1.pre_mlp_layernorm.weight"]
    asked = {
        f"{EXPERTS}experts.linear_fc1.weight": want[f"{EXPERTS}linear_fc1.weight"].flatten(1, 2),
        f"optimizer.state.exp_avg.{EXPERTS}experts.linear_fc2.weight": want[
            f"optimizer.exp_avg.{EXPERTS}linear_fc2.weight"
        ],
        "decoder.layers.1.mlp.router.expert_bias": want["decoder.layers.1.mlp.router.expert_bias"],
        "decoder.layers.1.mlp.shared_experts.gate_weight": want["decoder.layers.1.mlp.shared_experts.gate_weight"],
        "decoder.layers.1.mlp.linear_fc1.layer_norm_weight": norm,
        "decoder.layers.1.pre_mlp_layernorm.weight": norm,
        "decoder.layers.0.mlp.linear_fc1.weight": want["decoder.layers.0.mlp.linear_fc1.weight"].flatten(0, 1),
    }
    empty = {key: torch.empty_like(x) for key, x in asked.items()}
    load(empty, storage_reader=FileSystemReader(theirs), no_dist=True)
    assert all(torch.equal(empty[key], x) for key, x in asked.items())


def test_state_of_experts_on_several_ranks_is_of_an_optimizer_of_their_own(tmp_path):
    """Megatron-LM refused the state of all as one: `Expected 2 entries in state dict, but got 6`."""
    folder = written(tmp_path / "ours")
    theirs = export_megatron(folder, tmp_path / "theirs", ep=2)
    held = torch.load(theirs.folder / "common.pt", weights_only=False)["optimizer"]
    assert {n: [group["is_expert_parallel"] for group in its["param_groups"]] for n, its in held.items()} == {
        0: [False, False],
        1: [True],
    }
    assert "that state is for a run with experts on several ranks; others need --target-expert-parallel-size 1" in (
        theirs.notes
    )
    again = import_megatron(tmp_path / "theirs", tmp_path / "again")
    got, want = read_all(again.folder), read_all(folder)
    assert got.keys() == want.keys()
    assert (again.steps, all(torch.equal(got[key], want[key]) for key in want)) == (4, True)


def test_groups_that_count_otherwise_there_are_not_exported(tmp_path):
    groups = {"moe_router_num_groups": 2, "moe_router_group_topk": 1, "moe_router_group_score_topk": 1}
    folder = written(tmp_path / "ours", replace(CONFIG, model=replace(MODEL, **groups)))
    text = (
        "iter_0000005: --moe-router-group-score-topk 1 has no equivalent in Megatron-LM, whose groups count by "
        "2 // 1 = 2 experts"
    )
    assert refused(lambda: export_megatron(folder, tmp_path / "theirs")) == (text,)


def test_a_missing_rank_of_experts_is_named(tmp_path):
    theirs = megatrons(tmp_path / "theirs", 2, False)
    folder = theirs / "iter_0000005" / "mp_rank_01_001"
    (folder / "model_optim_rng.pt").unlink()
    folder.rmdir()
    text = f"{theirs}/iter_0000005 lacks mp_rank_01_001"
    assert refused(lambda: import_megatron(theirs, tmp_path / "ours")) == (text,)
