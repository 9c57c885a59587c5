"""Attention through latents holds what the plan says; its numbers are those of transformers (tests/convert) and of
Megatron-LM (tools/proofs/megatron_golden.py), its layouts those of the equality tests."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from tiny import GPT2

from megapipe.distributed.mesh import ProcessMesh
from megapipe.models.attention.rope import Rotary, rotary_table
from megapipe.pipeline_parallel.threads import run_threads
from megapipe.plan.pieces import pieces

from ..test_activation_memory import B, S, kept

LATENT = replace(
    GPT2,
    hidden_size=256,
    num_attention_heads=8,
    max_position_embeddings=S,
    multi_latent_attention=True,
    q_lora_rank=48,
    kv_lora_rank=32,
    qk_head_dim=32,
    qk_pos_emb_head_dim=16,
    v_head_dim=24,
    qk_layernorm=True,
    attention_dropout=0.0,
    hidden_dropout=0.0,
)


@pytest.mark.parametrize("changed", [{}, {"attention_dropout": 0.1}, {"q_lora_rank": None, "qk_layernorm": False}])
@pytest.mark.parametrize("tp, sequence_parallel", [(1, False), (2, True)])
def test_the_plan_predicts_what_a_layer_holds(tp, sequence_parallel, changed):
    """The tables of cos and sin, 2 x 8 KB, are all layers'."""
    model = replace(LATENT, sequence_parallel=sequence_parallel, **changed)
    plan = pieces(model, S, B, tp=tp, element_bytes=2).layers[0]

    def rank(mesh: ProcessMesh) -> tuple[int, int]:
        return kept(mesh, model)

    for held, owed in run_threads(rank, tp=tp):
        assert held - 2 * 4 * S * 16 == pytest.approx(plan.held, rel=0.01)
        assert owed == plan.kept


def test_yarn_turns_fast_pairs_as_ever_and_slow_ones_slower_and_longer():
    """Peng et al. 2023, section 3.2 and equation 15, with 4096 positions, 32 and 1 turns."""
    rotary = Rotary.of_latents(replace(LATENT, qk_pos_emb_head_dim=64, rotary_scaling_factor=40.0, mscale_all_dim=0.5))
    plain = 10000.0 ** (-torch.arange(32, dtype=torch.float64) / 32)
    turns = 4096 * plain / (2 * math.pi)
    got = rotary.frequencies()
    assert torch.equal(got[turns > 40], plain[turns > 40])
    torch.testing.assert_close(got[turns < 0.9], plain[turns < 0.9] / 40)
    assert ((got < plain) & (got > plain / 40))[(turns < 20) & (turns > 2)].all()
    cos, sin = rotary_table(4, rotary, torch.device("cpu"), torch.float64)
    length = (0.1 * math.log(40) + 1) / (0.05 * math.log(40) + 1)
    torch.testing.assert_close(cos.square() + sin.square(), torch.full_like(cos, length**2))
