"""DeepSeek-V2 and V3: latent attention, and experts chosen by group."""

from __future__ import annotations

from megapipe.convert.huggingface.depths import Depths
from megapipe.convert.huggingface.experts import (
    DenseFirst,
    ExpertGroups,
    MlpTypes,
    Renormalised,
    SharedExperts,
)
from megapipe.convert.huggingface.keys import Equals, Fields, Json, Not, Only, Same
from megapipe.convert.huggingface.layouts import Layout, Stack
from megapipe.convert.huggingface.rotation import LatentRotation
from megapipe.convert.huggingface.tables.llama import PLAIN
from megapipe.convert.huggingface.tables.qwen import EXPERTS

SHARED = {
    "mlp.shared_experts.linear_fc1": Stack(
        "mlp.shared_experts.gate_proj", "mlp.shared_experts.up_proj"
    ),
    "mlp.shared_experts.linear_fc2": Layout("mlp.shared_experts.down_proj"),
}


class _Epsilon(Same):
    """A config.json key with the epsilon of norms, except of the norms of latents.

    transformers gives 1e-6 to the norms of latents, whatever the key says.
    """

    def read(self, key: str, content: Json, problems: list[str]) -> Fields:
        other = None if content[key] == 1e-6 else 1e-6
        return super().read(key, content, problems) | {"latent_norm_epsilon": other}


_LATENT = PLAIN.but(
    "",
    "",
    keys={
        "num_key_value_heads": Equals(lambda content: content["num_attention_heads"]),
        # transformers calls the rotated channels a head.
        "head_dim": Equals(lambda content: content["qk_rope_head_dim"]),
        "q_lora_rank": Same("q_lora_rank", 1536),
        "kv_lora_rank": Same("kv_lora_rank"),
        "qk_nope_head_dim": Same("qk_head_dim"),
        "qk_rope_head_dim": Same("qk_pos_emb_head_dim"),
        "qk_head_dim": Equals(
            lambda content: content["qk_nope_head_dim"] + content["qk_rope_head_dim"]
        ),
        "v_head_dim": Same("v_head_dim"),
        "rms_norm_eps": _Epsilon("norm_epsilon", 1e-6),
        "attention_bias": Only(False),
        "rope_parameters": LatentRotation(),
    },
    always={
        "multi_latent_attention": True,
        "qk_layernorm": True,
    },
    names={
        "self_attention.linear_qkv": None,
        "self_attention.linear_q_proj": Layout("self_attn.q_proj"),
        "self_attention.linear_q_down_proj": Layout("self_attn.q_a_proj"),
        "self_attention.q_layernorm": Layout("self_attn.q_a_layernorm"),
        "self_attention.linear_q_up_proj": Layout("self_attn.q_b_proj"),
        "self_attention.linear_kv_down_proj": Layout("self_attn.kv_a_proj_with_mqa"),
        "self_attention.kv_layernorm": Layout("self_attn.kv_a_layernorm"),
        "self_attention.linear_kv_up_proj": Layout("self_attn.kv_b_proj"),
    },
)

_EXPERTS = {
    "n_routed_experts": Same("num_experts"),
    "n_shared_experts": SharedExperts(2),
    "num_experts_per_tok": Same("moe_router_topk"),
    "moe_intermediate_size": Same("moe_ffn_hidden_size"),
    "first_k_dense_replace": DenseFirst(),
    "routed_scaling_factor": Same("moe_router_topk_scaling_factor", 1.0, unset=1.0),
    "moe_layer_freq": Only(1),
    "mlp_bias": Only(False, silent=True),
}

# A group of experts counts by its best one, as in DeepSeek's own program. Megatron-LM takes a sum.
# transformers ignores norm_topk_prob, which DeepSeek's program reads: true is thus refused.
V2 = _LATENT.but(
    "DeepseekV2ForCausalLM",
    "every size, V2-Lite too",
    keys={
        **_EXPERTS,
        "norm_topk_prob": Only(False),
        "scoring_func": Only("softmax"),
        "n_group": ExpertGroups(1, None, None, method="group_limited_greedy"),
    },
    always={
        "moe_router_dtype": "fp32",
        "moe_router_score_function": "softmax",
        "moe_router_pre_softmax": True,
    },
    names={**EXPERTS, **SHARED},
    aliases={"num_local_experts": "n_routed_experts"},
)

# DeepSeek-AI 2024, sections 2.1 and 2.2. The defaults of experts are the published model's, so that
# a file without routed_scaling_factor means 2.5, and not 1.
V3 = _LATENT.but(
    "DeepseekV3ForCausalLM",
    "every size, plain positions or yarn from 4096; multi-token prediction too",
    keys={
        **_EXPERTS,
        "n_shared_experts": SharedExperts(1),
        "routed_scaling_factor": Same("moe_router_topk_scaling_factor", 2.5, unset=1.0),
        "num_key_value_heads": Equals(lambda content: content["num_attention_heads"], 128),
        "norm_topk_prob": Renormalised(),
        "scoring_func": Only("sigmoid"),
        "topk_method": Only("noaux_tc"),
        "rope_interleave": Only(True),
        "n_group": ExpertGroups(2, 8, 4),
        "num_nextn_predict_layers": Depths(),
    },
    always={
        "moe_router_dtype": "fp32",
        "moe_router_score_function": "sigmoid",
        "moe_router_enable_expert_bias": True,
    },
    names={
        **EXPERTS,
        **SHARED,
        "mlp.router.expert_bias": Layout("mlp.gate.e_score_correction_bias"),
    },
    published=(61,),
    aliases={"num_local_experts": "n_routed_experts"},
)

# Tencent's Youtu-LLM. Its attention is DeepSeek-V3's, with all channels under the same names.
YOUTU = _LATENT.but(
    "YoutuForCausalLM",
    "every size: DeepSeek's latent attention without experts",
    keys={
        "num_key_value_heads": Equals(lambda content: content["num_attention_heads"], 16),
        "tie_word_embeddings": Not("untie_embeddings_and_output_weights", True),
        "rope_interleave": Only(True),
    },
)

# Kimi's program is DeepSeek-V3's under a name of its own, and transformers has none for it.
KIMI_K2 = V3.but(
    "DeepseekV3ForCausalLM",
    "Kimi K2: a DeepSeek-V3, and without its config.json exported as one",
    computed_as="deepseek_v3",
)

# Zhipu 2026, GLM-4.7-Flash: DeepSeek-V3's layers with other defaults, and a list of dense layers.
GLM4_MOE_LITE = V3.but(
    "Glm4MoeLiteForCausalLM",
    "GLM-4.7-Flash",
    keys={
        "first_k_dense_replace": None,
        "mlp_layer_types": MlpTypes(),
        "num_key_value_heads": Equals(lambda content: content["num_attention_heads"], 20),
        "q_lora_rank": Same("q_lora_rank", 768),
        "rms_norm_eps": _Epsilon("norm_epsilon", 1e-5),
        "routed_scaling_factor": Same("moe_router_topk_scaling_factor", 1.8, unset=1.0),
        "n_group": ExpertGroups(2),
        "moe_layer_freq": Only(1, silent=True),
        "scoring_func": Only("sigmoid", silent=True),
        "topk_method": Only("noaux_tc", silent=True),
    },
    published=(47,),
)
