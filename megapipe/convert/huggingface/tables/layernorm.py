"""Dense families with LayerNorm: GPT-NeoX's, StarCoder's, and Llamas with another norm."""

from __future__ import annotations

from megapipe.convert.huggingface.keys import (
    ATTENTION,
    MLP,
    Biases,
    Choice,
    Fields,
    Groups,
    Json,
    Meaning,
    Not,
    Only,
    Same,
    Twin,
    Unread,
)
from megapipe.convert.huggingface.layers import Window
from megapipe.convert.huggingface.layouts import Layout, Rows
from megapipe.convert.huggingface.rotation import Rotation
from megapipe.convert.huggingface.tables.gpt import GPT2
from megapipe.convert.huggingface.tables.llama import LLAMA, PLAIN
from megapipe.convert.huggingface.values import expected

_ORDER = "parallel_attention_mlp"
_GELU = {"gelu_pytorch_tanh": False, "gelu_new": False, "gelu": True}
GELU_ERF = {"gelu": True, "gelu_new": False, "gelu_fast": False, "gelu_pytorch_tanh": False}
GPT = {"normalization": "LayerNorm", "swiglu": False, "disable_bias_linear": False}

# GPT-NeoX has the rows of each head together, query, key and value, as Megatron-LM.
_QUERY_KEY_VALUE = {
    "self_attention.linear_qkv": Layout("attention.query_key_value"),
    "self_attention.linear_proj": Layout("attention.dense"),
    "mlp.linear_fc1": Layout("mlp.dense_h_to_4h"),
    "mlp.linear_fc2": Layout("mlp.dense_4h_to_h"),
}
_PERSIMMON = _QUERY_KEY_VALUE | {
    "self_attention.linear_qkv": Layout("self_attn.query_key_value"),
    "self_attention.linear_proj": Layout("self_attn.dense"),
    "self_attention.q_layernorm": Layout("self_attn.q_layernorm"),
    "self_attention.k_layernorm": Layout("self_attn.k_layernorm"),
}

# Keys of the published files that transformers does not read.
_STARCODER: dict[str, Meaning | None] = {
    "activation_function": Unread(),
    "layer_norm_epsilon": Unread(1e-5),
    "attention_softmax_in_fp32": Unread(True),
    "scale_attention_softmax_in_fp32": Unread(True),
    "scale_attn_weights": Only(True, silent=True),
    "mlp_type": Only("default", silent=True),
    "norm_type": Only("layer_norm", silent=True),
}


class _ErfWithoutBiases(Biases):
    """A key that says whether all matrices have a bias.

    If none has, megapipe computes GELU in its erf form. So only that form can then be converted.
    """

    def read(self, key: str, content: Json, problems: list[str]) -> Fields:
        if not content[key]:
            problems += expected(content, {"hidden_act": ("gelu",)})
        return super().read(key, content, problems)


STARCODER2 = PLAIN.but(
    "Starcoder2ForCausalLM",
    "every size; a window in all layers or in none",
    keys={
        "num_key_value_heads": Groups(2),
        "rms_norm_eps": None,
        "norm_epsilon": Same("norm_epsilon", 1e-5),
        "tie_word_embeddings": Not("untie_embeddings_and_output_weights", True),
        "hidden_act": Choice("no_bias_gelu_fusion", _GELU, "gelu_pytorch_tanh"),
        "use_bias": _ErfWithoutBiases(True, (*ATTENTION, *MLP)),
        "residual_dropout": Same("hidden_dropout", 0.0),
        "embedding_dropout": Twin("residual_dropout", 0.0, "--hidden-dropout is both"),
        "sliding_window": Window(None),
        **_STARCODER,
    },
    always=GPT,
    names={"mlp.linear_fc1": Layout("mlp.c_fc"), "mlp.linear_fc2": Layout("mlp.c_proj")},
)

# NVIDIA 2024. The file has the norms' weights minus 1, as --apply-layernorm-1p keeps them, so that
# nothing is added on the way.
NEMOTRON = LLAMA.but(
    "NemotronForCausalLM",
    "Nemotron-4 and Minitron",
    keys={
        "rms_norm_eps": None,
        "norm_eps": Same("norm_epsilon", 1e-5),
        "hidden_act": Only("relu2"),
        "rope_parameters": Rotation(share=0.5),
    },
    always={
        "normalization": "LayerNorm",
        "apply_layernorm_1p": True,
        "swiglu": False,
        "squared_relu": True,
    },
    names={"mlp.linear_fc1": Layout("mlp.up_proj")},
)

