"""Settings of families without experts, and the draws that all families share."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

from random_models import delta

MIXED = {"layer_types": ["sliding_attention", "full_attention"] * 2}
BASE = {"rope_type": "default", "rope_theta": 1e4}
NEAR_YARN = {"rope_type": "yarn", "rope_theta": 20.0, "factor": 4.0, "original_max_position_embeddings": 4}
NEAR_YARN |= {"beta_fast": 0.8, "beta_slow": 0.3}
"""Numbers that stretch some of the few pairs of a small head."""


def stretched(draw: random.Random) -> dict[str, Any]:
    """A rotation that is plain, linear, or yarn's."""
    return draw.choice([BASE, BASE | {"rope_type": "linear", "factor": 4.0}, NEAR_YARN])


def windows(draw: random.Random) -> dict[str, Any]:
    """A window in some layers, said by layer_types or by the number of layers before it."""
    where = draw.choice([{"max_window_layers": 2}, MIXED | {"max_window_layers": 0}])
    return {"num_hidden_layers": 4, "use_sliding_window": True, "sliding_window": 3} | where


def whole_heads(draw: random.Random) -> dict[str, Any]:
    """Heads that add up to the hidden size."""
    return {"hidden_size": 32, "num_attention_heads": 4, "num_key_value_heads": draw.choice([2, 4])}


def partial(draw: random.Random, share: float) -> dict[str, Any]:
    """Plain rotation of some of the channels; share: the class's own."""
    rope = {"rope_type": "default", "rope_theta": draw.choice([1e4, 5e5])}
    said = draw.choice([None, share, 1.0])
    return {"rope_parameters": rope | ({} if said is None else {"partial_rotary_factor": said})}


def biases(draw: random.Random) -> dict[str, Any]:
    return {key: draw.random() < 0.5 for key in ("attention_bias", "mlp_bias")}


def factors(draw: random.Random) -> dict[str, Any]:
    """Factors that move the logits of small models; one of them is no power of 2."""
    return {
        "embedding_multiplier": draw.choice([3.0, 12.0]),
        "residual_multiplier": draw.choice([0.22, 0.5]),
        "attention_multiplier": draw.choice([0.5, 1.0]),
        "logits_scaling": draw.choice([0.7, 8.0]),
    }


def longrope(draw: random.Random) -> dict[str, Any]:
    """Divisors of three pairs; sequences of ten tokens are short ones, or long ones."""
    rope: dict[str, Any] = {"rope_type": "longrope", "rope_theta": 1e4, "partial_rotary_factor": 0.75}
    for name, numbers in (("short_factor", [1.5, 4.0]), ("long_factor", [6.0, 9.0])):
        rope[name] = [1.0, draw.choice(numbers), draw.choice(numbers)]
    return {"rope_parameters": rope, "original_max_position_embeddings": draw.choice([8, 16])}


def gemma(draw: random.Random) -> dict[str, Any]:
    """Heads that do not divide the hidden size, a low cap of logits, and windows in some layers."""
    more = {
        "final_logit_softcapping": draw.choice([None, 6.0]),
        "query_pre_attn_scalar": draw.choice([4, 9]),
        "sliding_window": 3,
        "num_hidden_layers": 4,
    }
    return more | {"head_dim": draw.choice([8, 12])} | draw.choice([{}, MIXED])


def falcon(draw: random.Random) -> dict[str, Any]:
    """The architecture of 7B, of 40B, of 11B, and the one before them."""
    return draw.choice(
        [
            {"multi_query": True},
            {"multi_query": False, "parallel_attn": False},
            {"new_decoder_architecture": True, "num_kv_heads": 2},
            {"new_decoder_architecture": True, "num_kv_heads": 2, "num_ln_in_parallel_attn": 1},
        ]
    )


