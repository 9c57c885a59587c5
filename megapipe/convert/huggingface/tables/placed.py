"""Families with norms after attention and MLP, instead of before them or in addition."""

from __future__ import annotations

from megapipe.convert.huggingface.keys import Groups, Json, Meaning, Not, Only, Same
from megapipe.convert.huggingface.layers import FULL, SLIDING, LayerWindow, by_pattern
from megapipe.convert.huggingface.layouts import Layout
from megapipe.convert.huggingface.rotation import LayerRotation, Rotation
from megapipe.convert.huggingface.tables.dense import GLM
from megapipe.convert.huggingface.tables.llama import PLAIN
from megapipe.convert.huggingface.tables.qwen import EXPERTS

# The two norms of a layer that has none before attention and MLP.
_POST: dict[str, Layout | None] = {
    "input_layernorm": None,
    "pre_mlp_layernorm": None,
    "post_self_attn_layernorm": Layout("post_attention_layernorm"),
    "post_mlp_layernorm": Layout("post_feedforward_layernorm"),
}
_ALL_HEADS = {"qk_layernorm": True, "qk_layernorm_all_heads": True}
"""One norm of all heads' queries, and one of all keys."""


def _all_but_every_fourth(content: Json) -> list[str]:
    layers = range(1, content["num_hidden_layers"] + 1)
    return [SLIDING if number % 4 else FULL for number in layers]


# Zhipu 2025, GLM-4-0414. post_attention_layernorm is the norm before the MLP, as in Llama.
GLM4 = GLM.but(
    "Glm4ForCausalLM",
    "GLM-4-0414; norms around attention and MLP, neighbours among half of the channels are rotated",
    always={"norm_placement": "sandwich"},
    names={
        "post_self_attn_layernorm": Layout("post_self_attn_layernorm"),
        "post_mlp_layernorm": Layout("post_mlp_layernorm"),
    },
)

# LG 2025. Layers with full attention have no rotation, unless no layer has a window.
EXAONE4 = PLAIN.but(
    "Exaone4ForCausalLM",
    "EXAONE 4.0; layers without a window rotate nothing, unless none has a window",
    keys={
        "num_key_value_heads": Groups(32),
        "rms_norm_eps": Same("norm_epsilon", 1e-5),
        "sliding_window": LayerWindow(4096, by_pattern, {"sliding_window_pattern": 4}, plain=True),
    },
    always={"norm_placement": "post", "qk_layernorm": True},
    names=_POST,
)

# Ai2 2024. Its bias is of all projections of attention and not of the MLP.
OLMO2 = PLAIN.but(
    "Olmo2ForCausalLM",
    "every size; one norm of all heads' queries, and one of all keys",
    keys={
        "rms_norm_eps": Same("norm_epsilon", 1e-5),
        "attention_bias": Only(False),
    },
    always={"norm_placement": "post", **_ALL_HEADS},
    names=_POST,
)

# Ai2 2025. Yarn, where it is given, stretches the layers without a window alone.
OLMO3 = OLMO2.but(
    "Olmo3ForCausalLM",
    "every size; a window in the layers that layer_types names, yarn in the others",
    keys={
        "rope_parameters": LayerRotation(5e5, missing_kinds=_all_but_every_fourth),
        "sliding_window": LayerWindow(4096, _all_but_every_fourth),
    },
)

# Keys of experts of intermediate_size in every layer, chosen by a softmax over all.
_EXPERTS: dict[str, Meaning | None] = {
    "num_experts": Same("num_experts", 64),
    "num_experts_per_tok": Same("moe_router_topk", 8),
    "intermediate_size": Same("moe_ffn_hidden_size ffn_hidden_size"),
    "norm_topk_prob": Not("moe_router_pre_softmax", False),
}

# Ai2 2025: experts that were trained separately, and merged.
FLEX_OLMO = OLMO2.but(
    "FlexOlmoForCausalLM",
    "every size: OLMo 2 with experts",
    keys={
        **_EXPERTS,
        "rms_norm_eps": Same("norm_epsilon", 1e-6),
        "rope_parameters": Rotation(5e5),
        "num_experts": Same("num_experts", 7),
        "num_experts_per_tok": Same("moe_router_topk", 5),
    },
    names=EXPERTS,
    aliases={"num_local_experts": "num_experts"},
)

# Ai2 2024, with norms before attention and MLP. No published file clips.
OLMOE = PLAIN.but(
    "OlmoeForCausalLM",
    "every size without clip_qkv; one norm of all heads' queries, and one of all keys",
    keys={
        **_EXPERTS,
        "rms_norm_eps": Same("norm_epsilon", 1e-5),
        "attention_bias": Only(False),
        "clip_qkv": Only(None),
    },
    always=_ALL_HEADS,
    names=EXPERTS,
    aliases={"num_local_experts": "num_experts"},
)
