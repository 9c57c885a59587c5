"""What no run could take is refused before anything is written: numbers, shapes, quantised weights."""

from __future__ import annotations

import json

import pytest
from random_models import refused, saved
from safetensors.torch import load_file, save_file
from tiny import LLAMA

from megapipe.checkpoint.saved_config import saved_config
from megapipe.config import Config
from megapipe.convert import import_checkpoint
from megapipe.convert.huggingface.families import from_huggingface
from megapipe.convert.megatron.args import args_of, config_of

_LLAMA3 = {"rope_type": "llama3", "rope_theta": 1e4, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
_LLAMA3 |= {"original_max_position_embeddings": 8192}
_YARN = {"rope_type": "yarn", "rope_theta": 1e4, "original_max_position_embeddings": 4096}


@pytest.fixture(scope="module")
def hub(tmp_path_factory):
    """Folders of small models, made once: family -> folder."""
    made = {}

    def of(family):
        if family not in made:
            made[family] = tmp_path_factory.mktemp(family)
            saved(family, 0, made[family])
        return made[family]

    return of


def changed(hub, family, change, folder):
    """A copy of the model with other words in its config.json."""
    content = json.loads((hub(family) / "config.json").read_text()) | change
    (folder / "hf").mkdir()
    (folder / "hf" / "config.json").write_text(json.dumps(content))
    (folder / "hf" / "model.safetensors").symlink_to(hub(family) / "model.safetensors")
    return folder / "hf"


@pytest.mark.parametrize(
    "family, change, said",
    [
        ("llama", {"attention_dropout": 1.0}, "--attention-dropout 1"),
        ("llama", {"attention_dropout": -1}, "--attention-dropout -1"),
        ("llama", {"attention_dropout": 2}, "--attention-dropout 2"),
        ("llama", {"rms_norm_eps": 0}, "--norm-epsilon 0"),
        ("llama", {"rms_norm_eps": -1e-6}, "--norm-epsilon -1e-06"),
        ("llama", {"rope_parameters": {"rope_type": "default", "rope_theta": 0}}, "--rotary-base 0"),
        ("llama", {"rope_parameters": {"rope_type": "default", "rope_theta": -1e4}}, "--rotary-base -10000"),
        ("llama", {"rope_parameters": _LLAMA3 | {"factor": 0}}, "--rope-scaling-factor 0"),
        ("llama", {"rope_parameters": _LLAMA3 | {"factor": -8}}, "--rope-scaling-factor -8"),
        ("deepseek_v3", {"routed_scaling_factor": -1}, "--moe-router-topk-scaling-factor -1"),
        ("deepseek_v3", {"routed_scaling_factor": 0}, "--moe-router-topk-scaling-factor 0"),
        ("deepseek_v3", {"rope_parameters": _YARN | {"factor": 0}}, "--rotary-scaling-factor 0"),
        ("gpt2", {"layer_norm_epsilon": -1}, "--norm-epsilon -1"),
        ("gpt2", {"resid_pdrop": 1.5, "embd_pdrop": 1.5}, "--hidden-dropout 1.5"),
        ("qwen3_moe", {"num_experts_per_tok": 9}, "--moe-router-topk 9 is more than --num-experts 6"),
        ("deepseek_v3", {"n_group": 3, "topk_group": 2}, "--moe-router-num-groups 3"),
        ("deepseek_v3", {"n_group": 4, "topk_group": 5}, "topk_group 5 is more than n_group 4"),
        ("deepseek_v3", {"first_k_dense_replace": "1"}, 'first_k_dense_replace is an integer, got "1"'),
        ("deepseek_v3", {"n_shared_experts": "1"}, 'n_shared_experts is an integer, got "1"'),
        ("deepseek_v3", {"rope_parameters": _YARN | {"factor": 8, "mscale": "1"}}, "mscale is a finite number"),
        ("mixtral", {"num_experts_per_tok": 1}, "--moe-router-topk 1 with weights that add up to 1"),
        ("llama", {"rope_parameters": {"full_attention": {"rope_theta": 1e6}}}, "rope_parameters.full_attention"),
        ("llama", {"quantization_config": {"quant_method": "gptq"}}, "quantization_config is given"),
    ],
)
def test_a_model_that_no_run_takes_is_refused_by_name_before_anything_is_written(hub, family, change, said, tmp_path):
    folder = changed(hub, family, change, tmp_path)
    lines = refused(lambda: import_checkpoint(folder, tmp_path / "ours"))
    assert any(said in line for line in lines), lines
    assert all(line.startswith("config.json") for line in lines)
    assert not (tmp_path / "ours").exists()


@pytest.mark.parametrize("family", ["gpt2", "llama", "qwen2_moe", "deepseek_v3"])
def test_what_is_written_can_be_read_again(hub, family, tmp_path):
    done = import_checkpoint(hub(family), tmp_path / "ours")
    assert saved_config(done.folder).model == done.config.model


@pytest.mark.parametrize(
    "family, key",
    [
        ("qwen3", "model.layers.1.self_attn.k_proj.weight"),
        ("gpt2", "transformer.h.0.attn.c_attn.weight"),
        ("mixtral", "model.layers.0.block_sparse_moe.experts.3.w1.weight"),
        ("mixtral", "model.layers.1.block_sparse_moe.experts.0.w2.weight"),
        ("qwen2_moe", "model.layers.1.mlp.shared_expert.gate_proj.weight"),
        ("qwen2_moe", "model.layers.1.mlp.gate.weight"),
        ("deepseek_v3", "model.layers.1.self_attn.kv_b_proj.weight"),
    ],
)
def test_a_tensor_that_is_turned_is_named_with_both_shapes(hub, family, key, tmp_path):
    """Parts are joined by views, so [32, 16] for [16, 32] went in without a word."""
    tensors = load_file(hub(family) / "model.safetensors")
    rows, columns = tensors[key].shape
    assert rows != columns
    tensors[key] = tensors[key].t().contiguous()
    folder = changed(hub, family, {}, tmp_path)
    (folder / "model.safetensors").unlink()
    save_file(tensors, folder / "model.safetensors")
    assert refused(lambda: import_checkpoint(folder, tmp_path / "ours")) == (
        f"{key} is [{columns}, {rows}], but config.json means [{rows}, {columns}]",
    )
    assert not (tmp_path / "ours").exists()


def test_all_matrices_of_a_layers_experts_turned_are_all_named(hub, tmp_path):
    tensors = load_file(hub("mixtral") / "model.safetensors")
    turned = [key for key in tensors if key.startswith("model.layers.0.") and key.endswith(("w1.weight", "w3.weight"))]
    tensors |= {key: tensors[key].t().contiguous() for key in turned}
    folder = changed(hub, "mixtral", {}, tmp_path)
    (folder / "model.safetensors").unlink()
    save_file(tensors, folder / "model.safetensors")
    lines = refused(lambda: import_checkpoint(folder, tmp_path / "ours"))
    assert sorted(line.partition(" ")[0] for line in lines) == sorted(turned)


def test_a_bias_of_two_dimensions_is_named(hub, tmp_path):
    tensors = load_file(hub("qwen2") / "model.safetensors")
    key = "model.layers.0.self_attn.q_proj.bias"
    (width,) = tensors[key].shape
    tensors[key] = tensors[key][:, None].clone()
    folder = changed(hub, "qwen2", {}, tmp_path)
    (folder / "model.safetensors").unlink()
    save_file(tensors, folder / "model.safetensors")
    assert refused(lambda: import_checkpoint(folder, tmp_path / "ours")) == (
        f"{key} is [{width}, 1], but config.json means [{width}]",
    )


def test_numbers_of_megatrons_arguments_outside_our_ranges_are_named():
    """They were written, and the checkpoint could not be read: `is not the state of a run`."""
    args = args_of(Config(model=LLAMA)) | {"attention_dropout": 1.0, "layernorm_epsilon": 0.0}
    lines = refused(lambda: config_of(args, "it"))
    assert [line.split(" must ")[0] for line in lines] == [
        "it: its arguments, as flags: --norm-epsilon 0",
        "it: its arguments, as flags: --attention-dropout 1",
    ]


def test_an_export_beside_a_quantised_config_json_is_refused(hub):
    content = json.loads((hub("llama") / "config.json").read_text()) | {"quantization_config": {"bits": 4}}
    (line,) = refused(lambda: from_huggingface(content))
    assert line.startswith("config.json: quantization_config is given")
