"""Settings of families with experts."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

from drawn_dense import BASE, MIXED, NEAR_YARN, factors, partial, whole_heads, windows
from random_models import delta, latent, sparse, transformers


def few_experts(draw: random.Random) -> dict[str, Any]:
    """Experts chosen by a softmax over all of them."""
    chosen = {"num_experts": 6, "num_experts_per_tok": draw.choice([2, 3])}
    return chosen | {"intermediate_size": 16, "norm_topk_prob": draw.random() < 0.5}


def sigmoid(draw: random.Random) -> dict[str, Any]:
    """Experts chosen by a sigmoid and a bias, in groups or not."""
    groups = draw.choice([1, 4])
    return {
        "n_routed_experts": 8,
        "num_experts_per_tok": draw.choice([2, 4]),
        "n_group": groups,
        "topk_group": min(groups, 2),
        "n_shared_experts": draw.choice([1, 2]),
        "moe_intermediate_size": 12,
        "routed_scaling_factor": draw.choice([1.0, 2.5]),
        "norm_topk_prob": True,
    }


def renamed(experts: dict[str, Any]) -> dict[str, Any]:
    """The same with the numbers of experts under other keys."""
    return {key.replace("n_routed", "num").replace("n_shared", "num_shared"): x for key, x in experts.items()}


EXPERTS: dict[str, Callable[[random.Random], dict[str, Any]]] = {
    "qwen2_moe": lambda draw: dict(
        **sparse(draw) | windows(draw) | MIXED | {"max_window_layers": 0}, shared_expert_intermediate_size=20
    ),
    "qwen3_next": lambda draw: dict(
        without="use_sliding_window", **sparse(draw) | delta(draw), shared_expert_intermediate_size=20
    ),
    "qwen3_5_moe_text": lambda draw: dict(
        without="intermediate_size norm_topk_prob mlp_only_layers use_sliding_window",
        **sparse(draw) | delta(draw),
        shared_expert_intermediate_size=20,
    ),
    "ernie4_5_moe": lambda draw: dict(
        num_hidden_layers=4,
        moe_intermediate_size=12,
        moe_k=draw.choice([2, 3]),
        moe_num_experts=6,
        moe_num_shared_experts=draw.choice([0, 1, 2]),
        moe_layer_start_index=draw.choice([0, 1]),
        moe_layer_end_index=draw.choice([-1, 2]),
        **whole_heads(draw),
    ),
    "gpt_oss": lambda draw: dict(
        num_hidden_layers=4,
        head_dim=draw.choice([8, 12]),
        intermediate_size=12,
        num_local_experts=6,
        num_experts_per_tok=draw.choice([2, 3]),
        swiglu_limit=draw.choice([0.5, 7.0]),
        **draw.choice([{"sliding_window": 3}, MIXED | {"sliding_window": 4}]),
        rope_parameters=NEAR_YARN | {"truncate": False},
    ),
    "olmoe": lambda draw: dict(**whole_heads(draw), **few_experts(draw)),
    "flex_olmo": lambda draw: dict(**whole_heads(draw), **few_experts(draw)),
    "minimax_m2": lambda draw: dict(
        head_dim=8,
        num_local_experts=8,
        num_experts_per_tok=draw.choice([2, 4]),
        rope_parameters=BASE,
        **draw.choice([{"rotary_dim": 4}, {}]),
    ),
    "granitemoe": lambda draw: dict(
        **factors(draw),
        attention_bias=draw.random() < 0.5,
        num_local_experts=6,
        num_experts_per_tok=draw.choice([2, 3]),
    ),
    "granitemoeshared": lambda draw: dict(
        **factors(draw),
        attention_bias=draw.random() < 0.5,
        num_local_experts=6,
        num_experts_per_tok=draw.choice([2, 3]),
        shared_intermediate_size=draw.choice([0, 20]),
    ),
    "llama4_text": lambda draw: dict(
        num_hidden_layers=4,
        head_dim=draw.choice([8, 12]),
        intermediate_size_mlp=32,
        num_local_experts=6,
        interleave_moe_layer_step=draw.choice([1, 2]),
        attention_chunk_size=draw.choice([3, 4]),
        use_qk_norm=draw.random() < 0.5,
        attention_bias=draw.random() < 0.5,
        **draw.choice([{"no_rope_layer_interval": 2}, {"no_rope_layers": [0, 1, 1, 0]}]),
        **draw.choice([{"attn_temperature_tuning": False}, {"floor_scale": 3, "attn_scale": 0.5}]),
    ),
    "glm4_moe": lambda draw: dict(
        **partial(draw, 0.5),
        **sigmoid(draw),
        head_dim=draw.choice([8, 12]),
        attention_bias=draw.random() < 0.5,
        use_qk_norm=draw.random() < 0.5,
        first_k_dense_replace=draw.choice([0, 1]),
        num_nextn_predict_layers=0,
    ),
    "solar_open": lambda draw: dict(
        without="intermediate_size", **sigmoid(draw), head_dim=draw.choice([8, 12]), attention_bias=draw.random() < 0.5
    ),
    "dots1": lambda draw: dict(
        **sigmoid(draw),
        first_k_dense_replace=draw.choice([0, 1]),
        **draw.choice([{"sliding_window": None}, *({"sliding_window": 3, "max_window_layers": n} for n in (0, 1))]),
    ),
    "exaone_moe": lambda draw: dict(
        **renamed(sigmoid(draw)),
        num_hidden_layers=4,
        **draw.choice([{}, {"mlp_layer_types": ["sparse", "dense", "sparse", "sparse"], "first_k_dense_replace": 0}]),
        sliding_window=3,
        **draw.choice([{}, MIXED]),
    ),
    "hy_v3": lambda draw: {
        "head_dim": draw.choice([6, 12]),
        "num_hidden_layers": 4,
        "num_experts": 8,
        "num_experts_per_tok": draw.choice([2, 4]),
        "num_shared_experts": draw.choice([1, 2]),
        "moe_intermediate_size": 12,
        "router_scaling_factor": 1.5,
        "mlp_layer_types": draw.choice([None, ["sparse", "dense", "sparse", "sparse"]]),
    },
}
"""model_type -> a function that draws what differs from other families."""


def glm4_moe_lite(draw: random.Random) -> Any:
    return transformers.Glm4MoeLiteConfig(
        **{key: value for key, value in latent(draw).items() if "dense" not in key}
        | {
            "rms_norm_eps": draw.choice([1e-5, 0.001]),
            "num_nextn_predict_layers": 0,
            "mlp_layer_types": draw.choice([None, ["sparse", "dense"] * 2]),
            "num_hidden_layers": 4,
        }
    )
