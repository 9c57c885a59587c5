"""DeepSeek-V2 and V3 in Hugging Face's words: latent attention, and experts chosen in groups, by a softmax in V2, by a
sigmoid and a bias in V3."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any

from megapipe.config import ModelConfig
from megapipe.convert.huggingface.defaults import rotation
from megapipe.convert.huggingface.values import expected
from megapipe.models.attention.rope import YARN_FAST, YARN_ORIGINAL, YARN_SLOW

Json = Mapping[str, Any]
Reader = Callable[[Json, list[str]], dict[str, Any]]
_V2, _V3 = FAMILIES = "deepseek_v2", "deepseek_v3"
_GROUPED = "group_limited_greedy"
_METHODS = ("greedy", _GROUPED)
_SAID: dict[str, dict[str, Any]] = {
    _V2: {"norm_topk_prob": False, "scoring_func": "softmax"},
    _V3: {"norm_topk_prob": True, "scoring_func": "sigmoid", "topk_method": "noaux_tc", "rope_interleave": True},
}
_GROUP_SCORES = {_V2: 1, _V3: 2}
"""Experts whose scores are a group's."""
_LATENT_EPSILON = 1e-6
NAMES = {
    "self_attention.linear_q_proj": ("self_attn.q_proj",),
    "self_attention.linear_q_down_proj": ("self_attn.q_a_proj",),
    "self_attention.q_layernorm": ("self_attn.q_a_layernorm",),
    "self_attention.linear_q_up_proj": ("self_attn.q_b_proj",),
    "self_attention.linear_kv_down_proj": ("self_attn.kv_a_proj_with_mqa",),
    "self_attention.kv_layernorm": ("self_attn.kv_a_layernorm",),
    "self_attention.linear_kv_up_proj": ("self_attn.kv_b_proj",),
}
"""Names of attention's tensors, beside those of a Llama."""


def deepseek(read: Reader, write: Callable[[str, ModelConfig], dict[str, Any]]) -> dict[str, tuple[Any, Any]]:
    """The families: (reader, writer) of each, by what they share with Llama."""

    def of(family: str) -> tuple[Any, Any]:
        return (
            lambda content, problems: _read(family, content, problems, read),
            lambda model: _write(family, model, write) if model.multi_latent_attention and model.has_experts else {},
        )

    return {family: of(family) for family in FAMILIES}


FURTHER = {"enorm": ("enorm",), "hnorm": ("hnorm",), "eh_proj": ("eh_proj",), "final_layernorm": ("shared_head.norm",)}
"""Names of a depth of multi-token prediction beside those of its layer."""
WORDS, HEAD = "model.embed_tokens.weight", "lm_head.weight"
_COPIES = {"embed_tokens.weight": WORDS, "shared_head.head.weight": HEAD}
"""Names that such a layer has for the model's own embedding and head."""


def depths_in(names: Collection[str], layers: int) -> int:
    """The number of depths of multi-token prediction among a folder's tensors, behind so many layers."""
    return next(n for n in range(len(names) + 1) if f"model.layers.{layers + n}.eh_proj.weight" not in names)


def copies(model: ModelConfig) -> dict[str, str]:
    """Their names of the copies that depths of multi-token prediction have of the model's embedding and head, and of
    what they are copies."""
    layers = range(model.layers, model.layers + model.depths)
    of = {copy: WORDS if model.tied else its for copy, its in _COPIES.items()}
    return {f"model.layers.{n}.{copy}": its for n in layers for copy, its in of.items()}


def _read(family: str, content: Json, problems: list[str], read: Reader) -> dict[str, Any]:
    turned = content["qk_rope_head_dim"]
    said = _SAID[family] | {
        "attention_bias": False,
        "mlp_bias": False,
        "moe_layer_freq": 1,
        "head_dim": turned,
        "qk_head_dim": content["qk_nope_head_dim"] + turned,
        "rms_norm_eps": _LATENT_EPSILON,  # transformers has this in the norms of latents, whatever is said
    }
    problems += expected(content, {key: (value,) for key, value in said.items()})
    problems += expected(content, {"num_key_value_heads": (content["num_attention_heads"], None)})
    plain = {key: value for key, value in content.items() if key not in ("rope_parameters", "rope_scaling")}
    rope = rotation(content)
    fields = read({**plain, "rope_theta": rope["rope_theta"], "head_dim": content["qk_nope_head_dim"]}, problems)
    experts, layers, dense = content["n_routed_experts"], content["num_hidden_layers"], content["first_k_dense_replace"]
    sparse = [int(layer >= dense) for layer in range(layers)]
    shared = (content["n_shared_experts"] or 0) * content["moe_intermediate_size"]
    if family == _V3 and content["num_experts_per_tok"] == 1:
        problems.append(
            "num_experts_per_tok is 1 and norm_topk_prob true, so that every weight is routed_scaling_factor; here the "
            "weight of one expert is its sigmoid. It cannot be converted"
        )
    return {
        **fields,
        "group_query_attention": False,
        "num_query_groups": 1,
        "kv_channels": None,
        "qk_layernorm": True,
        "multi_latent_attention": True,
        "q_lora_rank": content["q_lora_rank"],
        "kv_lora_rank": content["kv_lora_rank"],
        "qk_head_dim": content["qk_nope_head_dim"],
        "qk_pos_emb_head_dim": content["qk_rope_head_dim"],
        "v_head_dim": content["v_head_dim"],
        "num_experts": experts if any(sparse) else None,
        "moe_layer_freq": "1" if all(sparse) else str(sparse),
        "moe_router_topk": content["num_experts_per_tok"],
        "moe_ffn_hidden_size": content["moe_intermediate_size"],
        "moe_shared_expert_intermediate_size": shared or None,
        "moe_router_dtype": "fp32",  # as transformers and DeepSeek's own code, whatever the activations are
        "moe_router_score_function": _SAID[family]["scoring_func"],
        "moe_router_pre_softmax": family == _V2,
        "moe_router_enable_expert_bias": family == _V3,
        "moe_router_topk_scaling_factor": content["routed_scaling_factor"],
        **_groups(family, content, problems),
        **_rope(rope, problems),
    }


