"""Each flag of the architecture in Megatron-LM's list changes the model, causes an equality, or is refused and why."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from tiny import GPT2, LLAMA, SEQ, VOCAB

from megapipe.config import Config, ModelConfig
from megapipe.distributed.axis import Axis
from megapipe.distributed.layout import saved_tensors
from megapipe.flags.noop_flags import NOOP_FLAGS
from megapipe.flags.parse import flags_of
from megapipe.flags.rules import reason
from megapipe.models.gpt import GPTModel
from megapipe.partition.spans import LayerSpan
from megapipe.tensor_parallel.rng import initialize

TOKENS = torch.randint(0, VOCAB, (2, SEQ), generator=torch.Generator().manual_seed(2))
MOE = replace(LLAMA, num_experts=6, moe_ffn_hidden_size=16)
BIASED = replace(MOE, moe_router_score_function="sigmoid")
LATENT = replace(
    LLAMA,
    group_query_attention=False,
    multi_latent_attention=True,
    qk_head_dim=6,
    qk_pos_emb_head_dim=16,
    v_head_dim=10,
    rotary_scaling_factor=4.0,
    mscale=1.0,
)
YARN = replace(LLAMA, position_embedding_type="yarn", rotary_base=20.0, rotary_scaling_factor=4.0)
YARN = replace(YARN, yarn_original_max_position_embeddings=5, yarn_beta_fast=0.9, yarn_beta_slow=0.3)
YARN = replace(YARN, no_yarn_correction_range_round_to_int=True, softmax_scale=3.0)
DELTA = replace(
    LLAMA,
    experimental_attention_variant="gated_delta_net",
    linear_attention_freq="4",
    linear_key_head_dim=4,
    linear_value_head_dim=4,
    linear_num_key_heads=2,
    linear_num_value_heads=4,
)
LONG = replace(LLAMA, position_embedding_type="longrope", longrope_original_max_position_embeddings=SEQ)
LONG = replace(LONG, longrope_short_factor=(1.0, 1.5, 2.0, 4.0), longrope_long_factor=(2.0, 3.0, 5.0, 9.0))
NOPE = replace(LLAMA, position_embedding_type="none", softmax_scale=3.0, attention_temperature_length=2)
CHANGES: list[tuple[ModelConfig, dict[str, Any]]] = [
    (GPT2, {"num_layers": 2}),
    (GPT2, {"hidden_size": 64}),
    (GPT2, {"ffn_hidden_size": 40}),
    (GPT2, {"num_attention_heads": 2}),
    (GPT2, {"kv_channels": 4}),
    (LLAMA, {"group_query_attention": False}),
    (LLAMA, {"num_query_groups": 1}),
    (GPT2, {"max_position_embeddings": 40}),
    (GPT2, {"position_embedding_type": "rope"}),
    (GPT2, {"position_embedding_type": "none"}),
    (LLAMA, {"rotary_base": 100.0}),
    (LLAMA, {"rotary_percent": 0.5}),
    (LLAMA, {"rotary_interleaved": True}),
    (replace(LLAMA, rotary_base=1e6), {"use_rope_scaling": True}),
    (replace(LLAMA, rotary_base=1e6, use_rope_scaling=True), {"rope_scaling_factor": 32.0}),
    (GPT2, {"padded_vocab_size": 72}),
    (GPT2, {"normalization": "RMSNorm"}),
    (GPT2, {"norm_epsilon": 1e-2}),
    (LLAMA, {"swiglu": False}),
    (GPT2, {"squared_relu": True}),
    (GPT2, {"quick_geglu": True}),
    (GPT2, {"geglu": True}),
    (GPT2, {"xielu": True}),
    (LLAMA, {"activation_func_clamp_value": 0.01}),
    (LLAMA, {"glu_linear_offset": 1.0}),
    (GPT2, {"mup_embedding_mult": 2.0}),
    (GPT2, {"mup_output_mult": 2.0}),
    (GPT2, {"residual_multiplier": 2.0}),
    (GPT2, {"parallel_attention_mlp": "one_norm"}),
    (GPT2, {"parallel_attention_mlp": "two_norms"}),
    (replace(LLAMA, normalization="LayerNorm"), {"no_norm_bias": True}),
    (LLAMA, {"add_bias_to": ("fc1",)}),
    (MOE, {"moe_apply_probs_on_input": True}),
    (replace(LATENT, qk_layernorm=True), {"latent_norm_epsilon": 0.1}),
    (GPT2, {"no_bias_gelu_fusion": True}),
    (GPT2, {"disable_bias_linear": True}),
    (LLAMA, {"add_qkv_bias": True}),
    (GPT2, {"untie_embeddings_and_output_weights": True}),
    (LLAMA, {"qk_layernorm": True}),
    (replace(LLAMA, group_query_attention=False), {"multi_latent_attention": True}),
    (LATENT, {"q_lora_rank": 8}),
    (LATENT, {"kv_lora_rank": 8}),
    (LATENT, {"qk_head_dim": 8}),
    (LATENT, {"qk_pos_emb_head_dim": 8}),
    (LATENT, {"v_head_dim": 8}),
    (LATENT, {"rope_type": "rope"}),
    (LATENT, {"rotary_scaling_factor": 2.0}),
    (LATENT, {"mscale": 2.0}),
    (LATENT, {"mscale_all_dim": 2.0}),
    (LLAMA, {"window_size": "2,0"}),
    (LLAMA, {"norm_placement": "post"}),
    (LLAMA, {"norm_placement": "sandwich"}),
    (LLAMA, {"softmax_scale": 3.0}),
    (replace(LLAMA, qk_layernorm=True), {"qk_layernorm_all_heads": True}),
    (LLAMA, {"qk_l2_norm": True}),
    (LLAMA, {"attention_chunk_size": 3}),
    (LLAMA, {"v_l2_norm": True}),
    (LLAMA, {"keys_as_values": True}),
    (LLAMA, {"layer_scalar": True}),
    (replace(LLAMA, rotary_percent=0.5), {"rotary_proportional": True}),
    (NOPE, {"attention_temperature_beta": 1.0}),
    (replace(NOPE, attention_temperature_beta=1.0), {"attention_temperature_length": 3}),
    (replace(LLAMA, rotary_base=1e6, use_rope_scaling=True), {"rope_scaling_high_freq_factor": 1.0}),
    (LLAMA, {"softmax_type": "off-by-one"}),
    (LLAMA, {"softmax_type": "learnable"}),
    (LLAMA, {"attention_output_gate": True}),
    (replace(DELTA, experimental_attention_variant=None), {"experimental_attention_variant": "gdn"}),
    (DELTA, {"linear_attention_freq": "[1,0,0,0]"}),
    (DELTA, {"linear_conv_kernel_dim": 2}),
    (DELTA, {"linear_key_head_dim": 3}),
    (DELTA, {"linear_value_head_dim": 3}),
    (DELTA, {"linear_num_key_heads": 1}),
    (DELTA, {"linear_num_value_heads": 2}),
    (YARN, {"yarn_original_max_position_embeddings": 9}),
    (YARN, {"yarn_beta_fast": 0.6}),
    (YARN, {"yarn_beta_slow": 0.2}),
    (YARN, {"no_yarn_correction_range_round_to_int": False}),
    (YARN, {"yarn_temperature_beta": 1.0}),
    (LLAMA, {"rotary_seq_len_interpolation_factor": 4.0}),
    (LLAMA, {"no_rope_freq": "2"}),
    (replace(LLAMA, window_size="2,0"), {"window_attn_skip_freq": "[1,0,1,1]"}),
    (LONG, {"longrope_original_max_position_embeddings": 4}),
    (LONG, {"longrope_short_factor": (1.0, 1.5, 2.0, 8.0)}),
    (replace(LONG, longrope_original_max_position_embeddings=4), {"longrope_long_factor": (1.0, 1.5, 2.0, 4.0)}),
    (LONG, {"longrope_attention_factor": 2.0}),
    (replace(LLAMA, rotary_scaling_factor=4.0), {"position_embedding_type": "yarn"}),
    (LLAMA, {"attn_logit_softcapping": 1e-3}),
    (LLAMA, {"final_logit_softcapping": 0.1}),
    (GPT2, {"init_method_std": 0.1}),
    (GPT2, {"init_method_xavier_uniform": True}),
    (GPT2, {"embedding_init_method_std": 0.1}),
    (GPT2, {"attention_dropout": 0.5}),
    (GPT2, {"hidden_dropout": 0.5}),
    (LLAMA, {"num_experts": 6}),
    (MOE, {"moe_layer_freq": "[0,1,1,0]"}),
    (MOE, {"moe_ffn_hidden_size": 24}),
    (MOE, {"moe_router_topk": 3}),
    (MOE, {"moe_router_score_function": "sigmoid"}),
    (MOE, {"moe_router_score_function": "sqrtsoftplus"}),
    (MOE, {"moe_router_pre_softmax": True}),
    (replace(MOE, moe_router_num_groups=3), {"moe_router_group_topk": 1}),
    (replace(MOE, moe_router_group_topk=1), {"moe_router_num_groups": 2}),
    (replace(MOE, moe_router_num_groups=3, moe_router_group_topk=1), {"moe_router_group_score_topk": 1}),
    (MOE, {"moe_router_topk_scaling_factor": 2.5}),
    (MOE, {"moe_router_force_load_balancing": True}),
    (MOE, {"moe_input_jitter_eps": 0.5}),
    (MOE, {"moe_expert_capacity_factor": 0.5}),
    (replace(MOE, moe_expert_capacity_factor=0.5), {"moe_token_drop_policy": "position"}),
    (MOE, {"moe_shared_expert_intermediate_size": 12}),
    (replace(MOE, moe_shared_expert_intermediate_size=12), {"moe_shared_expert_gate": True}),
]
EQUAL: list[dict[str, Any]] = [
    {"attention_backend": "unfused"},
    {"attention_backend": "flash"},
    {"transformer_impl": "auto"},
]
ELSEWHERE = {
    "--make-vocab-size-divisible-by": "test_config.py",
    "--apply-layernorm-1p": "test_architecture.py",
    "--calculate-per-token-loss": "test_same_numbers.py",
    "--cross-entropy-loss-fusion": "test_gpt.py",
    "--mtp-num-layers": "test_depths_of_a_model.py",
}
# What Megatron-LM has for the architecture of a GPT.
LISTED = """
num-layers hidden-size ffn-hidden-size num-attention-heads kv-channels group-query-attention num-query-groups
max-position-embeddings position-embedding-type rotary-base rotary-percent rotary-interleaved use-rope-scaling
rope-scaling-factor make-vocab-size-divisible-by padded-vocab-size normalization norm-epsilon apply-layernorm-1p swiglu
squared-relu quick-geglu openai-gelu disable-bias-linear add-qkv-bias untie-embeddings-and-output-weights qk-layernorm
multi-latent-attention mtp-num-layers window-size transformer-impl attention-backend use-flash-attn spec
use-mcore-models init-method-std embedding-init-method-std init-method-xavier-uniform attention-softmax-in-fp32
apply-query-key-layer-scaling fp32-residual-connection attention-dropout hidden-dropout calculate-per-token-loss
cross-entropy-loss-fusion cross-entropy-fusion-impl no-masked-softmax-fusion no-bias-gelu-fusion no-bias-swiglu-fusion
no-bias-dropout-fusion no-rope-fusion no-persist-layer-norm no-gradient-accumulation-fusion
"""


@cache
def meaning(config: ModelConfig) -> tuple[dict[str, tuple[int, ...]], torch.Tensor]:
    """Names and shapes of the saved tensors, and logits in training mode."""
    model = GPTModel(config, LayerSpan(0, config.layers, True, True), Axis())
    initialize(model, 1, Axis())
    shapes = {name: tuple(param.shape) for name, param in saved_tensors(model)}
    with torch.no_grad():
        return shapes, model.double().train()(TOKENS)


def key(change: dict[str, Any]) -> str:
    ((name, value),) = change.items()
    return f"{name}={value}"


@pytest.mark.parametrize("base, change", CHANGES, ids=[key(change) for _, change in CHANGES])
def test_the_flag_changes_the_model(base, change):
    before, after = meaning(base), meaning(replace(base, **change))
    assert before[0] != after[0] or not torch.allclose(before[1], after[1])


@pytest.mark.parametrize("change", EQUAL, ids=key)
def test_the_flag_changes_the_computation_and_not_its_result(change):
    base = replace(LLAMA, hidden_dropout=0.0)
    torch.testing.assert_close(meaning(base)[1], meaning(replace(base, **change))[1])


def test_every_listed_flag_is_tried_here_or_elsewhere_or_accepted_or_refused_with_a_reason():
    tried = {name for _, change in CHANGES for name in change} | {name for change in EQUAL for name in change}
    acting = {flag.name for flag in flags_of(Config).values() if flag.field in tried} | set(ELSEWHERE)
    for name in (f"--{bare}" for bare in LISTED.split()):
        if name in flags_of(Config):
            assert name in acting, f"{name} acts but nothing tries it"
        else:
            assert name in NOOP_FLAGS or reason(name), f"{name} is refused without a reason"
