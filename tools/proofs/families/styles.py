"""What the models of drawn cases are made of: features of families, of experts and of MLPs."""

from __future__ import annotations

from typing import Any

STYLES: dict[str, dict[str, Any]] = {
    "gpt2": {},
    "llama": {
        "position_embedding_type": "rope",
        "normalization": "RMSNorm",
        "swiglu": True,
        "ffn_hidden_size": 24,
        "group_query_attention": True,
        "num_query_groups": 2,
        "disable_bias_linear": True,
    },
}
_SHARED = "normalization swiglu ffn_hidden_size disable_bias_linear"
STYLES["latent"] = {name: STYLES["llama"][name] for name in _SHARED.split()} | {
    "position_embedding_type": "none",
    "multi_latent_attention": True,
    "q_lora_rank": 12,
    "kv_lora_rank": 10,
    **{"qk_head_dim": 4, "qk_pos_emb_head_dim": 4, "v_head_dim": 6},
    **{"qk_layernorm": True, "rotary_scaling_factor": 4.0, "mscale_all_dim": 1.0},
}
_LLAMA = STYLES["llama"]
STYLES["gemma2"] = _LLAMA | {
    "norm_placement": "sandwich",
    "apply_layernorm_1p": True,
    "softmax_scale": 0.75,
    "attn_logit_softcapping": 0.5,
    "final_logit_softcapping": 1.5,
}
STYLES["olmo3"] = _LLAMA | {
    "norm_placement": "post",
    "qk_layernorm": True,
    "qk_layernorm_all_heads": True,
    "position_embedding_type": "yarn",
    "rotary_scaling_factor": 4.0,
    "yarn_original_max_position_embeddings": 4,
}
STYLES["sinks"] = _LLAMA | {
    "softmax_type": "learnable",
    "attention_output_gate": True,
    "qk_l2_norm": True,
    "rotary_seq_len_interpolation_factor": 2.0,
}
STYLES["delta"] = _LLAMA | {
    "experimental_attention_variant": "gated_delta_net",
    **{"linear_attention_freq": "2", "linear_conv_kernel_dim": 3, "linear_key_head_dim": 3},
    **{"linear_value_head_dim": 5, "linear_num_key_heads": 4, "linear_num_value_heads": 8},
}
STYLES["smollm3"] = _LLAMA | {"no_rope_freq": "2"}
STYLES["ministral3"] = STYLES["olmo3"] | {
    "norm_placement": "pre",
    "qk_layernorm_all_heads": False,
    "softmax_type": "off-by-one",
    "yarn_temperature_beta": 0.5,
    "no_yarn_correction_range_round_to_int": True,
    "rotary_interleaved": True,
}
STYLES["llama4"] = _LLAMA | {
    "no_rope_freq": "2",
    "rotary_interleaved": True,
    "use_rope_scaling": True,
    "rope_scaling_high_freq_factor": 1.0,
    "qk_l2_norm": True,
    "attention_chunk_size": 3,
    "attention_temperature_beta": 0.5,
    "attention_temperature_length": 3,
}
STYLES["gemma4"] = _LLAMA | {
    "norm_placement": "sandwich",
    "qk_layernorm": True,
    "v_l2_norm": True,
    "keys_as_values": True,
    "layer_scalar": True,
    "rotary_percent": 0.5,
    "rotary_proportional": True,
}
# Slices of a sequence have the divisors of the whole one.
STYLES["phi3"] = _LLAMA | {
    "position_embedding_type": "longrope",
    "longrope_short_factor": (1.0, 2.0),
    "longrope_long_factor": (3.0, 5.0),
    "longrope_original_max_position_embeddings": 6,
    "longrope_attention_factor": 1.2,
}
_SOFTMAX: dict[str, Any] = {
    "num_experts": 6,
    "moe_ffn_hidden_size": 8,
    "moe_aux_loss_coeff": (0.1,),
}
_SIGMOID = _SOFTMAX | {
    "moe_router_score_function": "sigmoid",
    "moe_router_enable_expert_bias": True,
}
EXPERTS: dict[str, dict[str, Any]] = {
    "none": {},
    "softmax": _SOFTMAX | {"moe_z_loss_coeff": 0.1},
    "bias": _SIGMOID
    | {"moe_router_load_balancing_type": ("seq_aux_loss",), "moe_router_bias_update_rate": 0.02},
    "groups": _SIGMOID
    | {"moe_router_num_groups": 3, "moe_router_group_topk": 2, "moe_router_topk": 3},
    "shared": _SOFTMAX | {"moe_shared_expert_intermediate_size": 8, "moe_shared_expert_gate": True},
    "some": _SOFTMAX
    | {"moe_layer_freq": "2", "moe_router_pre_softmax": True, "moe_input_jitter_eps": 0.1},
    "on input": _SOFTMAX | {"moe_apply_probs_on_input": True},
    "softmax bias": _SOFTMAX
    | {"moe_router_enable_expert_bias": True, "moe_router_bias_update_rate": 0.02},
    "dropping": _SOFTMAX | {"moe_expert_capacity_factor": 0.75},
}
# What an MLP is made of, in any style.
PARTS: dict[str, dict[str, Any]] = {
    "none": {},
    "geglu": {"swiglu": False, "geglu": True, "ffn_hidden_size": 24},
    "clamped": {
        "swiglu": False,
        "quick_geglu": True,
        "activation_func_clamp_value": 0.02,
        "glu_linear_offset": 1.0,
    },
    "xielu": {"swiglu": False, "xielu": True},
    "factors": {"mup_embedding_mult": 3.0, "residual_multiplier": 0.5, "mup_output_mult": 0.7},
    "one norm": {"parallel_attention_mlp": "one_norm", "no_norm_bias": True},
    "two norms": {"parallel_attention_mlp": "two_norms", "residual_multiplier": 0.5},
    "head bias": {"disable_bias_linear": True, "add_bias_to": ("fc1", "head")},
    "biases": {"disable_bias_linear": True, "add_bias_to": ("proj", "fc2", "router")},
}
