"""OpenAI's gpt-oss."""

from __future__ import annotations

from megapipe.convert.huggingface.keys import Groups, Json, Only, Same, Unread
from megapipe.convert.huggingface.layers import FULL, SLIDING, LayerWindow
from megapipe.convert.huggingface.layouts import Alternating, Layout, TurnedExperts
from megapipe.convert.huggingface.rotation import Rotation
from megapipe.convert.huggingface.tables.llama import PLAIN, head_share

_ROPE = {
    "rope_theta": 150000.0,
    "rope_type": "yarn",
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}
_NAMES = {
    "self_attention.softmax_offset": Layout("self_attn.sinks"),
    "mlp.router": Layout("mlp.router"),
    "mlp.experts.linear_fc1.weight": Alternating("mlp.experts.gate_up_proj"),
    "mlp.experts.linear_fc1.bias": Alternating("mlp.experts.gate_up_proj_bias"),
    "mlp.experts.linear_fc2.weight": TurnedExperts("mlp.experts.down_proj"),
    "mlp.experts.linear_fc2.bias": Layout("mlp.experts.down_proj_bias"),
}


def _every_other(content: Json) -> list[str]:
    return [FULL if layer % 2 else SLIDING for layer in range(content["num_hidden_layers"])]


# 2025. Published in four bits (mxfp4), which an import reads as bfloat16, see mxfp4.py.
GPT_OSS = PLAIN.but(
    "GptOssForCausalLM",
    "every size, in mxfp4 too; attention sinks, a window in every other layer",
    keys={
        "num_key_value_heads": Groups(8),
        "head_dim": Same("kv_channels", 64, null=head_share),
        "rms_norm_eps": Same("norm_epsilon", 1e-5),
        "rope_parameters": Rotation(150000.0, missing=_ROPE),
        "attention_bias": Only(True),
        "sliding_window": LayerWindow(128, _every_other),
        "num_local_experts": Same("num_experts", 128),
        "num_experts_per_tok": Same("moe_router_topk", 4),
        "intermediate_size": Same("moe_ffn_hidden_size ffn_hidden_size"),
        "swiglu_alpha": Only(1.702),
        "swiglu_limit": Same("activation_func_clamp_value", 7.0),
        # Of the published files, with what other keys say, too.
        "experts_per_token": Unread(),
        "initial_context_length": Unread(),
    },
    always={
        "swiglu": False,
        "quick_geglu": True,
        "glu_linear_offset": 1.0,
        "softmax_type": "learnable",
        "add_qkv_bias": True,
        "add_bias_to": ("proj", "fc1", "fc2", "router"),
    },
    names=_NAMES,
)
