"""Baidu's ERNIE 4.5 with experts."""

from __future__ import annotations

from megapipe.convert.huggingface.experts import Chosen, LayerRange, SharedExperts
from megapipe.convert.huggingface.keys import Groups, Only, Same
from megapipe.convert.huggingface.layouts import Row
from megapipe.convert.huggingface.tables.deepseek import SHARED
from megapipe.convert.huggingface.tables.dense import ERNIE4_5
from megapipe.convert.huggingface.tables.qwen import EXPERTS

# Experts are chosen by a softmax over all of them plus a bias. The weights of the chosen are
# divided by their sum. Biases of the layers are refused, because experts have none there.
ERNIE4_5_MOE = ERNIE4_5.but(
    "Ernie4_5_MoeForCausalLM",
    "every text size without biases",
    keys={
        "num_key_value_heads": Groups(4),
        "head_dim": None,
        "use_bias": Only(False),
        "moe_intermediate_size": Same("moe_ffn_hidden_size", 1536),
        "moe_k": Chosen("moe_router_topk", 6),
        "moe_num_experts": Same("num_experts", 64),
        "moe_num_shared_experts": SharedExperts(2),
        "moe_layer_start_index": LayerRange(),
        "moe_norm_min": Only(1e-12, silent=True),
    },
    always={
        "moe_router_dtype": "fp32",
        "moe_router_enable_expert_bias": True,
    },
    names={
        **EXPERTS,
        **SHARED,
        "mlp.router.expert_bias": Row("mlp.moe_statics.e_score_correction_bias"),
    },
    aliases={"num_experts": "moe_num_experts", "num_experts_per_tok": "moe_k"},
)
