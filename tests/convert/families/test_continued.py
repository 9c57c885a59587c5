"""A model of transformers whose pretraining goes on here: its first loss, and the exported model's."""

from __future__ import annotations

from tools.proofs.families.continued import SETS, problems


def test_the_first_loss_is_that_of_transformers_and_the_last_one_that_of_the_exported_model(tmp_path):
    """`python -m tools.proofs.families.continued` trains a family of each set."""
    assert list(problems(SETS["norms of all heads, experts"], tmp_path)) == []
