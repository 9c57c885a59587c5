"""FLOPs of a trained token, by the formula of Megatron-LM's num_floating_point_operations (training/training.py)."""

from __future__ import annotations

from dataclasses import replace

import pytest

from megapipe.config import ModelConfig
from megapipe.plan.seconds.flops import flops_per_token

SEQUENCE, VOCAB = 64, 1000
DENSE = ModelConfig(
    num_layers=3,
    hidden_size=48,
    num_attention_heads=4,
    max_position_embeddings=SEQUENCE,
    padded_vocab_size=VOCAB,
)
GROUPED = replace(
    DENSE, group_query_attention=True, num_query_groups=2, kv_channels=16, swiglu=True, ffn_hidden_size=80
)


def megatrons(model: ModelConfig, queries: int, keys: int, width: int) -> float:
    """6 FLOPs for each weight, and for scores at half. Channels of queries and of keys, and the MLPs' inner width."""
    attention = model.hidden_size * (2 * queries + 2 * keys) + queries * SEQUENCE
    mlp = model.hidden_size * width * (3 if model.swiglu else 2)
    return 6 * (model.num_layers * (attention + mlp) + model.hidden_size * VOCAB)


@pytest.mark.parametrize(("model", "widths"), [(DENSE, (48, 48, 4 * 48)), (GROUPED, (64, 32, 80))])
def test_a_dense_model_counts_as_in_megatron(model: ModelConfig, widths: tuple[int, int, int]) -> None:
    assert flops_per_token(model, SEQUENCE) == megatrons(model, *widths)


def test_of_experts_the_routers_product_is_counted_too() -> None:
    """Two of eight experts a token, and a shared one."""
    sparse = replace(
        GROUPED,
        num_experts=8,
        moe_router_topk=2,
        moe_ffn_hidden_size=40,
        moe_shared_expert_intermediate_size=56,
    )
    router = 6 * sparse.num_layers * sparse.hidden_size * 8
    assert flops_per_token(sparse, SEQUENCE) == megatrons(sparse, 64, 32, 2 * 40 + 56) + router
