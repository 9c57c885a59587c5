"""--decoupled-lr reaches the word embeddings and the output head of a run, and nothing else."""

from __future__ import annotations

import pytest
import torch
from short_run import config, run_of
from tiny import STYLES

from megapipe.distributed.mesh import ProcessMesh
from megapipe.training.hooks import Hooks


def test_a_rate_of_the_programs_beside_it_is_told(capsys):
    text = "WARNING: --decoupled-lr 0.5 follows the flags' curve for embedding and head; all other parameters have"
    for lr, flags in ((lambda _: 0.1, {"decoupled_lr": 0.5}), (lambda _: 0.1, {}), (None, {"decoupled_lr": 0.5})):
        run_of(ProcessMesh.single(), config(STYLES["gpt2"], **flags), Hooks(lr=lr))
        assert (text in capsys.readouterr().out) == (lr is not None and bool(flags))


@pytest.mark.parametrize("style", ["gpt2", "llama"])
def test_a_rate_of_nothing_leaves_embedding_and_head_where_they_were(style):
    training = run_of(ProcessMesh.single(), config(STYLES[style], decoupled_lr=1e-30))
    params = training.run.optimizer.params
    before = {name: param.detach().clone() for name, param in params.items()}
    for _ in range(2):  # the first step of a warm-up has rate 0
        training.driver.whole()
    still = {name for name, param in params.items() if torch.equal(param, before[name])}
    assert still == {"embedding.word_embeddings.weight", "output_layer.weight"}
