"""Keys that a config.json leaves out mean what the family's class in transformers means by it, or are refused."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest
import torch
from drawn_families import DRAWN
from random_models import FAMILIES, ours, refused, save, theirs, transformers

from megapipe.convert import import_checkpoint
from megapipe.convert.huggingface.families import from_huggingface
from megapipe.errors import CheckpointError

_GROUPS = {"topk_method": "group_limited_greedy", "n_group": 4, "topk_group": 2}
# Other values than any class has, so that a key that is left out shows.
_DRAWN = {
    "gpt2": {"layer_norm_epsilon": 1e-6, "attn_pdrop": 0.2, "resid_pdrop": 0.3, "embd_pdrop": 0.3, "n_inner": 24}
    | {"activation_function": "gelu", "tie_word_embeddings": False},
    "llama": {"head_dim": 6, "attention_bias": True, "mlp_bias": True},
    "mistral": {"head_dim": 6, "sliding_window": 4},
    "mixtral": {"head_dim": 6, "sliding_window": 4, "router_jitter_noise": 0.1},
    "qwen2": {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 0},
    "qwen3": {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 0, "head_dim": 6},
    "qwen2_moe": {"norm_topk_prob": True, "decoder_sparse_step": 2, "mlp_only_layers": [3]},
    "qwen3_moe": {"norm_topk_prob": True, "decoder_sparse_step": 2, "mlp_only_layers": [3], "head_dim": 6}
    | {"use_sliding_window": True, "sliding_window": 4},
    "deepseek_v2": _GROUPS | {"q_lora_rank": 12, "routed_scaling_factor": 1.5, "n_shared_experts": 3},
    "deepseek_v3": _GROUPS | {"q_lora_rank": 12, "routed_scaling_factor": 1.5, "n_shared_experts": 3},
}


def complete(family: str) -> dict:
    """A config.json of a small model with every key of its class, none at the class's value that decides anything."""
    said = FAMILIES[family](random.Random(7)).to_dict()
    said |= {"num_attention_heads": 4, "num_hidden_layers": 4, "hidden_size": 32} if family != "gpt2" else {}
    latent = family.startswith("deepseek")
    said |= {"num_key_value_heads": 4 if latent else 2} if family != "gpt2" else {}
    said |= {"rms_norm_eps": 1e-6 if latent else 1e-4, "attention_dropout": 0.25} if family != "gpt2" else {}
    said |= {"rope_parameters": None, "rope_theta": 5e4, "tie_word_embeddings": True} if family != "gpt2" else {}
    said.pop("layer_types", None)
    if family == "deepseek_v3":
        said.pop("topk_method", None)
        return said | {key: value for key, value in _DRAWN[family].items() if key != "topk_method"}
    return said | _DRAWN[family]


def saying(family: str) -> dict:
    """A config.json of a small model as the library writes it."""
    return DRAWN[family](random.Random(7)).to_dict()


@pytest.mark.parametrize(
    ("family", "content_of"), [*((name, complete) for name in FAMILIES), *((name, saying) for name in DRAWN)]
)
def test_a_key_that_is_left_out_means_what_the_class_of_transformers_means(family, content_of):
    """deepseek_v3 without routed_scaling_factor came in with 1.0, and transformers has 2.5: logits 3.27 off of 4.5."""
    content = content_of(family)
    cls = type(transformers.AutoConfig.for_model(family))
    assert from_huggingface(content).num_layers == content.get("num_hidden_layers", content.get("n_layer"))
    others = {}
    for key in content.keys() - {"model_type"}:
        rest = {name: value for name, value in content.items() if name != key}
        try:
            mine = from_huggingface(rest)
        except CheckpointError:
            continue
        try:
            its = from_huggingface(cls(**rest).to_dict())
        except Exception as error:  # what transformers refuses is no model
            its = error
        if mine != its:
            others[key] = (mine, its)
    assert others == {}


@pytest.mark.parametrize("family", ["qwen2", "qwen3"])
def test_qwens_window_without_a_number_of_layers_begins_after_28(family):
    content = {key: value for key, value in complete(family).items() if key != "max_window_layers"}
    assert from_huggingface(content | {"num_hidden_layers": 28}).window_size is None
    model = from_huggingface(content | {"num_hidden_layers": 30})
    assert model.window_size is None
    assert model.per_layer_overrides == '{"28-29": {"window_size": "3,0"}}'


