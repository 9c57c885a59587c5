"""A family's model that lies over two ranks has the logits of transformers, and trains as one process does."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from nightly import by_night

from megapipe.convert import SavedTensors
from megapipe.models.attention import heads
from tools.proofs.families.models import logits_of
from tools.proofs.families.ranks import batch
from tools.proofs.families.split import Model, compared, config_in, other_keys

pytestmark = pytest.mark.usefixtures("one_thread")


LAYOUTS = {"gpt_oss": "tp pp cp ep", "olmo3": "tp pp cp", "gemma2": "tp pp cp", "glm4_moe": "tp pp ep"}


@pytest.mark.parametrize(("family", "layouts"), by_night(LAYOUTS.items(), day=[*LAYOUTS.items()][:2]))
def test_two_ranks_compute_and_train_what_transformers_and_one_process_do(family, layouts, tmp_path):
    """`python -m tools.proofs.families.split` draws four models of every family, and exports their checkpoints."""
    counts = Counter()
    assert list(compared(Model(family, 0, tmp_path), layouts.split(), counts)) == []
    assert counts.keys() == {*layouts.split()}


@pytest.mark.parametrize("family", ["youtu", "deepseek_v2", "deepseek_v3"])
def test_an_export_without_the_imports_config_is_the_model_that_came_in(family, tmp_path):
    """The end of a text was Youtu's padding: transformers made its row zero, and logits were 0.69 off."""
    assert list(compared(Model(family, 0, tmp_path), [], Counter())) == []


def test_the_proof_finds_a_norm_of_one_ranks_heads(tmp_path, monkeypatch):
    monkeypatch.setattr(heads, "across", lambda x, edge: x)
    (line,) = compared(Model("olmo2", 0, tmp_path), ["tp"], Counter())
    assert "logits differ by" in line


def test_an_ulp_of_weights_moves_logits_by_the_rounding_of_float32(tmp_path):
    """Where the plain bound is not kept, twice as much is allowed. A fault moves logits by more than 1e-4."""
    model = Model("deepseek_v3", 1, tmp_path)
    assert 1e-6 < model.rounding < 1e-5
    # The model has its own weights again.
    assert torch.equal(logits_of(model.original, batch()[0]), model.want)


CHANGES = [("layer_types", None), ("sliding_window", 5), ("rms_norm_eps", 0.5), ("hidden_act", "gelu"), ("new", 1)]


@pytest.mark.parametrize(("key", "value"), CHANGES)
def test_the_proof_finds_a_key_of_another_value_and_a_key_that_is_null(key, value, tmp_path):
    """Until 2026-11-28 null on either side passed, and the exported file was not read."""
    folder = Model("qwen3", 0, tmp_path).folder / "hf"
    said = config_in(folder)
    assert list(other_keys(said, dict(said), SavedTensors(folder))) == []
    lines = list(other_keys(said, said | {key: value}, SavedTensors(folder)))
    assert lines
    assert all(line.startswith(f"{key} ") for line in lines)