def _groups(family: str, content: Json, problems: list[str]) -> dict[str, int]:
    """Fields of the choice among groups of experts, where there are several."""
    if family == _V2 and content["topk_method"] not in _METHODS:
        problems.append(f"topk_method is {content['topk_method']}; only {' and '.join(_METHODS)} can be converted")
    if family == _V2 and content["topk_method"] != _GROUPED:
        return {}
    groups, chosen = content["n_group"] or 1, content["topk_group"] or 1
    k, counted = content["num_experts_per_tok"], _GROUP_SCORES[family]
    if chosen > groups:
        problems.append(f"topk_group {chosen} is more than n_group {groups}")
    if groups == 1:
        return {}
    found = {"moe_router_num_groups": groups, "moe_router_group_topk": chosen}
    return found if k // chosen == counted else found | {"moe_router_group_score_topk": counted}


def _rope(rope: Json, problems: list[str]) -> dict[str, Any]:
    problems += expected(rope, {"partial_rotary_factor": (1.0,)})
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind == "default":
        return {"rope_type": "rope"}
    if kind != "yarn":
        problems.append(f"rope_type {kind} is not default or yarn")
        return {}
    expect = {
        "original_max_position_embeddings": (YARN_ORIGINAL,),
        "beta_fast": (YARN_FAST,),
        "beta_slow": (YARN_SLOW,),
        "truncate": (True,),
    }
    problems += expected(rope, expect)
    if rope.get("attention_factor") is not None:
        problems.append("attention_factor is given; only that of mscale and mscale_all_dim can be converted")
    all_dim = rope.get("mscale_all_dim") or 0.0
    if all_dim and rope.get("mscale"):
        return _yarn(rope, rope["mscale"], all_dim)
    if all_dim:
        problems.append("mscale_all_dim is given without mscale")
    return _yarn(rope, 1.0, 0.0)


def _yarn(rope: Json, mscale: float, all_dim: float) -> dict[str, Any]:
    factor = float(rope["factor"])
    return {
        "rope_type": "yarn",
        "rotary_scaling_factor": factor,
        "mscale": float(mscale),
        "mscale_all_dim": float(all_dim),
    }


def _write(family: str, model: ModelConfig, write: Callable[[str, ModelConfig], dict[str, Any]]) -> dict[str, Any]:
    dense = next(layer for layer in range(model.layers) if model.has_experts_in(layer))
    rope: dict[str, Any] = {"rope_theta": model.rotary_base, "rope_type": "default"}
    if model.rope_type != "rope":
        rope |= {
            "rope_type": "yarn",
            "factor": model.rotary_scaling_factor,
            "original_max_position_embeddings": YARN_ORIGINAL,
            "beta_fast": YARN_FAST,
            "beta_slow": YARN_SLOW,
        }
        if model.mscale_all_dim:
            rope |= {"mscale": model.mscale, "mscale_all_dim": model.mscale_all_dim}
    shared, groups = model.moe_shared_expert_intermediate_size or 0, model.moe_router_num_groups
    by = (
        {"topk_method": _GROUPED if groups else "greedy"}
        if family == _V2
        else {"num_nextn_predict_layers": model.depths}
    )
    return write("DeepseekV2ForCausalLM" if family == _V2 else "DeepseekV3ForCausalLM", model) | {
        "attention_bias": False,
        "head_dim": model.qk_pos_emb_head_dim,
        "num_key_value_heads": model.heads,
        "q_lora_rank": model.q_lora_rank,
        "kv_lora_rank": model.kv_lora_rank,
        "qk_nope_head_dim": model.qk_head_dim,
        "qk_rope_head_dim": model.qk_pos_emb_head_dim,
        "qk_head_dim": model.qk_dim,
        "v_head_dim": model.v_head_dim,
        "rope_parameters": rope,
        "rope_scaling": rope if model.rope_type != "rope" else None,
        "first_k_dense_replace": dense,
        "n_routed_experts": model.experts,
        "n_shared_experts": shared // model.expert_ffn,
        "num_experts_per_tok": model.moe_router_topk,
        "moe_intermediate_size": model.expert_ffn,
        "n_group": groups or 1,
        "topk_group": model.moe_router_group_topk or 1,
        "routed_scaling_factor": model.moe_router_topk_scaling_factor or 1.0,
        "moe_layer_freq": 1,
        **_SAID[family],
        **by,
    }
