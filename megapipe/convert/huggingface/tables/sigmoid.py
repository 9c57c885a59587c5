"""Families with DeepSeek-V3's router, a sigmoid and a bias, on plain attention."""

from __future__ import annotations

from megapipe.convert.huggingface.depths import Depths
from megapipe.convert.huggingface.experts import (
    Chosen,
    DenseFirst,
    ExpertGroups,
    MlpTypes,
    Renormalised,
    SharedExperts,
)
from megapipe.convert.huggingface.keys import Groups, Meaning, Only, Same, Unread
from megapipe.convert.huggingface.layers import AlwaysWindowed, SwitchedWindow, by_pattern
from megapipe.convert.huggingface.layouts import Experts, Layout, Stack
from megapipe.convert.huggingface.rotation import RotaryDim, Rotation
from megapipe.convert.huggingface.tables.deepseek import SHARED
from megapipe.convert.huggingface.tables.llama import PLAIN, head_share
from megapipe.convert.huggingface.tables.qwen import EXPERTS

# DeepSeek-V3's choice of experts: a sigmoid, a bias for the choice alone, and groups that count by
# their two best experts. The weights of the chosen are divided by their sum, then multiplied.
_SIGMOID = PLAIN.but(
    "",
    "",
    keys={
        "num_key_value_heads": Groups(8),
        "rms_norm_eps": Same("norm_epsilon", 1e-5),
        "n_routed_experts": Same("num_experts"),
        "n_shared_experts": SharedExperts(1),
        "num_experts_per_tok": Same("moe_router_topk"),
        "moe_intermediate_size": Same("moe_ffn_hidden_size"),
        "routed_scaling_factor": Same("moe_router_topk_scaling_factor", 1.0, unset=1.0),
        "norm_topk_prob": Renormalised(),
        "n_group": ExpertGroups(2),
        # DeepSeek's keys, in some of the published files. transformers does not read them here.
        "moe_layer_freq": Only(1, silent=True),
        "scoring_func": Only("sigmoid", "noaux_tc", silent=True),
        "topk_method": Only("noaux_tc", silent=True),
    },
    always={
        # As transformers, whatever the activations are.
        "moe_router_dtype": "fp32",
        "moe_router_score_function": "sigmoid",
        "moe_router_enable_expert_bias": True,
    },
    names={
        **EXPERTS,
        **SHARED,
        "mlp.router.expert_bias": Layout("mlp.gate.e_score_correction_bias"),
    },
    aliases={"num_local_experts": "n_routed_experts"},
)

# Some families count the same experts under other keys.
_NUM_EXPERTS: dict[str, Meaning | None] = {
    "n_routed_experts": None,
    "n_shared_experts": None,
    "num_experts": Same("num_experts"),
}
# Keys of MiniMax's own program, which transformers does not read.
_MINIMAX: dict[str, Meaning | None] = {
    "attn_type_list": Unread(),
    "mtp_transformer_layers": Unread(1),
    "num_mtp_modules": Unread(3),
    "use_mtp": Unread(True),
    "qk_norm_type": Only("per_layer", silent=True),
    "shared_intermediate_size": Only(0, silent=True),
    "use_qk_norm": Only(True, silent=True),
    "use_routing_bias": Only(True, silent=True),
}
_HY_V3 = {
    "mlp.router": Layout("mlp.router.gate"),
    "mlp.router.expert_bias": Layout("mlp.expert_bias"),
    "mlp.shared_experts.linear_fc1": Stack("mlp.shared_mlp.gate_proj", "mlp.shared_mlp.up_proj"),
    "mlp.shared_experts.linear_fc2": Layout("mlp.shared_mlp.down_proj"),
}


# Zhipu 2025. A file need not state that half of the channels are rotated. The larger models norm
# heads, and Air does not.
GLM4_MOE = _SIGMOID.but(
    "Glm4MoeForCausalLM",
    "GLM-4.5 to 4.7 and Air, with multi-token prediction",
    keys={
        "rope_parameters": Rotation(share=0.5),
        "attention_bias": Same("add_qkv_bias", False),
        "use_qk_norm": Same("qk_layernorm", False),
        "first_k_dense_replace": DenseFirst(),
        "num_nextn_predict_layers": Depths(),
    },
    # Of GLM-4.5 and of Air.
    published=(92, 46),
)

# Upstage 2025: GLM-4.5 without a dense layer, and with all channels rotated.
SOLAR_OPEN = _SIGMOID.but(
    "SolarOpenForCausalLM",
    "every size; all layers have experts",
    keys={
        "head_dim": Same("kv_channels", 128, null=head_share),
        "rope_parameters": Rotation(1e6),
        "attention_bias": Same("add_qkv_bias", False),
        # All layers have experts, and no layer has this width.
        "intermediate_size": Same("ffn_hidden_size", 10240),
    },
)

