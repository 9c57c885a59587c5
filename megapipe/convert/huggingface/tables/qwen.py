"""Qwen, dense and with experts, and Mixtral."""

from __future__ import annotations

from megapipe.convert.huggingface.experts import SparseStep
from megapipe.convert.huggingface.keys import Groups, Not, Only, Same
from megapipe.convert.huggingface.layers import SwitchedWindow, Window
from megapipe.convert.huggingface.layouts import Experts, Layout, Stack
from megapipe.convert.huggingface.rotation import Rotation
from megapipe.convert.huggingface.tables.llama import PLAIN, head_share

# Queries, keys and values have a bias, whatever is said, and no other layer has one.
QWEN2 = PLAIN.but(
    "Qwen2ForCausalLM",
    "every dense size; a sliding window in all layers, in some or in none",
    keys={
        "num_key_value_heads": Groups(32),
        "sliding_window": SwitchedWindow(),
        # True in models that see pictures.
        "use_mrope": Only(False, silent=True),
    },
    always={"add_qkv_bias": True},
)

# The bias of Qwen2 is gone. Queries and keys are normed head by head, before their rotation.
QWEN3 = PLAIN.but(
    "Qwen3ForCausalLM",
    "every dense size; a sliding window in all layers, in some or in none",
    keys={
        "num_key_value_heads": Groups(32),
        "head_dim": Same("kv_channels", 128, null=head_share),
        "attention_bias": Only(False, silent=True),
        "sliding_window": SwitchedWindow(),
    },
    always={"qk_layernorm": True},
)

# All layers have experts of intermediate_size, so that the width of an MLP is nowhere needed.
# The weights are a softmax over the chosen experts.
MIXTRAL = PLAIN.but(
    "MixtralForCausalLM",
    "every size",
    keys={
        "num_key_value_heads": Groups(8),
        "rms_norm_eps": Same("norm_epsilon", 1e-5),
        "rope_parameters": Rotation(1e6),
        "sliding_window": Window(None),
        "num_local_experts": Same("num_experts"),
        "num_experts_per_tok": Same("moe_router_topk"),
        "intermediate_size": Same("moe_ffn_hidden_size ffn_hidden_size"),
        "router_jitter_noise": Same("moe_input_jitter_eps", 0.0, unset=0.0),
    },
    names={
        "mlp.router": Layout("block_sparse_moe.gate"),
        "mlp.experts.linear_fc1": Experts(
            "block_sparse_moe.experts.{e}.w1", "block_sparse_moe.experts.{e}.w3"
        ),
        "mlp.experts.linear_fc2": Experts("block_sparse_moe.experts.{e}.w2"),
    },
)

EXPERTS = {
    "mlp.router": Layout("mlp.gate"),
    "mlp.experts.linear_fc1": Experts("mlp.experts.{e}.gate_proj", "mlp.experts.{e}.up_proj"),
    "mlp.experts.linear_fc2": Experts("mlp.experts.{e}.down_proj"),
}
"""Names of the router and of experts that most families have."""

_QWEN_EXPERTS = {
    "num_experts": Same("num_experts"),
    "num_experts_per_tok": Same("moe_router_topk"),
    "moe_intermediate_size": Same("moe_ffn_hidden_size"),
    "norm_topk_prob": Not("moe_router_pre_softmax", False),
    "decoder_sparse_step": SparseStep(),
}

# The shared expert has a gate, and its own name. Dense layers in between have intermediate_size.
QWEN2_MOE = QWEN2.but(
    "Qwen2MoeForCausalLM",
    "every size, with its shared expert, dense layers in between too",
    keys={
        **_QWEN_EXPERTS,
        "num_key_value_heads": Groups(16),
        "qkv_bias": Only(True, silent=True),
        # By its own rule transformers gives no layer a window.
        "sliding_window": SwitchedWindow(stated=True),
        "shared_expert_intermediate_size": Same("moe_shared_expert_intermediate_size"),
    },
    always={"moe_shared_expert_gate": True},
    names={
        **EXPERTS,
        "mlp.shared_experts.linear_fc1": Stack(
            "mlp.shared_expert.gate_proj", "mlp.shared_expert.up_proj"
        ),
        "mlp.shared_experts.linear_fc2": Layout("mlp.shared_expert.down_proj"),
        "mlp.shared_experts.gate_weight": Layout("mlp.shared_expert_gate.weight"),
    },
    aliases={"num_local_experts": "num_experts"},
)

# A window is in all layers: the class does not read layer_types, as Qwen3's does.
QWEN3_MOE = QWEN3.but(
    "Qwen3MoeForCausalLM",
    "every size, dense layers in between too",
    keys={
        **_QWEN_EXPERTS,
        "num_key_value_heads": Groups(4),
        "head_dim": PLAIN.keys["head_dim"],
        "sliding_window": SwitchedWindow(typed=False),
    },
    names=EXPERTS,
    aliases={"num_local_experts": "num_experts"},
)
