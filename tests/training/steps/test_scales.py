"""Runs in eight bits: losses beside bf16's, the same bits under every schedule, histories that follow from the step."""

from __future__ import annotations

import os
import time
from dataclasses import replace
from functools import cache, partial
from itertools import cycle, product

import pytest
import torch
from short_run import config, datasets, run_of, train
from tiny import LLAMA, run_step
from torch import Tensor

from megapipe.config import CheckpointConfig, Config, LogConfig
from megapipe.distributed.mesh import ProcessMesh
from megapipe.models.parts import recipe_of
from megapipe.models.provider import gpt_provider
from megapipe.pipeline_parallel.threads import run_threads
from megapipe.plan.make import make_plan
from megapipe.schedule import build, from_csv
from megapipe.tensor_parallel.fp8.products import GRADIENT, INPUT, WEIGHT, Delayed, FP8Recipe, Scaled
from megapipe.training.forward_step import forward_step
from megapipe.training.pretrain import Training

NIGHTLY = bool(os.environ.get("MEGAPIPE_NIGHTLY"))  # scripts/nightly.sh: each model under each schedule, four steps
ONE = ProcessMesh.single()
FP8 = replace(LLAMA, fp8_format="hybrid", fp8_recipe="tensorwise")
DELAYED = replace(FP8, fp8_recipe="delayed", fp8_amax_history_len=3, fp8_amax_compute_algo="max")
EXPERTS = replace(DELAYED, num_experts=4, moe_ffn_hidden_size=16, moe_layer_freq="[0,1,0,1]")
LATENT = replace(
    FP8,
    multi_latent_attention=True,
    group_query_attention=False,
    q_lora_rank=16,
    kv_lora_rank=16,
    **dict.fromkeys(("qk_head_dim", "qk_pos_emb_head_dim", "v_head_dim"), 16),
)
MODELS = {
    "tensorwise": FP8,
    "delayed": DELAYED,
    "blockwise": replace(FP8, fp8_recipe="blockwise"),
    "mxfp8": replace(FP8, fp8_recipe="mxfp8", fp8_format="e4m3"),
    "experts": EXPERTS,
    "latents": LATENT,
}


def test_flags_make_the_recipe():
    settings = replace(DELAYED, fp8_margin=1, no_fp8_wgrad=True)
    assert recipe_of(settings) == FP8Recipe("hybrid", "delayed", False, margin=1, history=3, algorithm="max")
    assert recipe_of(replace(settings, fp8_recipe="mxfp8")) == FP8Recipe("hybrid", "mxfp8", False)
    assert recipe_of(LLAMA) is None


@cache
def in_bf16(steps: int) -> list[tuple[float, float]]:
    return train(ONE, config(LLAMA, bf16=True), steps)


@pytest.mark.parametrize("name", ["tensorwise", "delayed", "blockwise", "mxfp8"])
def test_losses_are_within_a_hundredth_of_those_in_bf16(name):
    """Of 50 steps of a larger model: docs/log/models.md."""
    steps = 4 if NIGHTLY else 2
    found = train(ONE, config(MODELS[name], bf16=True), steps)
    assert [loss for loss, _ in found] == pytest.approx([loss for loss, _ in in_bf16(steps)], rel=0.01)
    assert found != in_bf16(steps)


TWICE = build("naive", 1, 2)


@cache
def plain_step(name: str):
    return run_step(ONE, MODELS[name], TWICE, torch.float32)


# zb-v of two ranks lets W wait from three microbatches on.
IN_A_V = """0F0,0F1,3F0,3B0,3F1,3B1,3W0,3W1,0B0,0B1,0W0,0W1
1F0,2F0,1F1,2F1,2B0,1B0,2B1,1B1,2W0,1W0,2W1,1W1"""
DEFERRING = {"zb-h1": build("zb-h1", 2, 2), "in a v": from_csv(IN_A_V)}
MODELS_UNDER = product(MODELS, DEFERRING) if NIGHTLY else zip(MODELS, cycle(DEFERRING))


