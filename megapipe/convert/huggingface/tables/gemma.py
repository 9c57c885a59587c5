"""Google's Gemma: the three generations of its text models."""

from __future__ import annotations

import math
from dataclasses import dataclass

from megapipe.config import ModelConfig
from megapipe.convert.huggingface.keys import (
    NEEDED,
    Fields,
    Groups,
    Json,
    Meaning,
    Not,
    Only,
    Same,
    Unread,
)
from megapipe.convert.huggingface.layers import FULL, SLIDING, LayerWindow, by_pattern
from megapipe.convert.huggingface.layouts import Layout
from megapipe.convert.huggingface.rotation import LayerRotation
from megapipe.convert.huggingface.tables.llama import PLAIN, head_share

_TANH = Only("gelu_pytorch_tanh", "gelu")
"""The published gelu is read as the tanh form in transformers, too."""


class _ScaledWidth(Meaning):
    """The config.json key hidden_size. Its square root is the factor on the embeddings."""

    def keys(self, key: str) -> Fields:
        return {key: NEEDED}

    def read(self, key: str, content: Json, problems: list[str]) -> Fields:
        width = content[key]
        return {"hidden_size": width, "mup_embedding_mult": math.sqrt(width)}

    def write(self, key: str, model: ModelConfig) -> Fields:
        return {key: model.hidden}


@dataclass(frozen=True)
class _Scalar(Meaning):
    """A config.json key with a number n; attention scores are scaled by n ** -0.5."""

    default: int

    def keys(self, key: str) -> Fields:
        return {key: self.default}

    def read(self, key: str, content: Json, problems: list[str]) -> Fields:
        return {"softmax_scale": content[key] ** -0.5}

    def write(self, key: str, model: ModelConfig) -> Fields:
        scale = model.softmax_scale
        return {key: model.head_dim if scale is None else round(scale**-2)}


def _every_other(content: Json) -> list[str]:
    return [FULL if layer % 2 else SLIDING for layer in range(content["num_hidden_layers"])]


GEMMA = PLAIN.but(
    "GemmaForCausalLM",
    "the first generation",
    keys={
        "hidden_size": _ScaledWidth(),
        "num_key_value_heads": Groups(16),
        "head_dim": Same("kv_channels", 256, null=head_share),
        "tie_word_embeddings": Not("untie_embeddings_and_output_weights", True),
        "hidden_act": _TANH,
        # A key of the published files. Both of its values mean the same.
        "hidden_activation": Only(None, "gelu_pytorch_tanh", silent=True),
        "attention_bias": Only(False),
        "use_bidirectional_attention": Only(None, False, silent=True),
    },
    always={"apply_layernorm_1p": True, "swiglu": False, "geglu": True},
)

# 2024. post_attention_layernorm is the norm after attention.
GEMMA2 = GEMMA.but(
    "Gemma2ForCausalLM",
    "every size; a window in the layers that layer_types names, capped scores and logits",
    keys={
        "num_key_value_heads": Groups(4),
        "hidden_act": None,
        "hidden_activation": Only("gelu_pytorch_tanh"),
        "query_pre_attn_scalar": _Scalar(256),
        "attn_logit_softcapping": Same("attn_logit_softcapping", 50.0),
        "final_logit_softcapping": Same("final_logit_softcapping", 30.0),
        "sliding_window": LayerWindow(4096, _every_other),
    },
    always={"norm_placement": "sandwich"},
    names={
        "post_self_attn_layernorm": Layout("post_attention_layernorm"),
        "pre_mlp_layernorm": Layout("pre_feedforward_layernorm"),
        "post_mlp_layernorm": Layout("post_feedforward_layernorm"),
    },
)

# 2025. Layers with a window have a base of their own, and full ones are stretched from 4B on.
GEMMA3 = GEMMA2.but(
    "Gemma3ForCausalLM",
    "every size without pictures; layers with a window have a rotary base of their own",
    keys={
        # transformers reads it and, with torch's attention, does not cap.
        "attn_logit_softcapping": Only(None),
        "final_logit_softcapping": Same("final_logit_softcapping", None),
        "rope_parameters": LayerRotation(
            1e6, missing_kinds=by_pattern, sliding=1e4, sliding_key="rope_local_base_freq"
        ),
        "sliding_window": LayerWindow(4096, by_pattern, {"sliding_window_pattern": 6}),
        # Where transformers keeps the pattern, once it has made layer_types of it.
        "_sliding_window_pattern": Unread(6),
    },
    always={"qk_layernorm": True},
)
