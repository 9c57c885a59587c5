"""fp16 with its loss scale, in training; ranks are threads."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from itertools import pairwise

import pytest
import torch
from short_run import SPLIT_STEPS, alone, config, run_of, split
from tiny import STYLES

from megapipe.config import CheckpointConfig, Config
from megapipe.distributed.mesh import ProcessMesh
from megapipe.optim.lr import learning_rate
from megapipe.pipeline_parallel.threads import run_threads


def test_a_power_of_two_as_loss_scale_changes_no_bit():
    assert alone("gpt2", SPLIT_STEPS, loss_scale=1024.0) == alone("gpt2", SPLIT_STEPS)


def test_fp16_trains_close_to_float32_once_its_scale_fits():
    exact, half = alone("llama", 10), alone("llama", 10, fp16=True, initial_loss_scale=2.0**13)
    assert half[-1][0] == pytest.approx(exact[-1][0], abs=0.02)
    assert half != exact


@pytest.mark.parametrize("layout", [{"tp": 2}, {"dp": 2}, {"pp": 2, "schedule": "zb-h1"}])
def test_all_ranks_skip_the_same_steps_and_agree_on_the_scale(layout):
    def states(mesh: ProcessMesh, config: Config) -> list[tuple[bool, float]]:
        training = run_of(mesh, config)
        return [(training.driver.whole().skipped, training.run.progress.loss_scale.scale) for _ in range(10)]

    flags = {"fp16": True, "initial_loss_scale": 2.0**20, "hysteresis": 1, "loss_scale_window": 4.0}
    first, *others = run_threads(
        partial(states, config=config(replace(STYLES["gpt2"], num_layers=2), **layout, **flags)),
        **{axis: size for axis, size in layout.items() if axis != "schedule"},
    )
    assert all(other == first for other in others)
    skipped = [skip for skip, _ in first]
    assert skipped[0]
    assert not all(skipped)
    assert any(after > before for (_, before), (_, after) in pairwise(first)), "it grew again"


def test_a_step_that_overflows_changes_neither_weights_nor_learning_rate():
    training = run_of(ProcessMesh.single(), config(STYLES["gpt2"], fp16=True, initial_loss_scale=2.0**60, hysteresis=1))
    before = [b.main.clone() for b in training.run.optimizer.buffers]
    assert training.driver.whole().skipped
    assert all(torch.equal(x, b.main) for x, b in zip(before, training.run.optimizer.buffers, strict=True))
    assert (training.run.progress.loss_scale.scale, training.run.progress.consumed_train_samples) == (2.0**59, 8)
    assert training.run.rate() == learning_rate(training.run.curve, 0)


def test_a_resumed_run_goes_on_with_its_loss_scale_bit_for_bit(tmp_path):
    model = replace(STYLES["gpt2"], num_layers=2)
    flags = config(model, fp16=True, initial_loss_scale=2.0**24, hysteresis=1, loss_scale_window=4.0)
    flags = replace(flags, checkpoint=CheckpointConfig(save=str(tmp_path), load=str(tmp_path)))
    training = run_of(ProcessMesh.single(), flags)
    for _ in range(6):
        training.driver.whole()
    training.saving.save()
    again = run_of(ProcessMesh.single(), flags)
    assert again.run.progress == training.run.progress
    assert (
        again.run.progress.loss_scale
        != run_of(ProcessMesh.single(), replace(flags, checkpoint=CheckpointConfig())).run.progress.loss_scale
    )
    on, unbroken = ([one.driver.whole() for _ in range(6)] for one in (again, training))
    assert repr(on) == repr(unbroken)  # a norm may be nan


def test_gradients_reduced_in_bf16_differ_in_the_third_digit():
    rounded, exact = split("llama", dp=2, bf16=True, grad_reduce_in_bf16=True)[0], split("llama", dp=2, bf16=True)[0]
    assert rounded[0][0] == exact[0][0], "the first loss knows no gradient"
    assert rounded[0][1] != exact[0][1]
    assert rounded[0][1] == pytest.approx(exact[0][1], rel=4e-3)