# Stability AI 2024: Llama with LayerNorm. StableLM 2 12B norms heads, each with its own weight, and
# is refused.
STABLELM = PLAIN.but(
    "StableLmForCausalLM",
    "StableLM and StableLM 2 without norms of heads",
    keys={
        "num_key_value_heads": Groups(32),
        "head_dim": None,
        "rms_norm_eps": None,
        "layer_norm_eps": Same("norm_epsilon", 1e-5),
        "rope_parameters": Rotation(share=0.25),
        "use_qkv_bias": Same("add_qkv_bias", False),
        # Each head's norm has a weight of its own there.
        "qk_layernorm": Only(False),
        "use_parallel_residual": Choice(_ORDER, {False: None, True: "one_norm"}, False),
        "hidden_dropout": Only(0.0),
    },
    always={"normalization": "LayerNorm"},
)

# Jais 2: Llama with LayerNorm, and a squared ReLU instead of the gate.
JAIS2 = LLAMA.but(
    "Jais2ForCausalLM",
    "every size",
    keys={
        "rms_norm_eps": None,
        "layer_norm_eps": Same("norm_epsilon", 1e-5),
        "hidden_act": Only("relu2"),
        "mlp_bias": Biases(True, MLP, {"attention_bias": (True, ATTENTION)}),
    },
    always={"normalization": "LayerNorm", "swiglu": False, "squared_relu": True},
    names={"mlp.linear_fc1": Layout("mlp.up_proj")},
)

# EleutherAI 2022. Attention and MLP of most models read the same input, each through its norm.
# rotary_pct and rotary_emb_base are the older keys; a quarter of the channels is the default.
GPT_NEOX = PLAIN.but(
    "GPTNeoXForCausalLM",
    "GPT-NeoX and Pythia, every size",
    keys={
        **dict.fromkeys(["rms_norm_eps", "num_key_value_heads", "head_dim"]),
        "layer_norm_eps": Same("norm_epsilon", 1e-5),
        "hidden_act": Choice("no_bias_gelu_fusion", GELU_ERF, "gelu"),
        "rope_parameters": Rotation(1e4, 0.25, "rotary_emb_base", "rotary_pct"),
        "use_parallel_residual": Choice(_ORDER, {True: "two_norms", False: None}, True),
        "attention_bias": Only(True),
        "hidden_dropout": Same("hidden_dropout", 0.0),
        "classifier_dropout": Unread(0.1),
    },
    always=GPT,
    names={
        **_QUERY_KEY_VALUE,
        "embedding.word_embeddings": Layout("gpt_neox.embed_in"),
        "decoder.final_layernorm": Layout("gpt_neox.final_layer_norm"),
        "output_layer": Layout("embed_out"),
    },
    layer="gpt_neox.layers.{n}.",
)

# Allal et al. 2023. GPT-2 with one key and value head. Its layers are plain linear ones, so that
# no weight is turned. Without multi_query the rows of c_attn have another order.
GPT_BIGCODE = GPT2.but(
    "GPTBigCodeForCausalLM",
    "StarCoder and SantaCoder: one key and value head for all queries",
    keys={
        "activation_function": Choice("no_bias_gelu_fusion", _GELU, "gelu_pytorch_tanh"),
        "scale_attn_by_inverse_layer_idx": None,
        "multi_query": Only(True),
        "num_key_value_heads": Only(1, silent=True),
        "attention_softmax_in_fp32": Unread(True),
        "scale_attention_softmax_in_fp32": Unread(True),
    },
    always={"group_query_attention": True, "num_query_groups": 1},
    names={
        "self_attention.linear_qkv": Rows("attn.c_attn"),
        "self_attention.linear_proj": Layout("attn.c_proj"),
        "mlp.linear_fc1": Layout("mlp.c_fc"),
        "mlp.linear_fc2": Layout("mlp.c_proj"),
    },
)

# Adept 2023. Queries and keys have a LayerNorm with a bias, head by head.
PERSIMMON = PLAIN.but(
    "PersimmonForCausalLM",
    "every size; half of the channels is rotated",
    keys={
        **dict.fromkeys(["rms_norm_eps", "num_key_value_heads", "head_dim"]),
        "layer_norm_eps": Same("norm_epsilon", 1e-5),
        "hidden_act": Only("relu2"),
        "rope_parameters": Rotation(share=0.5),
        "qk_layernorm": Same("qk_layernorm", True),
        # There it drops the MLP's output alone.
        "hidden_dropout": Only(0.0),
    },
    always=GPT | {"squared_relu": True},
    names={
        **_PERSIMMON,
        "decoder.final_layernorm": Layout("model.final_layernorm"),
    },
)
