"""Families with parts of their own: factors, parallel halves, xIELU, biases of some matrices."""

from __future__ import annotations

from dataclasses import dataclass

from megapipe.config import ModelConfig
from megapipe.convert.huggingface.keys import (
    ATTENTION,
    MLP,
    Biases,
    Choice,
    Equals,
    Fields,
    Groups,
    Json,
    Meaning,
    Not,
    Only,
    Reciprocal,
    Same,
    Twin,
)
from megapipe.convert.huggingface.layers import AlwaysWindowed, by_pattern
from megapipe.convert.huggingface.layouts import ExpertHalves, Halves, Layout, OfNorms
from megapipe.convert.huggingface.rotation import Rotation
from megapipe.convert.huggingface.tables.gpt import GPT2
from megapipe.convert.huggingface.tables.layernorm import GELU_ERF, GPT
from megapipe.convert.huggingface.tables.llama import LLAMA, PLAIN, head_share


class _Scale(Same):
    """A config.json key with the factor on attention scores."""

    def write(self, key: str, model: ModelConfig) -> Fields:
        return {key: model.softmax_scale or model.head_dim**-0.5}


# IBM 2024: Llama with four factors. Scores are not divided by the root of the channels.
GRANITE = LLAMA.but(
    "GraniteForCausalLM",
    "Granite 3 and 4, the dense sizes without Mamba",
    keys={
        "embedding_multiplier": Same("mup_embedding_mult", 1.0),
        "residual_multiplier": Same("residual_multiplier", 1.0),
        "attention_multiplier": _Scale("softmax_scale", 1.0),
        "logits_scaling": Reciprocal("mup_output_mult", 1.0),
    },
)

# NAVER 2025: Granite with a norm after each half if a file says so, and logits that are multiplied.
HYPERCLOVAX = GRANITE.but(
    "HyperCLOVAXForCausalLM",
    "HyperCLOVA X SEED, every dense size",
    keys={
        "logits_scaling": Same("mup_output_mult", 1.0),
        "attention_multiplier": _Scale(
            "softmax_scale",
            None,
            null=lambda content: (content["head_dim"] or head_share(content)) ** -0.5,
        ),
        "head_dim": Same("kv_channels", None, null=head_share),
        "use_post_norm": Choice("norm_placement", {False: "pre", True: "sandwich"}, True),
    },
    names={
        "post_self_attn_layernorm": Layout("post_norm1"),
        "post_mlp_layernorm": Layout("post_norm2"),
    },
)

# Granite with experts in one tensor. Their weights are a softmax over the chosen ones.
GRANITEMOE = GRANITE.but(
    "GraniteMoeForCausalLM",
    "every size",
    keys={
        "mlp_bias": None,
        "attention_bias": Biases(False),
        "num_local_experts": Same("num_experts", 8),
        "num_experts_per_tok": Same("moe_router_topk", 2),
        "intermediate_size": Same("moe_ffn_hidden_size ffn_hidden_size"),
    },
    names={
        "mlp.router": Layout("block_sparse_moe.router.layer"),
        "mlp.experts.linear_fc1": ExpertHalves("block_sparse_moe.input_linear"),
        "mlp.experts.linear_fc2": Layout("block_sparse_moe.output_linear"),
    },
)

GRANITEMOESHARED = GRANITEMOE.but(
    "GraniteMoeSharedForCausalLM",
    "every size, with its shared expert or without",
    keys={
        "shared_intermediate_size": Same("moe_shared_expert_intermediate_size", 0, unset=0),
    },
    names={
        "mlp.shared_experts.linear_fc1": Halves("shared_mlp.input_linear"),
        "mlp.shared_experts.linear_fc2": Layout("shared_mlp.output_linear"),
    },
)

# Swiss AI 2025. Each MLP has two learned scalars of its activation.
APERTUS = PLAIN.but(
    "ApertusForCausalLM",
    "every size, with xIELU",
    keys={
        "rms_norm_eps": Same("norm_epsilon", 1e-5),
        "hidden_act": Only("xielu"),
        "attention_bias": Biases(False),
        "rope_parameters": Rotation(
            1.2e7,
            missing={
                "rope_theta": 1.2e7,
                "rope_type": "llama3",
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 8192,
            },
        ),
    },
    always={"swiglu": False, "xielu": True, "qk_layernorm": True},
    names={
        "input_layernorm": Layout("attention_layernorm"),
        "pre_mlp_layernorm": Layout("feedforward_layernorm"),
        "mlp.linear_fc1": Layout("mlp.up_proj"),
        "mlp.act_fn.alpha_p": Layout("mlp.act_fn.alpha_p"),
        "mlp.act_fn.alpha_n": Layout("mlp.act_fn.alpha_n"),
        "mlp.act_fn.xielu_beta": Layout("mlp.act_fn.beta"),
        "mlp.act_fn.xielu_eps": Layout("mlp.act_fn.eps"),
    },
)

# Microsoft 2023. Attention and MLP read the same normed input, and the head has a bias.
PHI = PLAIN.but(
    "PhiForCausalLM",
    "Phi-1, 1.5 and 2",
    keys={
        **dict.fromkeys(["rms_norm_eps", "head_dim"]),
        "layer_norm_eps": Same("norm_epsilon", 1e-5),
        "hidden_act": Choice("no_bias_gelu_fusion", GELU_ERF, "gelu_new"),
        "resid_pdrop": Same("hidden_dropout", 0.0),
        "embd_pdrop": Twin("resid_pdrop", 0.0, "--hidden-dropout is both"),
        "qk_layernorm": Same("qk_layernorm", False),
        "rope_parameters": Rotation(share=0.5),
    },
    always=GPT | {"parallel_attention_mlp": "one_norm", "add_bias_to": ("head",)},
    names={
        "decoder.final_layernorm": Layout("model.final_layernorm"),
        "self_attention.linear_proj": Layout("self_attn.dense"),
        "self_attention.q_layernorm": Layout("self_attn.q_layernorm"),
        "self_attention.k_layernorm": Layout("self_attn.k_layernorm"),
        "mlp.linear_fc1": Layout("mlp.fc1"),
        "mlp.linear_fc2": Layout("mlp.fc2"),
    },
)

