"""Numbers that cannot be right: a step is run again before the run ends for them, and many in a row end it."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial

import pytest
import torch
from short_run import config, run_of
from tiny import STYLES

from megapipe.config import Config
from megapipe.errors import RanksDiffer, TrainingError, UserError
from megapipe.pipeline_parallel.threads import run_threads
from megapipe.training.guards.numbers import Guard
from megapipe.training.steps.step import StepResult

STEPS = 4
AGAIN = "the step was run again on the same samples"


def broken(forward_step, calls, factor):
    """The loss times `factor` in the given calls."""
    count = iter(range(1000))

    def step(*args):
        output, loss_func = forward_step(*args)

        def loss(losses):
            here = factor if next(count) in calls else 1.0
            total, tokens, reported = loss_func(losses)
            return total * here, tokens, {name: pair * torch.tensor([here, 1.0]) for name, pair in reported.items()}

        return output, loss_func and loss

    return step


def weights(mesh, calls, factor, **train):
    base = config(STYLES["gpt2"], dp=mesh.dp.size, pp=mesh.pp.size, **train)
    training = run_of(mesh, replace(base, parallel=replace(base.parallel, use_distributed_optimizer=True)))
    if mesh.dp.rank == 0:
        training.run.stages._forward_step = broken(training.run.stages._forward_step, calls, factor)
    results = [training.driver.whole() for _ in range(STEPS)]
    return [p.detach().clone() for module in training.run.modules for p in module.parameters()], results


@pytest.mark.parametrize("factor", [math.nan, 1e6])
def test_an_error_that_comes_once_costs_one_step_and_no_bit(factor, capsys):
    """In the second step's first microbatch, on one of two replicas, whose stages share a step with two others."""
    layout = {"dp": 2, "pp": 2}
    train = partial(weights, check_for_spiky_loss=True)
    clean = run_threads(partial(train, calls=(), factor=1.0), **layout)
    capsys.readouterr()
    hit = run_threads(partial(train, calls=(2,), factor=factor), **layout)
    for (expected, _), (got, results) in zip(clean, hit, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(expected, got, strict=True))
        assert not any(result.skipped for result in results)
    (line,) = [line for line in capsys.readouterr().out.splitlines() if "WARNING" in line]
    assert line.startswith("WARNING: iteration 2: loss {'lm loss': ")
    assert line.endswith("the model is not deterministic; going on with the second result")


def losses(guard, *values, scale=1.0, saved=0):
    """Steps whose losses are given; a step run again has the same."""

    def run(refuses, loss):
        if not math.isfinite(loss):
            return StepResult({"lm loss": loss}, math.nan, 1, skipped=True, finite=False)
        spiked = refuses({"lm loss": loss})
        return StepResult({"lm loss": loss}, 1.0, 1, skipped=spiked, spiked=spiked)

    return [guard.step(partial(run, loss=loss), n + 1, scale, saved) for n, loss in enumerate(values)]


def test_what_comes_twice_ends_the_run_and_the_checkpoint_is_not_called_sound():
    """--lr 1e30 breaks the weights in iteration 1, which is saved; the loss shows it in iteration 2."""
    guard = Guard(Config(), print)
    with pytest.raises(
        TrainingError, match=r"not finite\), gradient norm nan, twice\. .* 1 may already be bad.*ckpt-s"
    ):
        losses(guard, 2.0, math.nan, saved=1)
    with pytest.raises(TrainingError, match=r"not finite\), gradient norm nan\. Nothing was updated\. Lower --lr"):
        losses(Guard(Config().with_fields(rerun_mode="disabled"), print), math.inf)


@pytest.mark.parametrize("kind", ["correct_result", "transient_error", "persistent_error"])
def test_an_injected_error_runs_a_step_again_and_ends_the_run_if_it_persists(kind):
    """One in three of 60 steps, the same ones whoever asks; the guard of a run without the flag injects none."""
    said: list[str] = []
    config = Config().with_fields(error_injection_rate=3, error_injection_type=kind)
    if kind == "persistent_error":
        with pytest.raises(TrainingError, match=r"persistent_error: .* counts as wrong, twice"):
            losses(Guard(config, print), *[2.0] * 60)
        return
    assert not any(result.skipped for result in losses(Guard(config, said.append), *[2.0] * 60))
    assert 10 <= len(said) <= 30
    assert said[0].endswith(f"--error-injection-type {kind}: {AGAIN}; going on with the second result")
    again: list[str] = []
    losses(Guard(config, again.append), *[2.0] * 60)
    losses(Guard(config.with_fields(error_injection_rate=0), again.append), *[2.0] * 60)
    losses(Guard(config.with_fields(rerun_mode="disabled"), again.append), *[2.0] * 60)
    assert again == said


def test_an_injected_error_costs_no_bit(capsys):
    clean, injected = (
        run_threads(partial(weights, calls=(), factor=1.0, error_injection_rate=rate))[0][0] for rate in (0, 1)
    )
    assert all(torch.equal(a, b) for a, b in zip(clean, injected, strict=True))
    assert capsys.readouterr().out.count("--error-injection-type transient_error") == STEPS


def test_a_spike_that_comes_twice_is_told_and_trained_on():
    said: list[str] = []
    assert [r.skipped for r in losses(Guard(Config(), said.append), 2.0, 2.1, 21.1, 20.9)] == [False] * 4
    assert said == [
        "WARNING: iteration 3: the loss spikes, loss {'lm loss': 21.1}, gradient norm 1.0: more than 10 times the "
        "largest of the last 100, lm loss 2.1"
    ]


@pytest.mark.parametrize(
    "flags, values",
    [({"no_check_for_nan_in_loss_and_grad": True}, [math.nan]), ({"check_for_spiky_loss": True}, [1e4])],
)
@pytest.mark.parametrize("most", [3, 10])
def test_so_many_bad_iterations_in_a_row_end_the_run(flags, values, most):
    said: list[str] = []
    guard = Guard(Config().with_fields(max_bad_iterations_in_a_row=most, **flags), said.append)
    losses(guard, 2.0, *values * (most - 1), 2.0, *values * (most - 1))
    with pytest.raises(TrainingError, match=f"{most} iterations in a row were skipped .* as many as --max-bad-"):
        losses(guard, *values)
    assert f"WARNING: {most - 1} iterations in a row were skipped or spiked, the last is {most}" in said


def test_a_dynamic_loss_scale_that_still_falls_is_no_bad_row():
    guard = Guard(Config().with_fields(fp16=True, min_loss_scale=8.0), print)
    losses(guard, *[math.inf] * 30, scale=16.0)
    with pytest.raises(TrainingError, match="10 iterations in a row"):
        losses(guard, *[math.inf] * 10, scale=8.0)


def test_the_errors_of_a_run_have_exit_codes_that_say_whether_to_start_again():
    assert [error.exit_code for error in (UserError, TrainingError, RanksDiffer)] == [2, 17, 16]
