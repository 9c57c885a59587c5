"""The layout does not change the training: the same losses and gradient norms on one process and on many.

Ranks are threads here; test_launch.py does the same with torchrun.
"""

from __future__ import annotations

import time
from dataclasses import replace
from functools import cache, partial

import pytest
import torch
from tiny import STYLES

from megapipe.config import Config, DataConfig, ModelConfig, ParallelConfig, TrainConfig
from megapipe.data.build import build_datasets
from megapipe.data.tokenizer import build_tokenizer
from megapipe.mesh import ProcessMesh
from megapipe.models.provider import gpt_provider
from megapipe.pipeline_parallel.threads import run_threads
from megapipe.training.pretrain import Run
from pretrain_gpt import forward_step

STEPS = 20


def config(model: ModelConfig, *, tp: int = 1, dp: int = 1, pp: int = 1, schedule: str = "1f1b", **train) -> Config:
    """A run of 20 steps with 4 microbatches of 2 sequences."""
    return Config(
        model=replace(model, max_position_embeddings=16, padded_vocab_size=128),
        parallel=ParallelConfig(
            tensor_model_parallel_size=tp, pipeline_model_parallel_size=pp, pipeline_schedule=schedule
        ),
        train=TrainConfig(
            micro_batch_size=2,
            global_batch_size=8,
            seq_length=16,
            train_iters=STEPS,
            lr=3e-3,
            lr_warmup_iters=2,
            **train,
        ),
        data=DataConfig(mock_data=True, tokenizer_type="NullTokenizer", vocab_size=127, num_workers=0),
        world_size=tp * dp * pp,
    )


def train(mesh: ProcessMesh, config: Config) -> list[tuple[float, float]]:
    """Loss and gradient norm of every step."""
    tokenizer = build_tokenizer(config.data)
    data = build_datasets(config, tokenizer)
    run = Run(config, mesh, gpt_provider, forward_step, data, tokenizer.eod, time.monotonic())
    return [(result.losses["lm loss"], result.grad_norm) for result in (run.step() for _ in range(STEPS))]


@cache
def alone(style: str, **train_flags) -> list[tuple[float, float]]:
    return train(ProcessMesh.single(), config(STYLES[style], **train_flags))


def split(style: str, **layout) -> list[list[tuple[float, float]]]:
    sizes = {axis: layout.get(axis, 1) for axis in ("tp", "dp", "pp")}
    return run_threads(partial(train, config=config(STYLES[style], **layout)), **sizes, timeout_s=60)


@pytest.mark.parametrize("style", STYLES)
def test_the_loss_falls(style):
    losses = [loss for loss, _ in alone(style)]
    assert losses[-1] < losses[0] - 0.3


@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize(("pp", "schedule"), [(2, "naive"), (2, "gpipe"), (2, "1f1b"), (4, "1f1b")])
def test_pipeline_parallel_runs_have_the_same_bits_as_one_process(style, pp, schedule):
    for rank in split(style, pp=pp, schedule=schedule):
        assert rank == alone(style)


@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize("layout", [{"tp": 2}, {"dp": 2}, {"tp": 2, "pp": 2}, {"tp": 2, "dp": 2, "pp": 2}])
def test_tensor_and_data_parallel_runs_agree_to_five_digits(style, layout):
    for rank in split(style, **layout):
        torch.testing.assert_close(torch.tensor(rank), torch.tensor(alone(style)), rtol=1e-5, atol=0)


def test_loss_per_token_of_the_global_batch_is_the_same_under_data_parallel():
    expected = alone("llama", calculate_per_token_loss=True)
    for rank in split("llama", dp=2, pp=2, calculate_per_token_loss=True):
        torch.testing.assert_close(torch.tensor(rank), torch.tensor(expected), rtol=1e-5, atol=0)
    # no token is masked here, so the mean over tokens is the mean of the microbatches' means
    torch.testing.assert_close(torch.tensor(expected), torch.tensor(alone("llama")), rtol=1e-5, atol=0)


def test_bf16_trains_close_to_float32():
    rounded, exact = alone("llama", bf16=True), alone("llama")
    assert rounded[-1][0] == pytest.approx(exact[-1][0], abs=0.02)
    assert rounded != exact