# Cohere 2024: LayerNorm without a bias, one for both halves. Command R+ norms heads, each with its
# own weight, and is refused.
COHERE = PLAIN.but(
    "CohereForCausalLM",
    "Command R without norms of heads",
    keys={
        "rms_norm_eps": None,
        "layer_norm_eps": Same("norm_epsilon", 1e-5),
        "tie_word_embeddings": Not("untie_embeddings_and_output_weights", True),
        "rope_parameters": Rotation(5e5),
        "attention_bias": Biases(False),
        "logit_scale": Same("mup_output_mult", 0.0625),
        "use_qk_norm": Only(False),
    },
    always={
        "normalization": "LayerNorm",
        "no_norm_bias": True,
        "rotary_interleaved": True,
        "parallel_attention_mlp": "one_norm",
    },
)


COHERE2 = COHERE.but(
    "Cohere2ForCausalLM",
    "Command R7B and A; layers without a window rotate nothing",
    keys={
        "head_dim": Equals(head_share),
        "rope_parameters": Rotation(),
        "sliding_window": AlwaysWindowed(
            4096, by_pattern, {"sliding_window_pattern": 4}, plain=True
        ),
        "use_qk_norm": None,
    },
)


@dataclass(frozen=True)
class _FalconLayers(Meaning):
    """Falcon's config.json key new_decoder_architecture, and the keys that depend on it.

    The new architecture has query groups, and attention and MLP in parallel after one norm or two.
    The old one has one key and value head for all query heads, or one for each. Its attention and
    MLP are parallel after one norm, or in sequence.
    """

    def keys(self, key: str) -> Fields:
        others = {"num_kv_heads": None, "multi_query": True, "parallel_attn": True}
        return {key: False, "num_ln_in_parallel_attn": None, **others}

    def read(self, key: str, content: Json, problems: list[str]) -> Fields:
        is_new = bool(content[key])
        is_parallel = bool(content["parallel_attn"])
        norms = content["num_ln_in_parallel_attn"]
        if norms is None:
            norms = 2 if is_new else 1
        if norms > 1 + is_new or (is_new and not is_parallel):
            problems.append(f"{key} {is_new} has neither sequence nor {norms} norms")
        heads = content["num_attention_heads"]
        groups = 1 if content["multi_query"] else heads
        if is_new:
            groups = content["num_kv_heads"] or heads
        order = None
        if is_parallel:
            order = "two_norms" if norms == 2 else "one_norm"
        fields = Groups().read("groups", {"num_attention_heads": heads, "groups": groups}, problems)
        return fields | {"parallel_attention_mlp": order}

    def write(self, key: str, model: ModelConfig) -> Fields:
        order = model.parallel_attention_mlp
        groups = model.query_groups
        is_new = order == "two_norms" or (order is not None and 1 < groups < model.heads)
        return {
            key: is_new,
            # The class fills these two in.
            "num_ln_in_parallel_attn": (2 if order == "two_norms" else 1) if is_new else None,
            "num_kv_heads": groups if is_new else model.heads,
            "multi_query": is_new or groups == 1,
            "parallel_attn": order is not None,
        }


# Almazrouei et al. 2023. Rows of the fused weight are by group, as in Megatron-LM.
_FALCON = GPT2.but(
    "",
    "",
    keys={
        **{key: None for key in GPT2.keys if key != "tie_word_embeddings"},
        "num_hidden_layers": Same("num_layers"),
        "hidden_size": Same("hidden_size"),
        "num_attention_heads": Same("num_attention_heads"),
        "ffn_hidden_size": Same(
            "ffn_hidden_size", None, null=lambda content: 4 * content["hidden_size"]
        ),
        "max_position_embeddings": Same("max_position_embeddings", 2048),
        "layer_norm_epsilon": Same("norm_epsilon", 1e-5),
        "activation": Only("gelu"),
        "rope_parameters": Rotation(),
        "new_decoder_architecture": _FalconLayers(),
        "bias": Biases(False, (*ATTENTION, *MLP)),
        "alibi": Only(False),
        # The first is of attention's output there, too.
        "attention_dropout": Only(0.0),
        "hidden_dropout": Only(0.0),
    },
    always={
        "position_embedding_type": "rope",
        "no_bias_gelu_fusion": True,
        "attention_dropout": 0.0,
        "hidden_dropout": 0.0,
    },
)

FALCON = _FALCON.but(
    "FalconForCausalLM",
    "every size with rotation: 7B, 40B, 180B, Falcon 2; ALiBi's are refused",
    names={
        "embedding.word_embeddings": Layout("transformer.word_embeddings"),
        "embedding.position_embeddings": None,
        "input_layernorm": OfNorms("ln_attn", "input_layernorm"),
        "pre_mlp_layernorm": OfNorms("ln_mlp", "post_attention_layernorm"),
        "self_attention.linear_qkv": Layout("self_attention.query_key_value"),
        "self_attention.linear_proj": Layout("self_attention.dense"),
        "mlp.linear_fc1": Layout("mlp.dense_h_to_4h"),
        "mlp.linear_fc2": Layout("mlp.dense_4h_to_h"),
    },
)
