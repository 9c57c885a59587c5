"""Experts in a run: biases that move with the load, router losses in logs, checkpoints, and what a late update does."""

from __future__ import annotations

import json
import time
from dataclasses import replace
from functools import partial

import pytest
import torch
from short_run import config, datasets, run_of
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tiny import LLAMA
from torch import Tensor

from megapipe.config import CheckpointConfig, Config, LogConfig
from megapipe.distributed.layout import saved_tensors
from megapipe.distributed.mesh import ProcessMesh
from megapipe.models.provider import gpt_provider
from megapipe.pipeline_parallel.threads import run_threads
from megapipe.training.forward_step import forward_step
from megapipe.training.hooks import Callback, Hooks
from megapipe.training.pretrain import Training

MOE = replace(
    LLAMA,
    num_experts=6,
    moe_ffn_hidden_size=16,
    moe_layer_freq="[0,1,1,0]",
    moe_router_score_function="sigmoid",
    moe_router_enable_expert_bias=True,
    moe_router_bias_update_rate=0.01,
    moe_router_load_balancing_type=("aux_loss", "seq_aux_loss"),
    moe_aux_loss_coeff=(0.1, 0.2),
    moe_z_loss_coeff=0.1,
)
ONE = ProcessMesh.single()
NAMES = {"load_balancing_loss", "seq_load_balancing_loss", "z_loss"}


def biases(training: Training) -> dict[int, Tensor]:
    return {r.layer: r.expert_bias.clone() for r in training.run.stages.routers.own if r.expert_bias is not None}


def test_biases_move_once_a_step_towards_the_mean_load_of_all_ranks_and_microbatches():
    datasets()

    def rank(mesh: ProcessMesh) -> tuple[dict[int, Tensor], dict[int, tuple[int, ...]]]:
        training = run_of(mesh, config(MOE, dp=mesh.dp.size))
        tokens = training.driver.whole().routed.tokens
        return biases(training), tokens

    for ranks in (1, 2):
        for moved, tokens in run_threads(rank, dp=ranks):
            assert tokens.keys() == moved.keys() == {1, 2}
            for layer, bias in moved.items():
                assert sum(tokens[layer]) == 8 * 16 * 2
                n = torch.tensor(tokens[layer]).float()
                assert torch.equal(bias, 0.01 * torch.sign(n.mean() - n))


def test_a_step_that_is_skipped_moves_no_bias():
    training = run_of(ONE, config(MOE, no_check_for_nan_in_loss_and_grad=True))
    with torch.no_grad():
        next(training.run.modules[0].parameters()).fill_(torch.nan)
    assert training.driver.whole().skipped
    assert not any(bias.any() for bias in biases(training).values())


def test_router_losses_are_logged_under_megatrons_names(tmp_path, capsys):
    log = LogConfig(
        tensorboard_dir=str(tmp_path), log_interval=1, metrics_file=f"{tmp_path}/m", moe_per_layer_logging=True
    )
    training = run_of(ONE, replace(config(MOE), log=log))
    result = training.driver.whole()
    training.driver.ended(result)
    training.run.report.close()
    assert result.routed.losses.keys() == NAMES
    line = capsys.readouterr().out
    board = EventAccumulator(str(tmp_path)).Reload()
    for name, loss in result.routed.losses.items():
        assert f" {name}: {loss:.6E} |" in line
        assert board.Scalars(name)[0].value == pytest.approx(loss)
        layers = result.routed.per_layer[name]
        assert (layers[0], layers[3], sum(layers) / 2) == (0, 0, pytest.approx(loss))
        assert board.Scalars(f"moe/{name}_layer_1")[0].value == pytest.approx(layers[1])
    (row,) = map(json.loads, (tmp_path / "m").read_text().splitlines())
    assert row["tokens_per_expert"] == {str(n): list(counts) for n, counts in result.routed.tokens.items()}
    assert row["losses"].keys() == {"lm loss"} | NAMES


def test_layers_whose_experts_are_overridden_away_have_no_router_losses():
    """The mean over no layer was a ZeroDivisionError (found by the fuzzer)."""
    overrides = '{"1-2": {"no_mlp": true}}'
    result = run_of(ONE, config(replace(MOE, per_layer_overrides=overrides))).driver.whole()
    assert (result.routed.losses, result.routed.tokens) == ({}, {})
    one = run_of(ONE, config(replace(MOE, per_layer_overrides='{"1": {"no_mlp": true}}'))).driver.whole().routed
    assert one.losses["z_loss"] == pytest.approx(one.per_layer["z_loss"][2])


def test_router_losses_are_no_part_of_the_loss_that_may_spike():
    result = run_of(ONE, config(MOE)).driver.whole()
    assert result.losses.keys() == {"lm loss"}
    assert result.shown.keys() == {"lm loss"} | NAMES


class Steps(Callback):
    """Losses and norms as they were told."""

    def __init__(self) -> None:
        self.told: list[tuple[float, ...]] = []

    def after_step(self, run, result) -> None:
        self.told.append((*result.shown.values(), result.grad_norm))


def trained(mesh: ProcessMesh, config: Config, record: Steps | None = None) -> dict[str, Tensor]:
    """Weights and biases after the run."""
    hooks = Hooks(callbacks=() if record is None else (record,))
    training = Training(config, mesh, gpt_provider, forward_step, datasets(), 126, time.monotonic(), hooks=hooks)
    training.train()
    return {name: x.detach().clone() for stage in training.run.modules for name, x in saved_tensors(stage)}


def test_a_run_goes_on_from_a_checkpoint_with_its_biases(tmp_path):
    base = replace(config(MOE, pp=1), log=LogConfig(log_interval=100))
    base = replace(base, batch=replace(base.batch, train_iters=4))
    whole, first, rest = Steps(), Steps(), Steps()
    want = trained(ONE, base, whole)
    save = CheckpointConfig(save=str(tmp_path), save_interval=2)
    trained(
        ONE,
        replace(
            base,
            checkpoint=save,
            batch=replace(base.batch, train_iters=2),
            optimizer=replace(base.optimizer, lr_decay_iters=4),
        ),
        first,
    )
    there = replace(
        base, checkpoint=CheckpointConfig(load=str(tmp_path)), optimizer=replace(base.optimizer, lr_decay_iters=4)
    )
    got = trained(ONE, there, rest)
    assert first.told + rest.told == whole.told
    assert got.keys() == want.keys()
    assert {"decoder.layers.1.mlp.router.expert_bias"} <= got.keys()
    assert all(torch.equal(got[name], want[name]) for name in want)


@pytest.mark.parametrize(("clip", "schedule"), [(100.0, "zb-v"), (0.1, "1f1b"), (100.0, "dualpipe")])
def test_biases_move_before_the_next_step_where_its_update_does_not_wait(clip, schedule):
    """Also where the update is undone, as the norm asks for clipping."""
    datasets()
    found = []
    for late in (False, True):
        run = config(MOE, pp=2, schedule=schedule, clip_grad=clip)
        parallel = replace(run.parallel, enable_optimizer_post_validation=late, post_validation_after=0)
        run = replace(run, parallel=parallel, batch=replace(run.batch, train_iters=3), log=LogConfig(log_interval=100))
        ranks = run_threads(partial(trained, config=run), pp=2)
        found.append({f"{rank} {name}": x for rank, mine in enumerate(ranks) for name, x in mine.items()})
    before, after = found
    assert [name for name in before if not torch.equal(before[name], after[name])] == []
    largest = [x.abs().max().item() for name, x in after.items() if name.endswith("expert_bias")]
    assert min(largest) > 0
