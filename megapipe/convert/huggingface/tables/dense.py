"""Dense families that begin from Llama, with other biases, activations, rotations or layers."""

from __future__ import annotations

from megapipe.convert.huggingface.keys import Equals, Groups, Json, Not, Only, Same, Twin, Unread
from megapipe.convert.huggingface.layers import (
    FULL,
    SLIDING,
    LayerWindow,
    RotatedLayers,
    Window,
)
from megapipe.convert.huggingface.layouts import Halves, Layout, Rows
from megapipe.convert.huggingface.longrope import LongRope
from megapipe.convert.huggingface.rotation import Rotation
from megapipe.convert.huggingface.tables.llama import LLAMA, MISTRAL, PLAIN, head_share

_CWM_ROPE = {
    "rope_theta": 1e6,
    "rope_type": "llama3",
    "factor": 16.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


_MINISTRAL3_ROPE = {
    "rope_theta": 1e6,
    "rope_type": "yarn",
    "factor": 16.0,
    "original_max_position_embeddings": 16384,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "llama_4_scaling_beta": 0.1,
}


def _all_but_every_fourth(content: Json) -> list[str]:
    layers = range(content["num_hidden_layers"])
    return [FULL if layer % 4 == 0 else SLIDING for layer in layers]


def _all_sliding(content: Json) -> list[str]:
    return [SLIDING] * int(content["num_hidden_layers"])


# Hugging Face 2025. Every fourth layer has no rotation (NoPE, Kazemnejad et al. 2023).
SMOLLM3 = LLAMA.but(
    "SmolLM3ForCausalLM",
    "every size; every fourth layer, or any others, without rotation",
    keys={
        "num_key_value_heads": Groups(4),
        "tie_word_embeddings": Not("untie_embeddings_and_output_weights", True),
        "rope_parameters": Rotation(2e6),
        "no_rope_layers": RotatedLayers(),
        "use_sliding_window": Only(False),
        # The window is off, so that its other keys decide nothing.
        "sliding_window": Unread(),
        "max_window_layers": Unread(28),
        "layer_types": Unread(),
    },
)

# ByteDance 2025. Its dropout is after attention and MLP alone. Here --hidden-dropout is of the
# embedding, too. The weights mean the same, and a note says it.
SEED_OSS = PLAIN.but(
    "SeedOssForCausalLM",
    "every size; its residual_dropout drops embeddings here, too",
    keys={
        "head_dim": Same("kv_channels", 128, null=head_share),
        "num_key_value_heads": Groups(8),
        "attention_dropout": Same("attention_dropout", 0.1),
        "residual_dropout": Same("hidden_dropout", 0.1),
        "attention_bias": Same("add_qkv_bias", True),
        "attention_out_bias": Only(False),
        "mlp_bias": Only(False),
    },
)

# transformers computes it by Llama's class. Its own defaults are of the 8B model.
INTERNLM3 = LLAMA.but(
    "LlamaForCausalLM",
    "every size, as transformers has it: a Llama",
    keys={
        "num_key_value_heads": Groups(2),
        "head_dim": Same("kv_channels", 128, null=head_share),
        "rms_norm_eps": Same("norm_epsilon", 1e-5),
        "mlp_bias": Not("disable_bias_linear", False),
        "attention_bias": Twin("mlp_bias", False, "its class has one switch for biases"),
        # InternLM's own names for the biases, in files for its own program.
        "bias": Only(False, silent=True),
        "qkv_bias": Only(False, silent=True),
    },
)

# As InternLM3: a name of its own for Llama's class. No published model clips or has a window.
IQUESTCODER = LLAMA.but(
    "LlamaForCausalLM",
    "every size, as transformers has it: a Llama",
    keys={
        "num_key_value_heads": Groups(8),
        "head_dim": Same("kv_channels", 128, null=head_share),
        "rms_norm_eps": Same("norm_epsilon", 1e-5),
        "clip_qkv": Only(None, silent=True),
        "use_sliding_window": Only(False, silent=True),
    },
)

# Meta's Code World Model. A file without rope_parameters means Llama 3.1's stretching by 16.
CWM = PLAIN.but(
    "CwmForCausalLM",
    "every size; a sliding window in the layers that layer_types names",
    keys={
        "num_key_value_heads": Groups(8),
        "head_dim": Same("kv_channels", 128, null=head_share),
        "rms_norm_eps": Same("norm_epsilon", 1e-5),
        "rope_parameters": Rotation(1e6, missing=_CWM_ROPE),
        "mlp_bias": Only(False),
        "sliding_window": LayerWindow(8192, _all_but_every_fourth),
    },
)

# Mistral's table with layer_types. Without that key all layers have the window.
MINISTRAL = MISTRAL.but(
    "MinistralForCausalLM",
    "every size; a sliding window in the layers that layer_types names",
    keys={"sliding_window": LayerWindow(4096, _all_sliding)},
)

# Mistral 2025. Queries grow with their position beyond the length before yarn.
MINISTRAL3 = MISTRAL.but(
    "Ministral3ForCausalLM",
    "every size, with yarn and its growth of queries; a window in all layers or in none",
    keys={
        "head_dim": Same("kv_channels", 128, null=head_share),
        "rms_norm_eps": Same("norm_epsilon", 1e-5),
        "rope_parameters": Rotation(1e6, missing=_MINISTRAL3_ROPE, grows=True),
        "sliding_window": Window(None),
    },
)

# The published AFM-4.5B stretches its rotation by yarn.
ARCEE = LLAMA.but(
    "ArceeForCausalLM",
    "AFM, every size",
    keys={
        "rms_norm_eps": Same("norm_epsilon", 1e-5),
        "hidden_act": Only("relu2"),
    },
    always={"swiglu": False, "squared_relu": True},
    names={"mlp.linear_fc1": Layout("mlp.up_proj")},
)

# Kyutai 2025. attention_bias is of queries, keys and values alone, unlike in Llama.
HELIUM = PLAIN.but(
    "HeliumForCausalLM",
    "every size; neighbouring channels are rotated",
    keys={
        "num_key_value_heads": Groups(20),
        # Its output projection is square.
        "head_dim": Equals(head_share, 128),
        "rms_norm_eps": Same("norm_epsilon", 1e-8),
        "rope_parameters": Rotation(1e5),
        "attention_bias": Same("add_qkv_bias", False),
        "mlp_bias": Only(False),
    },
    always={"rotary_interleaved": True},
)

# Baidu 2025, the dense sizes.
ERNIE4_5 = PLAIN.but(
    "Ernie4_5ForCausalLM",
    "every dense size; neighbouring channels are rotated, biases everywhere or nowhere",
    keys={
        "num_key_value_heads": Groups(2),
        "head_dim": Same("kv_channels", 128, null=head_share),
        "rms_norm_eps": Same("norm_epsilon", 1e-5),
        # transformers drops nothing in this family's attention, whatever is said.
        "attention_dropout": Only(0.0, silent=True),
        "tie_word_embeddings": Not("untie_embeddings_and_output_weights", True),
        "rope_parameters": Rotation(5e5),
        "use_bias": Not("disable_bias_linear", False),
    },
    always={"rotary_interleaved": True, "attention_dropout": 0.0},
)

# Microsoft 2024: Llama with fused weights. QKV is all queries above all keys above all values, and
# not by group. Phi-4-mini rotates three quarters of the channels, and has longrope.
PHI3 = PLAIN.but(
    "Phi3ForCausalLM",
    "Phi-3 and Phi-4, every size; a window in all layers or in none",
    keys={
        "rms_norm_eps": Same("norm_epsilon", 1e-5),
        "rope_parameters": LongRope(share=1.0),
        "resid_pdrop": Same("hidden_dropout", 0.0),
        "embd_pdrop": Twin("resid_pdrop", 0.0, "--hidden-dropout is both"),
        "attention_bias": Only(False, silent=True),
        "sliding_window": Window(None),
    },
    names={
        "self_attention.linear_qkv": Rows("self_attn.qkv_proj"),
        "mlp.linear_fc1": Halves("mlp.gate_up_proj"),
    },
)

# THUDM 2024, GLM-4-9B. A file need not state that half of the channels are rotated.
# Its successor of 2025, glm4, has norms after attention and MLP, see placed.py.
GLM = PLAIN.but(
    "GlmForCausalLM",
    "GLM-4-9B as transformers has it; neighbours among half of the channels are rotated",
    keys={
        "num_key_value_heads": Groups(2),
        "head_dim": Same("kv_channels", 128, null=head_share),
        "rms_norm_eps": Same("norm_epsilon", 1.5625e-7),
        "rope_parameters": Rotation(share=0.5),
        "attention_bias": Same("add_qkv_bias", True),
    },
    always={"rotary_interleaved": True},
    names={"mlp.linear_fc1": Halves("mlp.gate_up_proj")},
)
