"""Values that transformers assumes for keys that a config.json leaves out: each family's config class has its own.

Sizes are not among them: a config.json without one is refused, as its class's size would be another model's.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_LATENT = {
    "hidden_act": "silu",
    "num_key_value_heads": None,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "attention_dropout": 0.0,
    "tie_word_embeddings": False,
}
_ROTARY = _LATENT | {"head_dim": None}
_WINDOW = {"use_sliding_window": False, "sliding_window": 4096, "max_window_layers": 28}
_SPARSE = {"norm_topk_prob": False, "decoder_sparse_step": 1, "mlp_only_layers": None}
_DEEPSEEK = _LATENT | {"q_lora_rank": 1536, "attention_bias": False}
DEFAULTS: dict[str, dict[str, Any]] = {
    "gpt2": {
        "n_inner": None,
        "activation_function": "gelu_new",
        "resid_pdrop": 0.1,
        "embd_pdrop": 0.1,
        "attn_pdrop": 0.1,
        "layer_norm_epsilon": 1e-5,
        "tie_word_embeddings": True,
    },
    "llama": _ROTARY | {"attention_bias": False, "mlp_bias": False},
    "qwen2": _ROTARY | _WINDOW | {"num_key_value_heads": 32},
    "qwen3": _ROTARY | _WINDOW | {"num_key_value_heads": 32, "head_dim": 128, "attention_bias": False},
    "mistral": _ROTARY | {"num_key_value_heads": 8, "sliding_window": 4096},
    "mixtral": _ROTARY
    | {
        "num_key_value_heads": 8,
        "rms_norm_eps": 1e-5,
        "rope_theta": 1000000.0,
        "sliding_window": None,
        "router_jitter_noise": 0.0,
    },
    "qwen2_moe": _ROTARY | _WINDOW | _SPARSE | {"num_key_value_heads": 16, "qkv_bias": True},
    "qwen3_moe": _ROTARY
    | _SPARSE
    | {"num_key_value_heads": 4, "attention_bias": False, "use_sliding_window": False, "sliding_window": 4096},
    "deepseek_v2": _DEEPSEEK
    | {
        "norm_topk_prob": False,
        "n_shared_experts": 2,
        "n_group": None,
        "topk_group": None,
        "topk_method": "greedy",
        "routed_scaling_factor": 1.0,
    },
    "deepseek_v3": _DEEPSEEK
    | {
        "num_key_value_heads": 128,
        "norm_topk_prob": True,
        "n_shared_experts": 1,
        "n_group": 8,
        "topk_group": 4,
        "routed_scaling_factor": 2.5,
    },
}
"""By family, as in transformers 5.23."""


def filled(family: str, content: Mapping[str, Any]) -> dict[str, Any]:
    """A config.json with the family's value for each optional key that it leaves out."""
    return DEFAULTS[family] | dict(content)


def rotation(content: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of rotary positions, from a config.json that is `filled`.

    transformers 5 has all in rope_parameters; before, there were rope_theta and rope_scaling, which goes first.
    """
    rope = content.get("rope_scaling") or content.get("rope_parameters") or {}
    found = {"rope_theta": content["rope_theta"], **rope}
    name = "original_max_position_embeddings"
    found.setdefault(name, content["max_position_embeddings"])
    return found | {name: content.get(name, found[name])}
