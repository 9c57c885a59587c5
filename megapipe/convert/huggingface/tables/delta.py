"""Qwen3-Next and Qwen3.5, whose layers are mostly gated delta nets."""

from __future__ import annotations

from megapipe.config import ModelConfig
from megapipe.convert.huggingface.keys import Biases, Groups, Not, Only, Same, Unread
from megapipe.convert.huggingface.layers import DeltaLayers
from megapipe.convert.huggingface.layouts import GatedRows, KeyHeads, Layout, Stack, Taps
from megapipe.convert.huggingface.rotation import Rotation
from megapipe.convert.huggingface.tables.llama import PLAIN
from megapipe.convert.huggingface.tables.qwen import EXPERTS, QWEN3_MOE


def _mixed(model: ModelConfig) -> list[int]:
    """Return [rows of queries, rows of keys, rows of values]."""
    keys = model.linear_num_key_heads * model.linear_key_head_dim
    return [keys, keys, model.delta_values]


def _apart(model: ModelConfig) -> list[list[int]]:
    """Return, for each of Qwen3.5's four tensors, [number of rows of each matrix in the tensor]."""
    heads = [model.linear_num_value_heads]
    return [_mixed(model), [model.delta_values], heads, heads]


def _fused(model: ModelConfig) -> list[list[int]]:
    """Return, for each of Qwen3-Next's two tensors, [number of rows].

    The rows are in the order of key heads already, so each tensor counts as one matrix.
    """
    return [[sum(_mixed(model)) + model.delta_values], [2 * model.linear_num_value_heads]]


_KEYS = {
    "num_key_value_heads": Groups(4),
    "head_dim": Same("kv_channels", 256),
    "rope_parameters": Rotation(share=0.25),
    "attention_bias": Biases(False),
    "layer_types": DeltaLayers(),
    "linear_conv_kernel_dim": Same("linear_conv_kernel_dim", 4),
    "linear_key_head_dim": Same("linear_key_head_dim", 128),
    "linear_value_head_dim": Same("linear_value_head_dim", 128),
    "linear_num_key_heads": Same("linear_num_key_heads", 16),
    "linear_num_value_heads": Same("linear_num_value_heads", 32),
}
# Published files of Qwen3.5 have keys that its class does not read.
_PUBLISHED = {
    "attn_output_gate": Only(True, silent=True),
    "output_gate_type": Only("swish", "silu", silent=True),
    **dict.fromkeys(
        ("mamba_ssm_dtype", "mtp_num_hidden_layers", "mtp_use_dedicated_embeddings"), Unread()
    ),
}
_NAMES = {
    "self_attention.linear_qkv": GatedRows(
        "self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"
    ),
    "self_attention.in_proj": KeyHeads(
        "linear_attn.in_proj_qkv",
        "linear_attn.in_proj_z",
        "linear_attn.in_proj_b",
        "linear_attn.in_proj_a",
        matrices=_apart,
    ),
    "self_attention.conv1d": Taps("linear_attn.conv1d", matrices=lambda model: [_mixed(model)]),
    "self_attention.A_log": Layout("linear_attn.A_log"),
    "self_attention.dt_bias": Layout("linear_attn.dt_bias"),
    "self_attention.out_norm": Layout("linear_attn.norm"),
    "self_attention.out_proj": Layout("linear_attn.out_proj"),
}
_SHARED_EXPERT = {
    "mlp.shared_experts.linear_fc1": Stack(
        "mlp.shared_expert.gate_proj", "mlp.shared_expert.up_proj"
    ),
    "mlp.shared_experts.linear_fc2": Layout("mlp.shared_expert.down_proj"),
    "mlp.shared_experts.gate_weight": Layout("mlp.shared_expert_gate.weight"),
}
_ALWAYS = {"qk_layernorm": True, "attention_output_gate": True, "apply_layernorm_1p": True}

# Yang et al. 2024 (gated delta net). Norms hold their weights minus 1, and a quarter of a head's
# channels is rotated.
QWEN3_NEXT = QWEN3_MOE.but(
    "Qwen3NextForCausalLM",
    "every size, dense layers in between too; without its multi-token prediction",
    keys=_KEYS
    | {
        "num_key_value_heads": Groups(2),
        "sliding_window": None,
        "use_sliding_window": Only(False, silent=True),
        "num_experts": Same("num_experts", 512),
        "num_experts_per_tok": Same("moe_router_topk", 10),
        "moe_intermediate_size": Same("moe_ffn_hidden_size", 512),
        "intermediate_size": Same("ffn_hidden_size", 5632),
        "norm_topk_prob": Not("moe_router_pre_softmax", True),
        "shared_expert_intermediate_size": Same("moe_shared_expert_intermediate_size", 512),
    },
    always=_ALWAYS | {"moe_shared_expert_gate": True},
    names=_NAMES
    | _SHARED_EXPERT
    | {
        "self_attention.in_proj": KeyHeads(
            "linear_attn.in_proj_qkvz", "linear_attn.in_proj_ba", matrices=_fused
        )
    },
)

QWEN3_5 = PLAIN.but(
    "Qwen3_5ForCausalLM",
    "the text model of every dense size, of files of qwen3_5 too; without multi-token prediction",
    keys=_KEYS | _PUBLISHED,
    always=_ALWAYS,
    names=_NAMES,
)

# All layers have experts of moe_intermediate_size. The weights are a softmax over the chosen ones.
QWEN3_5_MOE = QWEN3_5.but(
    "Qwen3_5MoeForCausalLM",
    "the text model of every size, of files of qwen3_5_moe too; without multi-token prediction",
    keys={
        "num_key_value_heads": Groups(2),
        "intermediate_size": None,
        "num_experts": Same("num_experts", 256),
        "num_experts_per_tok": Same("moe_router_topk", 8),
        "moe_intermediate_size": Same("moe_ffn_hidden_size ffn_hidden_size", 512),
        "shared_expert_intermediate_size": Same("moe_shared_expert_intermediate_size", 512),
    },
    always={"moe_shared_expert_gate": True},
    names=EXPERTS | _SHARED_EXPERT,
)