@pytest.mark.parametrize(("name", "schedule"), list(MODELS_UNDER))
def test_losses_and_gradients_have_the_same_bits_under_schedules_that_defer(name, schedule):
    losses, gradients = plain_step(name)
    body = partial(run_step, model=MODELS[name], schedule=DEFERRING[schedule], dtype=torch.float32)
    for found, local in run_threads(body, pp=2):
        assert not found or found == losses
        assert [
            param for param, (gradient, *_) in local.items() if not torch.equal(gradient, gradients[param][0])
        ] == []


@pytest.mark.parametrize("name", MODELS)
def test_what_is_computed_again_is_quantised_by_the_same_scales(name):
    losses, gradients = plain_step(name)
    again = replace(MODELS[name], recompute_granularity="full")
    found, local = run_step(ONE, again, TWICE, torch.float32)
    assert found == losses
    assert all(torch.equal(gradient, gradients[param][0]) for param, (gradient, *_) in local.items())


def quantised_layers(training: Training) -> dict[str, Delayed]:
    parts = [pair for module in training.run.modules for pair in module.named_modules()]
    return {name: part for name, part in parts if isinstance(part, Delayed)}


def test_the_first_and_last_layers_may_stay_out():
    ends = {"first_last_layers_bf16": True, "num_layers_at_start_in_bf16": 0, "num_layers_at_end_in_bf16": 2}
    for settings, layers in (({}, "0123"), ({"first_last_layers_bf16": True}, "12"), (ends, "01")):
        found = quantised_layers(run_of(ONE, config(replace(DELAYED, **settings))))
        parts = ("self_attention.linear_qkv", "self_attention.linear_proj", "mlp.linear_fc1", "mlp.linear_fc2")
        assert [*found] == [f"decoder.layers.{n}.{part}.products" for n in layers for part in parts]


def histories(mesh: ProcessMesh, run: Config) -> dict[str, Tensor]:
    """After one step."""
    training = run_of(mesh, run)
    training.driver.whole()
    return {name: part.amax_history.clone() for name, part in quantised_layers(training).items()}


@pytest.mark.parametrize("model", [DELAYED, EXPERTS], ids=["dense", "experts"])
def test_ranks_remember_the_largest_values_of_all(model):
    datasets()
    training = run_of(ONE, config(model))
    weights = {name: x.abs().max().item() for name, x in training.run.modules[0].named_parameters()}
    wanted = histories(ONE, config(model))
    for name, history in wanted.items():
        assert history[WEIGHT].tolist() == [weights[name.removesuffix("products") + "weight"], 0, 0]
        assert history[INPUT, 0] > 0
        assert history[GRADIENT, 0] > 0
    for found in run_threads(lambda mesh: histories(mesh, config(model, dp=2)), dp=2):
        for name, history in found.items():
            assert torch.equal(history[:GRADIENT], wanted[name][:GRADIENT])
            # A microbatch counts twice as much in the mean of half as many.
            assert torch.equal(history[GRADIENT], 2 * wanted[name][GRADIENT])
    for found in run_threads(lambda mesh: histories(mesh, config(model, tp=2)), tp=2):
        for name, history in found.items():
            assert torch.equal(history[WEIGHT], wanted[name][WEIGHT])
            torch.testing.assert_close(history, wanted[name], rtol=0.1, atol=0)


def test_both_copies_of_a_stage_remember_the_same_under_dualpipe():
    ranks = run_threads(lambda mesh: histories(mesh, config(DELAYED, pp=2, schedule="dualpipe")), pp=2)
    assert len(ranks[0]) == len(ranks[1]) == 16
    assert all(torch.equal(ranks[0][name], ranks[1][name]) for name in ranks[0])


def test_an_evaluation_and_a_step_that_is_skipped_are_not_remembered():
    training = run_of(ONE, config(DELAYED, no_check_for_nan_in_loss_and_grad=True))
    training.driver.whole()
    before = {name: part.amax_history.clone() for name, part in quantised_layers(training).items()}
    with torch.no_grad():
        next(training.run.modules[0].parameters()).fill_(torch.nan)
    assert training.driver.whole().skipped
    assert all(torch.equal(part.amax_history, before[name]) for name, part in quantised_layers(training).items())


