"""--weight-decay-incr-style reaches the weights of a run."""

from __future__ import annotations

import pytest
import torch
from short_run import STEPS, config, run_of
from tiny import STYLES

from megapipe.distributed.mesh import ProcessMesh


def test_each_step_decays_as_its_place_in_the_run_says():
    """A vocabulary's row that no token names: SGD without tying changes it by decay alone."""
    grows = {"weight_decay_incr_style": "linear", "start_weight_decay": 1.0, "end_weight_decay": 21.0}
    training = run_of(ProcessMesh.single(), config(STYLES["llama"], optimizer="sgd", sgd_momentum=0.0, **grows))
    row, unused = training.run.optimizer.params["embedding.word_embeddings.weight"], 127
    for step in range(4):
        before, rate = row[unused].detach().clone(), training.run.rate()
        training.driver.whole()
        decay = 1.0 + 20.0 * step / STEPS
        assert decay == 1.0 + step
        torch.testing.assert_close(row[unused].detach(), before * (1 - rate * decay), rtol=1e-6, atol=0)
    assert training.run.rate() == pytest.approx(3e-3, rel=0.2)