@pytest.mark.parametrize(
    "family, key",
    [
        ("deepseek_v3", "routed_scaling_factor"),
        ("deepseek_v3", "n_group"),
        ("mixtral", "rope_parameters"),
        ("mixtral", "rms_norm_eps"),
        ("mistral", "num_key_value_heads"),
    ],
)
def test_logits_without_a_key_are_those_of_transformers(tmp_path, family, key):
    draw = FAMILIES[family](random.Random(1)).to_dict()
    path = tmp_path / "hf" / "config.json"
    sizes = {"hidden_size": 64, "num_attention_heads": 8, "num_hidden_layers": 2, "first_k_dense_replace": 1}
    sizes |= {"num_key_value_heads": 8, "n_routed_experts": 16, "num_experts_per_tok": 4, "head_dim": 8}
    sizes |= {"n_group": 8, "topk_group": 4, "rope_parameters": {"rope_type": "default", "rope_theta": 1e6}}
    if family == "deepseek_v3":
        sizes |= {"head_dim": 4}
    content = draw | {name: value for name, value in sizes.items() if name in draw}
    content.pop(key)
    save(type(transformers.AutoConfig.for_model(family))(**content), tmp_path / "hf")
    path.write_text(json.dumps(content))
    compare(tmp_path)


def compare(folder: Path) -> None:
    """Require the logits of folder/hf in transformers of what it is turned into."""
    done = import_checkpoint(folder / "hf", folder / "ours")
    torch.testing.assert_close(ours(done.folder, done.config.model), theirs(folder / "hf"), atol=2e-5, rtol=1e-5)


def test_a_weight_of_one_expert_that_is_divided_by_itself_is_refused():
    """transformers divides by the sum of one weight: logits were 1.87 off of 4.3."""
    content = complete("deepseek_v3") | {"num_experts_per_tok": 1, "n_group": 1, "topk_group": 1}
    (line,) = refused(lambda: from_huggingface(content))
    assert line.startswith("config.json: num_experts_per_tok is 1 and norm_topk_prob true")


@pytest.mark.parametrize("family", ["deepseek_v2", "deepseek_v3"])
def test_deepseek_routes_in_float32(family):
    """Of bfloat16 logits 20 of 512 tokens went to other experts than in transformers."""
    assert from_huggingface(complete(family)).moe_router_dtype == "fp32"


def test_more_groups_are_not_chosen_than_there_are():
    content = complete("deepseek_v3") | {"n_group": 1, "topk_group": 3}
    assert refused(lambda: from_huggingface(content)) == ("config.json: topk_group 3 is more than n_group 1",)


def test_positions_are_stretched_from_the_length_of_the_model_where_none_is_said():
    """Llama 3.1's scaling without original_max_position_embeddings was taken to be from 8192."""
    rope = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    content = complete("llama") | {"rope_parameters": rope}
    assert refused(lambda: from_huggingface(content | {"max_position_embeddings": 131072})) == (
        "config.json: original_max_position_embeddings is 131072; only 8192 can be converted",
    )
    assert from_huggingface(content | {"max_position_embeddings": 8192}).use_rope_scaling


def test_rope_scaling_goes_before_rope_parameters():
    content = complete("llama") | {"rope_scaling": {"rope_type": "default", "rope_theta": 7e4}}
    content |= {"rope_parameters": {"rope_type": "default", "rope_theta": 3e4}}
    config = transformers.LlamaConfig(**content)
    assert from_huggingface(content).rotary_base == config.rope_parameters["rope_theta"]


def test_a_mixtral_of_one_expert_says_what_transformers_says(tmp_path):
    config = FAMILIES["mixtral"](random.Random(1)).to_dict() | {"num_local_experts": 1, "num_experts_per_tok": 1}
    save(transformers.MixtralConfig(**config), tmp_path / "hf")
    compare(tmp_path)


def test_a_qwen_whose_layers_are_all_dense_has_no_experts(tmp_path):
    config = FAMILIES["qwen2_moe"](random.Random("qwen2_moe0")).to_dict()
    config |= {"mlp_only_layers": list(range(config["num_hidden_layers"]))}
    save(transformers.Qwen2MoeConfig(**config), tmp_path / "hf")
    compare(tmp_path)
    assert not from_huggingface(config).has_experts