def test_a_weight_is_quantised_once_in_the_passes_of_a_step(monkeypatch):
    """For the output and for the input's gradient, of each of 16 weights; not again for each of 4 microbatches."""
    asked = []
    quantised = Delayed.quantised
    monkeypatch.setattr(Delayed, "quantised", lambda own, x, role: (asked.append(role), quantised(own, x, role))[1])
    training = run_of(ONE, config(DELAYED))
    training.driver.whole()
    assert asked.count(WEIGHT) == 2 * 16
    assert asked.count(INPUT) == asked.count(GRADIENT) == 2 * 4 * 16
    assert all(part.weights is None for part in quantised_layers(training).values())


@pytest.mark.parametrize("name", ["tensorwise", "experts"])
def test_the_plan_counts_the_weights_that_are_kept_quantised(name, monkeypatch):
    """With norms and routers, which are not: a hundredth here."""
    held, keeping = [], Scaled.keeping

    def let_go(own: Scaled, on: bool) -> None:
        held.extend(one.values.nbytes for one in ({} if on else own.weights or {}).values())
        keeping(own, on)

    monkeypatch.setattr(Scaled, "keeping", let_go)
    run = config(replace(MODELS[name], first_last_layers_bf16=True))
    run_of(ONE, run).driver.whole()
    plain = replace(run, model=replace(run.model, fp8_format=None))
    assert sum(held) == pytest.approx(make_plan(run).state_bytes[0] - make_plan(plain).state_bytes[0], rel=0.03)


def trained(mesh: ProcessMesh, run: Config, steps: int, **flags: object) -> dict[str, Tensor]:
    """Weights and histories after so many steps."""
    run = replace(
        run,
        log=LogConfig(log_interval=100),
        batch=replace(run.batch, train_iters=steps),
        optimizer=replace(run.optimizer, lr_decay_iters=20),
    )
    run = replace(run, checkpoint=CheckpointConfig(**flags))
    training = Training(run, mesh, gpt_provider, forward_step, datasets(), 126, time.monotonic())
    training.train()
    return {name: x.clone() for module in training.run.modules for name, x in module.state_dict().items()}


def test_a_run_goes_on_from_a_checkpoint_with_its_histories(tmp_path):
    base = config(DELAYED)
    wanted = trained(ONE, base, 3)
    trained(ONE, base, 2, save=str(tmp_path), save_interval=2)
    found = trained(ONE, base, 3, load=str(tmp_path))
    assert "decoder.layers.0.mlp.linear_fc1.products.amax_history" in found
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)


def test_a_run_may_begin_to_quantise_or_cease_to_and_remember_longer(tmp_path):
    """A history that is not in the checkpoint, or of another length, begins anew."""
    plain, longer = config(LLAMA), config(replace(DELAYED, fp8_amax_history_len=4))
    trained(ONE, plain, 1, save=str(tmp_path / "plain"), save_interval=1)
    trained(ONE, config(DELAYED), 2, load=str(tmp_path / "plain"), save=str(tmp_path / "fp8"), save_interval=1)
    assert trained(ONE, plain, 3, load=str(tmp_path / "fp8"))
    after = trained(ONE, longer, 3, load=str(tmp_path / "fp8"))
    history = after["decoder.layers.0.mlp.linear_fc1.products.amax_history"]
    assert history.shape == (3, 4)
    assert [bool(x) for x in history[0]] == [True, False, False, False]


def test_an_update_that_is_undone_puts_the_histories_back():
    """Post-validation, where the norm asks for clipping after every update."""
    datasets()
    found = []
    for late in (False, True):
        run = config(DELAYED, pp=2, schedule="zb-v", clip_grad=0.1)
        parallel = replace(run.parallel, enable_optimizer_post_validation=late, post_validation_after=0)
        found.append(run_threads(partial(trained, run=replace(run, parallel=parallel), steps=3), pp=2))
    for now, later in zip(*found, strict=True):
        assert all(torch.equal(now[name], later[name]) for name in now)
