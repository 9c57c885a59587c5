"""What an import or export says of settings that mean something else on the other side."""

from __future__ import annotations

from dataclasses import replace

import pytest
from tiny import GPT2, LLAMA

from megapipe.config import ModelConfig
from megapipe.convert.huggingface.checks import notes

DEPTHS = "config.json speaks of layers of multi-token prediction, and there are none"
LATENT = replace(LLAMA, multi_latent_attention=True)


def said(model: ModelConfig, **content: object) -> str:
    return "\n".join(notes(content, model, model.padded_vocab_size or 0))


@pytest.mark.parametrize("erf, form", [(True, "erf form of GELU"), (False, "tanh form of GELU")])
def test_a_gelu_is_named_with_its_form(erf, form):
    model = replace(GPT2, no_bias_gelu_fusion=erf)
    assert f"activation gelu is the {form}" in said(model, activation_function="gelu")


def test_the_base_of_rotated_positions_is_said_where_there_are_any():
    assert "rope base is 10000; the halves of a head are rotated" in said(LLAMA)
    assert "rope" not in said(GPT2)


@pytest.mark.parametrize("spoken, depths, noted", [(1, None, True), (0, None, False), (1, 1, False)])
def test_depths_that_are_spoken_of_and_not_there_are_noted(spoken, depths, noted):
    model = replace(LLAMA, mtp_num_layers=depths)
    assert (DEPTHS in said(model, num_nextn_predict_layers=spoken)) == noted


@pytest.mark.parametrize("model, noted", [(LLAMA, True), (LATENT, False)], ids=["heads", "latent"])
def test_heads_that_do_not_add_up_to_the_hidden_size_are_noted(model, noted):
    wide = replace(model, kv_channels=2 * model.hidden // model.heads)
    assert ("do not add up to the hidden size" in said(wide)) == noted