DENSE: dict[str, Callable[[random.Random], dict[str, Any]]] = {
    "qwen2": windows,
    "qwen3": lambda draw: dict(**windows(draw), head_dim=draw.choice([6, 12])),
    "qwen3_5_text": delta,
    "smollm3": lambda draw: dict(**biases(draw), num_hidden_layers=4, no_rope_layers=draw.choice([None, [0, 1, 1, 0]])),
    "seed_oss": lambda draw: {
        "attention_bias": draw.random() < 0.5,
        "head_dim": draw.choice([6, 12]),
        "residual_dropout": draw.choice([0.0, 0.2]),
    },
    "internlm3": lambda draw: dict(
        **dict.fromkeys(["attention_bias", "mlp_bias"], draw.random() < 0.5), head_dim=draw.choice([6, 12])
    ),
    "iquestcoder": lambda draw: dict(**biases(draw), head_dim=draw.choice([6, 12])),
    "cwm": lambda draw: dict(
        head_dim=draw.choice([6, 12]),
        num_hidden_layers=4,
        **draw.choice([{"sliding_window": 3}, {"layer_types": ["full_attention"] * 4}, MIXED | {"sliding_window": 3}]),
        rope_parameters=draw.choice([None, {"rope_type": "default", "rope_theta": 1e4}]),
    ),
    "ministral": lambda draw: dict(
        head_dim=draw.choice([6, 12]),
        sliding_window=draw.choice([3, 5]),
        **draw.choice([{}, MIXED]),
        num_hidden_layers=4,
    ),
    "arcee": lambda draw: dict(**biases(draw), head_dim=draw.choice([6, 12]), rope_parameters=stretched(draw)),
    "helium": lambda draw: dict(**whole_heads(draw), head_dim=8, attention_bias=draw.random() < 0.5),
    "ernie4_5": lambda draw: {"use_bias": draw.random() < 0.5, "head_dim": draw.choice([6, 12])},
    "phi3": lambda draw: dict(
        **draw.choice([longrope(draw), longrope(draw), partial(draw, 0.75)]),
        sliding_window=draw.choice([None, 4]),
        hidden_size=32,
        num_attention_heads=4,
        num_key_value_heads=draw.choice([2, 4]),
        resid_pdrop=0.2,
        embd_pdrop=0.2,
    ),
    "glm": lambda draw: dict(**partial(draw, 0.5), attention_bias=draw.random() < 0.5, head_dim=draw.choice([8, 12])),
    "glm4": lambda draw: dict(**partial(draw, 0.5), attention_bias=draw.random() < 0.5, head_dim=draw.choice([8, 12])),
    "exaone4": lambda draw: dict(
        num_hidden_layers=4,
        head_dim=draw.choice([6, 12]),
        **draw.choice([{"sliding_window": 3}, MIXED | {"sliding_window": 5}]),
    ),
    "gemma": lambda draw: {"head_dim": draw.choice([8, 12])},
    "gemma2": lambda draw: dict(
        **gemma(draw), attn_logit_softcapping=draw.choice([None, 2.0]), rope_parameters=stretched(draw)
    ),
    "gemma3_text": lambda draw: dict(
        **gemma(draw) | MIXED,
        rope_parameters={
            "sliding_attention": BASE | {"rope_theta": 100.0},
            "full_attention": draw.choice([BASE, BASE | {"rope_type": "linear", "factor": 8.0}]),
        },
    ),
    "olmo2": lambda draw: dict(**whole_heads(draw), rope_parameters=stretched(draw)),
    "olmo3": lambda draw: dict(
        **whole_heads(draw),
        num_hidden_layers=4,
        **draw.choice([{"sliding_window": 3}, MIXED | {"sliding_window": 5}]),
        rope_parameters=draw.choice(
            [{"sliding_attention": plain, "full_attention": full} for plain, full in [(BASE, BASE), (BASE, NEAR_YARN)]]
        ),
    ),
    "ministral3": lambda draw: {
        "head_dim": draw.choice([8, 12]),
        "sliding_window": draw.choice([None, 4]),
        "rope_parameters": NEAR_YARN | {"mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.5},
    },
    "starcoder2": lambda draw: {
        "without": "rms_norm_eps",
        "norm_epsilon": draw.choice([1e-6, 1e-5]),
        **draw.choice([{"hidden_act": "gelu_pytorch_tanh"}, {"hidden_act": "gelu", "use_bias": draw.random() < 0.5}]),
        "sliding_window": draw.choice([None, 4]),
        "residual_dropout": 0.2,
        "embedding_dropout": 0.2,
    },
    "nemotron": lambda draw: dict(
        **biases(draw),
        without="rms_norm_eps",
        norm_eps=draw.choice([1e-6, 1e-5]),
        **partial(draw, 0.5),
        **whole_heads(draw),
    ),
    "stablelm": lambda draw: dict(
        without="rms_norm_eps",
        layer_norm_eps=1e-4,
        **partial(draw, 0.25),
        **whole_heads(draw),
        use_qkv_bias=draw.random() < 0.5,
        use_parallel_residual=draw.random() < 0.5,
    ),
    "jais2": lambda draw: dict(
        without="rms_norm_eps", **biases(draw), layer_norm_eps=1e-4, head_dim=draw.choice([6, 12])
    ),
    "gpt_neox": lambda draw: dict(
        **partial(draw, 0.25),
        without="rms_norm_eps num_key_value_heads",
        **whole_heads(draw),
        layer_norm_eps=1e-4,
        hidden_act=draw.choice(["gelu", "gelu_new"]),
        use_parallel_residual=draw.random() < 0.5,
        hidden_dropout=0.2,
    ),
    "persimmon": lambda draw: dict(
        **partial(draw, 0.5),
        without="rms_norm_eps num_key_value_heads",
        **whole_heads(draw),
        layer_norm_eps=1e-4,
        qk_layernorm=draw.random() < 0.5,
    ),
    "granite": lambda draw: dict(**biases(draw), **factors(draw)),
    "hyperclovax": lambda draw: dict(
        **biases(draw),
        **factors(draw) | {"attention_multiplier": draw.choice([None, 0.5])},
        use_post_norm=draw.random() < 0.5,
        head_dim=draw.choice([None, 12]),
    ),
    "apertus": lambda draw: {"attention_bias": draw.random() < 0.5, "head_dim": draw.choice([8, 12])},
    "phi": lambda draw: dict(
        **partial(draw, 0.5),
        without="rms_norm_eps",
        **whole_heads(draw),
        layer_norm_eps=1e-4,
        hidden_act=draw.choice(["gelu_new", "gelu"]),
        qk_layernorm=draw.random() < 0.5,
        resid_pdrop=0.2,
        embd_pdrop=0.2,
    ),
    "cohere": lambda draw: {
        "without": "rms_norm_eps",
        "layer_norm_eps": 1e-4,
        "attention_bias": draw.random() < 0.5,
        "logit_scale": draw.choice([0.0625, 0.7]),
    },
    "cohere2": lambda draw: dict(
        without="rms_norm_eps",
        layer_norm_eps=1e-4,
        num_hidden_layers=4,
        sliding_window=3,
        **draw.choice([{}, MIXED]),
        logit_scale=draw.choice([0.0625, 0.7]),
    ),
    "falcon": lambda draw: dict(
        without="rms_norm_eps num_key_value_heads intermediate_size rope_parameters",
        **whole_heads(draw),
        **falcon(draw),
        rope_parameters={"rope_type": "default", "rope_theta": draw.choice([1e4, 5e5])},
        layer_norm_epsilon=1e-4,
        ffn_hidden_size=draw.choice([None, 24]),
        bias=draw.random() < 0.5,
    ),
    "gemma4_text": lambda draw: dict(
        without="rope_parameters",
        **MIXED,
        num_hidden_layers=4,
        final_logit_softcapping=draw.choice([None, 6.0]),
        sliding_window=3,
        head_dim=draw.choice([4, 6]),
        hidden_size_per_layer_input=0,
        global_head_dim=8,
        initializer_range=0.3,
        attention_bias=draw.random() < 0.5,
        **draw.choice([{"attention_k_eq_v": True, "num_global_key_value_heads": 1}, {"attention_k_eq_v": True}, {}]),
    ),
}
"""model_type -> a function that draws what differs from other families."""
