"""Optimizers other than Adam go on from a checkpoint to the bits of a run that was never stopped."""

from dataclasses import replace

import pytest
import torch
from programs import ROOT
from short_run import config, datasets, run_of
from tiny import STYLES

from megapipe.config import CheckpointConfig
from megapipe.distributed.mesh import ProcessMesh
from megapipe.pipeline_parallel.threads import run_threads


def weights(mesh, settings, steps):
    """By name, with the optimizer's state; saved if the settings say where."""
    training = run_of(mesh, settings)
    for _ in range(steps):
        training.driver.whole()
    if settings.checkpoint.save:
        training.saving.save()
    state = {f"{kind} {name}": x for kind, of in training.run.optimizer.state().items() for name, x in of.items()}
    return {**state, **{name: p.detach().clone() for name, p in training.run.optimizer.params.items()}}


@pytest.mark.parametrize("name", ["sgd", "muon", f"{ROOT}/examples/own_optimizer.py:lion"], ids=["sgd", "muon", "lion"])
def test_its_state_is_saved_and_any_split_goes_on_to_the_same_bits(name, tmp_path):
    plain = config(STYLES["gpt2"], optimizer=name)
    want = weights(ProcessMesh.single(), plain, 4)
    weights(ProcessMesh.single(), replace(plain, checkpoint=CheckpointConfig(save=str(tmp_path))), 2)

    def go_on(**how):
        settings = replace(
            config(STYLES["gpt2"], pp=2, schedule="zb-h1", optimizer=name),
            checkpoint=CheckpointConfig(load=str(tmp_path), **how),
        )
        return dict(
            item for rank in run_threads(lambda mesh: weights(mesh, settings, 2), pp=2) for item in rank.items()
        )

    datasets()
    found = go_on()
    assert found.keys() >= want.keys()  # a tied head has a state of its own where it is not beside its owner
    assert [key for key in want if not torch.equal(found[key], want[key])] == []
    afresh = go_on(no_load_optim=True)
    assert any(not torch.equal(afresh[key], want[key]) for key in want)  # the state is what made them the same
