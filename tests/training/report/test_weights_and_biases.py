"""The scalars of TensorBoard in Weights & Biases; with the package, without a network."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from short_run import config, run_of
from tiny import STYLES

from megapipe.checks.inputs import path_problems
from megapipe.config import LogConfig
from megapipe.distributed.mesh import ProcessMesh

LOG = LogConfig(log_interval=1, wandb_project="tiny", wandb_exp_name="one", wandb_entity="us")


def test_a_project_without_the_package_is_refused_before_the_run(monkeypatch):
    monkeypatch.setattr("megapipe.checks.inputs.find_spec", lambda name: None)
    (problem,) = path_problems(replace(config(STYLES["gpt2"]), log=LOG))
    assert problem == "--wandb-project tiny needs the package wandb: pip install wandb, or leave it out."


def test_an_offline_run_has_the_scalars_and_the_settings(tmp_path, monkeypatch):
    pytest.importorskip("wandb", exc_type=ImportError)
    monkeypatch.setenv("WANDB_MODE", "offline")
    asked = replace(config(STYLES["gpt2"]), log=replace(LOG, wandb_save_dir=str(tmp_path)))
    run_of(ProcessMesh.single(), replace(asked, batch=replace(asked.batch, train_iters=4))).train()
    (path,) = Path(tmp_path).rglob("*.wandb")
    said = path.read_bytes()
    tags = ("lm loss", "grad-norm", "learning-rate", "iteration-time", "megapipe/tokens-per-second", "samples vs steps")
    assert [text for text in (*tags, "tiny", "one", "us", "hidden_size") if text.encode() not in said] == []
