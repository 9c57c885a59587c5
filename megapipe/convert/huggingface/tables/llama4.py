"""Meta's Llama 4."""

from __future__ import annotations

from megapipe.config import ModelConfig
from megapipe.convert.huggingface.experts import SparseList
from megapipe.convert.huggingface.keys import (
    LAYERS,
    Biases,
    Fields,
    Groups,
    Json,
    Meaning,
    Same,
    Unread,
)
from megapipe.convert.huggingface.layers import FULL, RotatedLayers, of_layers
from megapipe.convert.huggingface.layouts import Layout, Stack, TurnedExperts, TurnedHalves
from megapipe.convert.huggingface.rotation import Rotation
from megapipe.convert.huggingface.tables.llama import PLAIN, head_share

_CHUNKED = "chunked_attention"


class _Layers(RotatedLayers):
    """The key no_rope_layers, with what else differs between layers with rotation and without.

    Layers with rotation norm queries and keys if use_qk_norm is true. layer_types says which layers
    attend within chunks of attention_chunk_size tokens. If it is missing, the layers with rotation
    do.
    """

    def keys(self, key: str) -> Fields:
        more = {"use_qk_norm": True, "attention_chunk_size": 8192, "layer_types": None}
        return super().keys(key) | more

    def read(self, key: str, content: Json, problems: list[str]) -> Fields:
        # An empty list is none.
        layers = super().read(key, {**content, key: content[key] or None}, problems)[LAYERS]
        kinds = content["layer_types"]
        if kinds is not None and (len(kinds) < len(layers) or {*kinds} - {FULL, _CHUNKED}):
            problems.append(f"layer_types is a list of {FULL} or {_CHUNKED} for all layers")
            return {}
        for number, layer in enumerate(layers):
            rotates = layer["position_embedding_type"] == "rope"
            chunked = rotates if kinds is None else kinds[number] == _CHUNKED
            layer["qk_l2_norm"] = bool(rotates and content["use_qk_norm"])
            layer["attention_chunk_size"] = content["attention_chunk_size"] if chunked else None
        return {LAYERS: layers}

    def write(self, key: str, model: ModelConfig) -> Fields:
        chunks = of_layers(model, "attention_chunk_size")
        return super().write(key, model) | {
            "use_qk_norm": any(of_layers(model, "qk_l2_norm")),
            "attention_chunk_size": next((size for size in chunks if size), 8192),
            "layer_types": [_CHUNKED if size else FULL for size in chunks],
        }


class _Temperature(Meaning):
    """The key attn_temperature_tuning: whether queries grow with their position.

    They are the queries of layers without rotation.
    """

    def keys(self, key: str) -> Fields:
        return {key: True, "attn_scale": 0.1, "floor_scale": 8192}

    def read(self, key: str, content: Json, problems: list[str]) -> Fields:
        # Older files have a 4 for true.
        if not content[key]:
            return {}
        return {
            "attention_temperature_beta": content["attn_scale"],
            "attention_temperature_length": content["floor_scale"],
        }

    def write(self, key: str, model: ModelConfig) -> Fields:
        beta = model.attention_temperature_beta
        return {
            key: beta > 0,
            "attn_scale": beta or 0.1,
            "floor_scale": model.attention_temperature_length,
        }


_NAMES = {
    "mlp.linear_fc1": Stack("feed_forward.gate_proj", "feed_forward.up_proj"),
    "mlp.linear_fc2": Layout("feed_forward.down_proj"),
    "mlp.router": Layout("feed_forward.router"),
    "mlp.experts.linear_fc1.weight": TurnedHalves("feed_forward.experts.gate_up_proj"),
    "mlp.experts.linear_fc2.weight": TurnedExperts("feed_forward.experts.down_proj"),
    "mlp.shared_experts.linear_fc1": Stack(
        "feed_forward.shared_expert.gate_proj", "feed_forward.shared_expert.up_proj"
    ),
    "mlp.shared_experts.linear_fc2": Layout("feed_forward.shared_expert.down_proj"),
}

# 2025. A token's expert is chosen by its logit. The expert's input is multiplied by the sigmoid of
# that logit, and an expert that all tokens share is added.
LLAMA4 = PLAIN.but(
    "Llama4ForCausalLM",
    "the text model of every size, of files of llama4 too; attention in chunks",
    keys={
        "num_key_value_heads": Groups(8),
        "head_dim": Same("kv_channels", 128, null=head_share),
        "rms_norm_eps": Same("norm_epsilon", 1e-5),
        "rope_parameters": Rotation(5e5),
        "attention_bias": Biases(False),
        "num_local_experts": Same("num_experts", 16),
        # The weights of several experts would be divided by their sum.
        "num_experts_per_tok": Same("moe_router_topk", 1, only=(1,)),
        "intermediate_size": Same("moe_ffn_hidden_size moe_shared_expert_intermediate_size"),
        "intermediate_size_mlp": Same("ffn_hidden_size", 16384),
        "moe_layers": SparseList("interleave_moe_layer_step"),
        "router_jitter_noise": Unread(0.0),
        "no_rope_layers": _Layers(),
        "attn_temperature_tuning": _Temperature(),
        "for_llm_compressor": Unread(False),
    },
    always={
        "rotary_interleaved": True,
        "moe_router_score_function": "sigmoid",
        "moe_apply_probs_on_input": True,
    },
    names=_NAMES,
)
