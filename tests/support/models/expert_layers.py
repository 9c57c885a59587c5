"""Layers of experts of every sort in float64, and what goes in."""

from __future__ import annotations

from dataclasses import replace

import torch
from tiny import GPT2, LLAMA
from torch import Tensor

from megapipe.config import ModelConfig
from megapipe.distributed.axis import ALONE, Axis
from megapipe.models.moe.layer import MoE
from megapipe.tensor_parallel.rng import initialize

S, B, E = 7, 2, 6
T = S * B
SWIGLU = replace(LLAMA, hidden_size=16, num_experts=E, moe_ffn_hidden_size=12, init_method_std=0.5)
GELU = replace(GPT2, hidden_size=16, num_experts=E, moe_ffn_hidden_size=12, init_method_std=0.5)
SIGMOID = replace(SWIGLU, moe_router_score_function="sigmoid", moe_router_enable_expert_bias=True)
LOSSES = {"moe_aux_loss_coeff": (0.3,), "moe_z_loss_coeff": 0.2}
CASES = {
    "softmax after": replace(SWIGLU, **LOSSES),
    "softmax before": replace(SWIGLU, moe_router_pre_softmax=True, moe_router_topk=1, **LOSSES),
    "gelu with biases": replace(GELU, moe_router_topk=3, **LOSSES),
    "sigmoid": replace(SIGMOID, moe_router_topk_scaling_factor=2.5, **LOSSES),
    "sqrtsoftplus": replace(SIGMOID, moe_router_score_function="sqrtsoftplus", **LOSSES),
    "groups": replace(SIGMOID, moe_router_num_groups=3, moe_router_group_topk=2, moe_router_topk=4, **LOSSES),
    "groups after": replace(SWIGLU, moe_router_num_groups=2, moe_router_group_topk=1, moe_router_topk=2),
    "groups by their best": replace(
        SWIGLU,
        moe_router_pre_softmax=True,
        moe_router_num_groups=3,
        moe_router_group_topk=2,
        moe_router_group_score_topk=1,
        moe_router_topk=4,
        moe_router_topk_scaling_factor=16.0,
    ),
    "per sequence": replace(SWIGLU, moe_router_load_balancing_type=("seq_aux_loss",), **LOSSES),
    "several": replace(
        SWIGLU,
        moe_router_load_balancing_type=("aux_loss", "seq_aux_loss", "global_aux_loss"),
        moe_aux_loss_coeff=(0.3, 0.2, 0.1),
    ),
    "dropping": replace(SWIGLU, moe_expert_capacity_factor=0.8, **LOSSES),
    "dropping the last": replace(SIGMOID, moe_expert_capacity_factor=0.8, moe_token_drop_policy="position"),
    "padding": replace(GELU, moe_expert_capacity_factor=0.8, moe_pad_expert_input_to_capacity=True, **LOSSES),
    "padding of one choice": replace(
        GELU,
        moe_router_topk=1,
        moe_router_pre_softmax=True,
        moe_expert_capacity_factor=1.0,  # more rows than tokens, of which some have none: an IndexError once
        moe_pad_expert_input_to_capacity=True,
    ),
    "much room": replace(GELU, moe_expert_capacity_factor=9.0, moe_pad_expert_input_to_capacity=True),
    "weight before": replace(SWIGLU, moe_apply_probs_on_input=True, **LOSSES),
    "weight before, biases": replace(GELU, moe_apply_probs_on_input=True, moe_router_topk=3),
    "weight before, dropping": replace(SWIGLU, moe_apply_probs_on_input=True, moe_expert_capacity_factor=0.8),
    "softmax and a bias": replace(SWIGLU, moe_router_enable_expert_bias=True, **LOSSES),
    "softmax before and a bias": replace(
        SWIGLU, moe_router_pre_softmax=True, moe_router_enable_expert_bias=True, **LOSSES
    ),
    "clamped, biases": replace(
        GELU, quick_geglu=True, activation_func_clamp_value=0.3, glu_linear_offset=1.0, moe_router_topk=3
    ),
    "shared": replace(GELU, moe_shared_expert_intermediate_size=8),
    "shared with a gate": replace(SWIGLU, moe_shared_expert_intermediate_size=8, moe_shared_expert_gate=True),
}


def layer_of(model: ModelConfig, tp: Axis = ALONE) -> MoE:
    layer = MoE(model, tp, 1)
    initialize(layer, 5, tp)
    layer = layer.double()
    if layer.router.expert_bias is not None:
        layer.router.expert_bias.copy_(torch.linspace(-0.4, 0.4, E).float())
    return layer


def inputs() -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(4)
    return tuple(torch.randn(S, B, 16, dtype=torch.float64, generator=draw) for _ in range(2))  # type: ignore[return-value]
