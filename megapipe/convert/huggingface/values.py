"""The values of a config.json: their types and sizes, and values that a family must have."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from megapipe.config.typed import fits, shown, words

_KINDS: dict[Any, str] = {
    int: """
        vocab_size n_layer n_embd n_head n_positions max_window_layers num_hidden_layers
        hidden_size num_attention_heads intermediate_size max_position_embeddings
        num_local_experts num_experts num_experts_per_tok moe_intermediate_size
        shared_expert_intermediate_size decoder_sparse_step n_routed_experts kv_lora_rank
        qk_nope_head_dim qk_rope_head_dim v_head_dim first_k_dense_replace shared_intermediate_size
        full_attention_interval linear_conv_kernel_dim linear_key_head_dim linear_value_head_dim
        linear_num_key_heads linear_num_value_heads intermediate_size_mlp floor_scale
        interleave_moe_layer_step global_head_dim
        moe_k moe_num_experts moe_num_shared_experts
        no_rope_layer_interval query_pre_attn_scalar num_nextn_predict_layers
    """,
    int | None: """
        q_lora_rank n_group topk_group n_inner num_key_value_heads head_dim sliding_window
        n_shared_experts num_shared_experts original_max_position_embeddings
        sliding_window_pattern rotary_dim num_kv_heads ffn_hidden_size num_ln_in_parallel_attn
        attention_chunk_size num_global_key_value_heads
    """,
    float: """
        layer_norm_epsilon layer_norm_eps norm_eps norm_epsilon rms_norm_eps attn_pdrop
        resid_pdrop embd_pdrop attention_dropout residual_dropout embedding_dropout
        hidden_dropout factor router_jitter_noise routed_scaling_factor router_scaling_factor
        swiglu_limit moe_norm_min attn_scale low_freq_factor high_freq_factor
        embedding_multiplier residual_multiplier attention_multiplier logits_scaling logit_scale
    """,
    bool: """
        tie_word_embeddings attention_bias mlp_bias use_bias use_qkv_bias use_sliding_window
        norm_topk_prob qkv_bias use_qk_norm qk_layernorm truncate use_parallel_residual
        use_post_norm attn_temperature_tuning attention_k_eq_v
        alibi new_decoder_architecture multi_query parallel_attn bias
    """,
    float | None: """
        rope_theta rotary_emb_base rotary_pct partial_rotary_factor mscale mscale_all_dim
        beta_fast beta_slow attention_factor llama_4_scaling_beta rope_local_base_freq
        attn_logit_softcapping final_logit_softcapping clip_qkv
    """,
    dict | None: "rope_parameters rope_scaling per_layer_config",
    list | None: "layer_types mlp_layer_types mlp_only_layers no_rope_layers moe_layers",
    list: "short_factor long_factor",
}
KIND_OF = {name: kind for kind, names in _KINDS.items() for name in names.split()}
"""The type of a key's value, by the key's name, which means the same in all families."""

_LENGTHS = (
    "vocab_size",
    "n_positions",
    "max_position_embeddings",
    "sliding_window",
    "attention_chunk_size",
    "floor_scale",
    "max_window_layers",
    "original_max_position_embeddings",
)
_MAY_BE_0 = (
    "max_window_layers",
    "first_k_dense_replace",
    "n_shared_experts",
    "num_shared_experts",
    "moe_num_shared_experts",
    "num_nextn_predict_layers",
    "shared_intermediate_size",
)
_LONGEST = 2**31 - 1
_WIDEST = 2**19
_OF_LAYERS = ("full_attention", "sliding_attention")
_NESTED = ("rope_parameters", "rope_scaling")


def unfit(content: Mapping[str, Any]) -> Iterator[str]:
    """Yield a text for each value of a config.json of a wrong type, or of an impossible size.

    Args:
        content: the config.json.
    """
    values = dict(content)
    # Gemma 4 writes null for the experts that a model does not have.
    if content.get("enable_moe_block") is False:
        for name in ("num_experts", "top_k_experts", "moe_intermediate_size"):
            values.pop(name, None)
    inside: set[str] = set()
    for outer in _NESTED:
        held = content.get(outer)
        if isinstance(held, dict):
            found = {f"{outer}.{name}": value for name, value in held.items()}
            for layers in _OF_LAYERS:
                own = held.get(layers)
                if isinstance(own, dict):
                    found |= {f"{outer}.{layers}.{key}": x for key, x in own.items()}
            values |= found
            inside |= found.keys()
    for key, value in values.items():
        name = key.rpartition(".")[2]
        kind = KIND_OF.get(name)
        # Qwen2-MoE writes a window of 0 where the window is off.
        is_off = name == "sliding_window" and content.get("use_sliding_window") is False
        least = int(name not in _MAY_BE_0 and not is_off)
        most = _LONGEST if name in _LENGTHS else _WIDEST
        if kind is not None and not fits(value, kind):
            yield f"{key} is {words(kind)}, got {shown(value)}"
        elif kind in (int, int | None) and value is not None and not least <= value <= most:
            yield f"{key} is an integer from {least} to {most}, got {shown(value)}"
        elif key in inside and isinstance(value, dict) and name not in _OF_LAYERS:
            yield f"{key} is an object: rotary positions are the same in all layers here"


def expected(content: Mapping[str, Any], expect: Mapping[str, tuple[Any, ...]]) -> Iterator[str]:
    """Yield a text for each key whose value cannot be converted. A missing key passes.

    Args:
        content: the config.json.
        expect: {key: values that can be converted}.
    """
    for key, allowed in expect.items():
        if key in content and content[key] not in allowed:
            yield f"{key} is {content[key]}; only {allowed[0]} can be converted"
