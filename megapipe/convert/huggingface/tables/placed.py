"""Families with norms after attention and MLP, instead of before them or in addition."""

from __future__ import annotations

from megapipe.convert.huggingface.keys import Groups, Same
from megapipe.convert.huggingface.layers import LayerWindow, by_pattern
from megapipe.convert.huggingface.layouts import Layout
from megapipe.convert.huggingface.tables.dense import GLM
from megapipe.convert.huggingface.tables.llama import PLAIN

# The two norms of a layer that has none before attention and MLP.
_POST: dict[str, Layout | None] = {
    "input_layernorm": None,
    "pre_mlp_layernorm": None,
    "post_self_attn_layernorm": Layout("post_attention_layernorm"),
    "post_mlp_layernorm": Layout("post_feedforward_layernorm"),
}

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
