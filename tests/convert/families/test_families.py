"""Families beside transformers: the same logits, and tensors and config.json that come back as they were."""

from __future__ import annotations

import json
import os
import random
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from drawn_families import DRAWN
from random_models import ours, save, saved, theirs
from safetensors.torch import load_file

from megapipe.config import Config
from megapipe.convert import compare_logits, export_checkpoint, import_checkpoint
from megapipe.convert.huggingface.family import IGNORED
from megapipe.convert.huggingface.tables import FAMILIES
from megapipe.flags.parse import parse, to_flags

NIGHTLY = bool(os.environ.get("MEGAPIPE_NIGHTLY"))  # scripts/nightly.sh draws four of each family
VARIANTS = 4 if NIGHTLY else 1
HIDDEN = 2 if NIGHTLY else 1
"""Models of a family whose features are taken away one by one."""


# Without them a model of these sizes has the same tensors.
FEATURES = {
    "rotary_interleaved": False,
    "rotary_percent": 1.0,
    "longrope_attention_factor": 1.0,
    "window_size": None,
    "softmax_scale": None,
    "attn_logit_softcapping": None,
    "final_logit_softcapping": None,
    "softmax_type": "vanilla",
    "yarn_temperature_beta": 0.0,
    "v_l2_norm": False,
    "layer_scalar": False,
    "attention_temperature_beta": 0.0,
    "attention_chunk_size": None,
    "qk_l2_norm": False,
    "moe_apply_probs_on_input": False,
    "rotary_seq_len_interpolation_factor": 1.0,
    "per_layer_overrides": None,
    "apply_layernorm_1p": False,
    "no_bias_gelu_fusion": False,
    "mup_embedding_mult": 1.0,
    "residual_multiplier": 1.0,
    "mup_output_mult": 1.0,
    "latent_norm_epsilon": None,
    "moe_router_num_groups": None,
    "moe_router_topk_scaling_factor": None,
    "moe_router_score_function": "softmax",
}


WIDTHS = {"kv_channels", "group_query_attention", "num_query_groups", "keys_as_values"}


def widths_alone(overrides: dict[str, Any]) -> dict[str, Any]:
    """Return overrides of layers without those that leave the tensors as they are."""
    return {where: {name: fields[name] for name in fields.keys() & WIDTHS} for where, fields in overrides.items()}


def without_features(model: Any) -> Iterator[tuple[str, Any]]:
    """Yield the model without each of its features: the feature's name and what is left."""
    for name, plain in FEATURES.items():
        if getattr(model, name) == plain:
            continue
        # longrope has a divisor for each rotated pair.
        if name == "rotary_percent" and model.position_embedding_type == "longrope":
            continue
        if name == "per_layer_overrides":
            plain = json.dumps(widths_alone(json.loads(model.per_layer_overrides)))
        other = replace(model, **{name: plain})
        if name == "moe_router_num_groups":
            other = replace(other, moe_router_group_topk=None, moe_router_group_score_topk=None)
        yield name, other


@pytest.mark.parametrize("family", DRAWN)
def test_logits_are_those_of_transformers_and_all_comes_back_as_it_was(family, tmp_path):
    """Tiny random models may hide a feature, and then equal logits prove nothing of it: without it they differ."""
    for seed in range(VARIANTS):
        folder = tmp_path / str(seed)
        config = DRAWN[family](random.Random(f"{family}{seed}"))
        save(config, folder / "hf")
        want = theirs(folder / "hf")
        done = import_checkpoint(folder / "hf", folder / "ours", divisible_by=8)
        assert parse(Config, to_flags(done.config)) == done.config
        difference = (ours(done.folder, done.config.model) - want).abs().max()
        assert difference <= 2e-6 * want.abs().max(), seed
        for name, other in without_features(done.config.model) if seed < HIDDEN else ():
            moved = (ours(done.folder, other) - want).abs().max()
            assert moved > 2e-5 * want.abs().max(), (seed, name)

        export_checkpoint(done.folder, folder / "back")
        before, after = (load_file(folder / name / "model.safetensors") for name in ("hf", "back"))
        assert before.keys() == after.keys()
        assert all(torch.equal(before[key], after[key]) for key in before)

        # config.json by the family's own table, without the one that was imported.
        written = FAMILIES[family].write(done.config.model) | {"model_type": family, "vocab_size": 101}
        again, its = type(config)(**json.loads(json.dumps(written))).to_dict(), config.to_dict()
        assert {key: again.get(key) for key in its.keys() - IGNORED} == {key: its[key] for key in its.keys() - IGNORED}


def test_a_kimi_is_computed_as_a_deepseek(tmp_path):
    want = saved("deepseek_v3", 1, tmp_path / "hf")
    path = tmp_path / "hf" / "config.json"
    path.write_text(
        json.dumps(json.loads(path.read_text()) | {"model_type": "kimi_k2", "auto_map": {"AutoConfig": "x"}})
    )
    done = import_checkpoint(tmp_path / "hf", tmp_path / "ours", divisible_by=8)
    assert (ours(done.folder, done.config.model) - want).abs().max() <= 2e-6 * want.abs().max()
    found = compare_logits(tmp_path / "hf", done.folder, done.config.model, 101)
    assert found is not None
    assert found[0] < 1e-5 < found[1]
