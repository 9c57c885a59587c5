"""Llama and the dense families that begin from it."""

from __future__ import annotations

from megapipe.convert.huggingface import depths
from megapipe.convert.huggingface.family import Family
from megapipe.convert.huggingface.keys import (
    ATTENTION,
    MLP,
    Biases,
    Groups,
    Json,
    Not,
    Only,
    Same,
)
from megapipe.convert.huggingface.layers import Window
from megapipe.convert.huggingface.layouts import Layout, Rows, Stack
from megapipe.convert.huggingface.rotation import Rotation


def head_share(content: Json) -> int:
    """Return the channels of a head if head_dim is null: hidden size / number of heads.

    Args:
        content: the config.json.
    """
    hidden: int = content["hidden_size"]
    return hidden // int(content["num_attention_heads"])


# Most dense families begin from this table. Llama's attention_bias is of the output projection too.
LLAMA = Family(
    architecture="LlamaForCausalLM",
    what="Llama 2 and 3, with 3.1's frequency scaling",
    keys={
        "num_hidden_layers": Same("num_layers"),
        "hidden_size": Same("hidden_size"),
        "num_attention_heads": Same("num_attention_heads"),
        "num_key_value_heads": Groups(),
        "head_dim": Same("kv_channels", None, null=head_share),
        "intermediate_size": Same("ffn_hidden_size"),
        "max_position_embeddings": Same("max_position_embeddings"),
        "rms_norm_eps": Same("norm_epsilon", 1e-6),
        "attention_dropout": Same("attention_dropout", 0.0),
        "tie_word_embeddings": Not("untie_embeddings_and_output_weights", False),
        "hidden_act": Only("silu"),
        "rope_parameters": Rotation(),
        "mlp_bias": Biases(False, MLP, {"attention_bias": (False, ATTENTION)}),
        # No key of the class. Exporters of Megatron-LM's Llamas with depths write it.
        "num_nextn_predict_layers": depths.Depths(),
    },
    always={
        "hidden_dropout": 0.0,
        "position_embedding_type": "rope",
        "normalization": "RMSNorm",
        "swiglu": True,
        "disable_bias_linear": True,
    },
    names={
        "embedding.word_embeddings": Layout("model.embed_tokens"),
        "decoder.final_layernorm": Layout("model.norm"),
        "output_layer": Layout("lm_head"),
        "input_layernorm": Layout("input_layernorm"),
        "self_attention.linear_qkv": Rows(
            "self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"
        ),
        "self_attention.q_layernorm": Layout("self_attn.q_norm"),
        "self_attention.k_layernorm": Layout("self_attn.k_norm"),
        "self_attention.linear_proj": Layout("self_attn.o_proj"),
        "pre_mlp_layernorm": Layout("post_attention_layernorm"),
        "mlp.linear_fc1": Stack("mlp.gate_proj", "mlp.up_proj"),
        "mlp.linear_fc2": Layout("mlp.down_proj"),
        **{ours: Layout(theirs) for ours, theirs in depths.NAMES.items()},
    },
)

# Without a key for biases, a family is a Llama without them.
PLAIN = LLAMA.but("", "", keys={"mlp_bias": None})

# Without the key, the class has a window of 4096 tokens. Later models say null.
MISTRAL = PLAIN.but(
    "MistralForCausalLM",
    "every dense size, with its sliding window or without",
    keys={
        "num_key_value_heads": Groups(8),
        "sliding_window": Window(4096),
    },
)