# rednote-hilab 2025. The class's norm_topk_prob is false, which is refused; the published file has
# true.
DOTS1 = _SIGMOID.but(
    "Dots1ForCausalLM",
    "every size; a sliding window in all layers, in some or in none",
    keys={
        "num_key_value_heads": Groups(32),
        "rms_norm_eps": Same("norm_epsilon", 1e-6),
        "attention_bias": Only(False),
        "first_k_dense_replace": DenseFirst(),
        "n_shared_experts": SharedExperts(None),
        "norm_topk_prob": Renormalised(False),
        "sliding_window": SwitchedWindow(4096, 62, switch=False),
        # Published, and not read by transformers.
        "use_sliding_window": Unread(False),
    },
    always={"qk_layernorm": True},
)

# LG 2025. Layers with full attention have no rotation. Its class takes no null for the window, so
# a model whose layers all rotate and have no window is another family's. Its multi-token prediction
# has names of its own (mtp.), and is left out.
EXAONE_MOE = _SIGMOID.but(
    "ExaoneMoeForCausalLM",
    "K-EXAONE without its multi-token prediction; layers without a window rotate nothing",
    keys={
        **_NUM_EXPERTS,
        "num_key_value_heads": Groups(32),
        "num_shared_experts": SharedExperts(1),
        "routed_scaling_factor": Same("moe_router_topk_scaling_factor", 2.5, unset=1.0),
        "mlp_layer_types": MlpTypes("first_k_dense_replace"),
        # A pattern of 4: three layers with a window, then one without.
        "sliding_window": AlwaysWindowed(
            4096, by_pattern, {"sliding_window_pattern": 4}, plain=True
        ),
    },
    always={"qk_layernorm": True},
    names={"mlp.router.expert_bias": Layout("mlp.e_score_correction_bias")},
    aliases={},
)

# Tencent's Hunyuan. In the file the experts' parts have other names than in transformers' class.
# No key says that weights are divided by their sum, since they always are.
HY_V3 = _SIGMOID.but(
    "HYV3ForCausalLM",
    "every size",
    keys={
        **_NUM_EXPERTS,
        **dict.fromkeys(["n_group", "norm_topk_prob", "routed_scaling_factor"]),
        "head_dim": Same("kv_channels", 128, null=head_share),
        "rope_parameters": Rotation(11_158_840.0),
        "attention_bias": Only(False),
        "mlp_bias": Only(False),
        "num_experts_per_tok": Chosen("moe_router_topk"),
        "num_shared_experts": SharedExperts(1),
        "router_scaling_factor": Same("moe_router_topk_scaling_factor", 2.826, unset=1.0),
        "mlp_layer_types": MlpTypes(),
        # Of the sum in 16 bits.
        "enable_moe_fp32_combine": Unread(True),
    },
    always={"qk_layernorm": True},
    names=_HY_V3,
    aliases={},
)

# MiniMax 2025. Experts have Mixtral's names. The weights of the chosen are always divided by their
# sum. Its multi-token prediction is in no published file.
MINIMAX_M2 = _SIGMOID.but(
    "MiniMaxM2ForCausalLM",
    "every size; one norm of all heads' queries, and one of all keys",
    keys={
        **dict.fromkeys(["n_routed_experts", "n_shared_experts", "moe_intermediate_size"]),
        **dict.fromkeys(["norm_topk_prob", "n_group", "routed_scaling_factor"]),
        "rms_norm_eps": Same("norm_epsilon", 1e-6),
        "head_dim": Same("kv_channels", 128, null=head_share),
        "rope_parameters": RotaryDim(5e6, share=1.0),
        "num_local_experts": Same("num_experts"),
        "num_experts_per_tok": Chosen("moe_router_topk"),
        "intermediate_size": Same("moe_ffn_hidden_size ffn_hidden_size"),
        "router_jitter_noise": Same("moe_input_jitter_eps", 0.0, unset=0.0),
        **_MINIMAX,
    },
    always={"qk_layernorm": True, "qk_layernorm_all_heads": True},
    names={
        "mlp.router": Layout("block_sparse_moe.gate"),
        "mlp.router.expert_bias": Layout("block_sparse_moe.e_score_correction_bias"),
        "mlp.experts.linear_fc1": Experts(
            "block_sparse_moe.experts.{e}.w1", "block_sparse_moe.experts.{e}.w3"
        ),
        "mlp.experts.linear_fc2": Experts("block_sparse_moe.experts.{e}.w2"),
    },
    aliases={"num_experts": "num_local_experts"},
)
