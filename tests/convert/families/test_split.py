"""A family's model that lies over two ranks has the logits of transformers, and trains as one process does."""

from __future__ import annotations

from collections import Counter

import pytest

from megapipe.distributed.axis import Axis
from megapipe.models.attention import heads
from tools.proofs.families.split import LAYOUTS, Model, compared

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.mark.parametrize("family", ["gemma2", "gpt_oss", "olmo3", "glm4_moe"])
def test_two_ranks_compute_and_train_what_transformers_and_one_process_do(family, tmp_path):
    """`python -m tools.proofs.families.split` draws four models of every family, and exports their checkpoints."""
    counts = Counter()
    model = Model(family, 0, tmp_path)
    assert list(compared(model, LAYOUTS, counts)) == []
    assert counts.keys() == {"tp", "pp", "cp"} | ({"ep"} if model.model.has_experts else set())


@pytest.mark.parametrize("family", ["youtu", "deepseek_v2", "deepseek_v3"])
def test_an_export_without_the_imports_config_is_the_model_that_came_in(family, tmp_path):
    """The end of a text was Youtu's padding: transformers made its row zero, and logits were 0.69 off."""
    assert list(compared(Model(family, 0, tmp_path), [], Counter())) == []


def test_the_proof_finds_a_norm_of_one_ranks_heads(tmp_path, monkeypatch):
    whole = heads._norm_heads
    monkeypatch.setattr(heads, "_norm_heads", lambda *args: whole(*args[:4], Axis(), args[5]))
    (line,) = compared(Model("olmo2", 0, tmp_path), ["tp"], Counter())
    assert "logits differ by" in line
