"""A run without a barrier at the update that is killed or told to leave in the middle, and goes on."""

import os
import signal
import time
from dataclasses import replace

import pytest
import torch

from megapipe.config import Config
from megapipe.distributed.mesh import ProcessMesh
from megapipe.models.provider import gpt_provider
from megapipe.training.forward_step import forward_step
from megapipe.training.pretrain import Training
from tools.proofs.fuzz_post_validation import VOCAB, Case, made_datasets

STEPS = 8


class Killed(BaseException):
    """Nothing catches it, as nothing catches SIGKILL."""


def config(folder, *, late: bool, signals: bool = False) -> Config:
    plain = Case("zb-h2", 1, 4, clip=100.0, steps=STEPS, saves=4).config(late=late)
    files = replace(plain.checkpoint, save=str(folder), load=str(folder))
    return replace(plain, checkpoint=files, guards=replace(plain.guards, exit_signal_handler=signals))


def run(config: Config, at: int | None = None, happens=None) -> tuple[int, dict[str, torch.Tensor]]:
    """Its exit code, and weights and moments at the end. at: the iteration in whose first forward something happens."""
    begun, done = [], []

    def step(data, model):
        if begun and begun[-1] == at and model.training and not done:
            done.append(happens())
        return forward_step(data, model)

    def passes(batches, consumed, *, iteration=None, **how):
        begun.append(iteration)
        return run_passes(batches, consumed, iteration=iteration, **how)

    training = Training(config, ProcessMesh.single(), gpt_provider, step, made_datasets(), VOCAB - 1, time.monotonic())
    stages = training.run.stages
    run_passes, stages.run = stages.run, passes
    code = training.train()
    state = training.run.optimizer.state() | {"weights": training.run.optimizer.params}
    return code, {f"{kind} {n}": x.detach().clone() for kind, of in state.items() for n, x in of.items()}


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory):
    return run(config(tmp_path_factory.mktemp("unbroken"), late=False))[1]


def test_killed_while_a_step_is_open_it_ends_on_the_same_bits(unbroken, tmp_path):
    def kill():
        raise Killed

    late = config(tmp_path, late=True)
    with pytest.raises(Killed):
        run(late, 6, kill)
    code, end = run(late)
    assert code == 0
    assert (tmp_path / "iter_0000004").is_dir()
    assert all(torch.equal(x, end[name]) for name, x in unbroken.items())


def test_told_to_leave_it_ends_the_open_step_saves_and_goes_on_to_the_same_bits(unbroken, tmp_path):
    late = config(tmp_path, late=True, signals=True)
    code, _ = run(late, 6, lambda: os.kill(os.getpid(), signal.SIGTERM))
    assert code == 75
    assert (tmp_path / "latest_checkpointed_iteration.txt").read_text() == "7\n", "a signal is heeded a step later"
    code, end = run(late)
    assert code == 0
    assert all(torch.equal(x, end[name]) for name, x in unbroken.items())
