"""The layout does not change the training: the same losses and gradient norms on one process and on many.

Ranks are threads here; test_launch.py does the same with torchrun.
"""

from __future__ import annotations

import os
from dataclasses import replace
from functools import partial
from itertools import cycle, product
from typing import Any

import pytest
import torch
from short_run import SPLIT_STEPS, alone, config, split, train
from tiny import STYLES

from megapipe.pipeline_parallel.threads import run_threads

NIGHTLY = bool(os.environ.get("MEGAPIPE_NIGHTLY"))
# test_equality.py asks of every schedule what one process trains; here, of a chain, a loop and a turn, the whole run.
SCHEDULES = [(2, "interleaved"), (2, "zb-v"), (4, "1f1b")]
if NIGHTLY:
    SCHEDULES += [(2, name) for name in ("naive", "gpipe", "1f1b", "zb-h1", "zb-h2", "v-half", "v-min", "dualpipe-v")]
LAYOUTS = [{"tp": 2}, {"dp": 2}, {"tp": 2, "pp": 2}, {"tp": 2, "dp": 2, "pp": 2}, {"pp": 2, "schedule": "dualpipe"}]


def with_a_style(cases: list[Any]) -> list[tuple[Any, str]]:
    """The styles in turn; scripts/nightly.sh trains every case with each."""
    return list(product(cases, STYLES) if NIGHTLY else zip(cases, cycle(STYLES)))


@pytest.mark.parametrize("style", STYLES)
def test_the_loss_falls(style):
    losses = [loss for loss, _ in alone(style)]
    assert losses[-1] < losses[0] - 0.3


@pytest.mark.parametrize(("table", "style"), with_a_style(SCHEDULES))
def test_pipeline_parallel_runs_have_the_same_bits_as_one_process(table, style):
    pp, schedule = table
    for rank in split(style, pp=pp, schedule=schedule):
        assert rank == alone(style, SPLIT_STEPS)


@pytest.mark.parametrize(("layout", "style"), with_a_style(LAYOUTS))
def test_tensor_and_data_parallel_runs_agree_to_five_digits(layout, style):
    for rank in split(style, **layout):
        torch.testing.assert_close(torch.tensor(rank), torch.tensor(alone(style, SPLIT_STEPS)), rtol=1e-5, atol=0)


@pytest.mark.parametrize(
    ("style", "layout"),
    [
        ("gpt2", {"tp": 2, "schedule": "zb-h1"}),
        ("llama", {"tp": 2, "pp": 2, "schedule": "zb-h1"}),
    ],
)
def test_sequence_parallel_runs_agree_to_five_digits(style, layout):
    shared = config(replace(STYLES[style], sequence_parallel=True), **layout)
    sizes = {axis: size for axis, size in layout.items() if axis != "schedule"}
    for rank in run_threads(partial(train, config=shared, steps=SPLIT_STEPS), **sizes):
        torch.testing.assert_close(torch.tensor(rank), torch.tensor(alone(style, SPLIT_STEPS)), rtol=1e-5, atol=0)


def test_loss_per_token_of_the_global_batch_is_the_same_under_data_parallel():
    expected = alone("llama", SPLIT_STEPS, calculate_per_token_loss=True)
    for rank in split("llama", dp=2, pp=2, calculate_per_token_loss=True):
        torch.testing.assert_close(torch.tensor(rank), torch.tensor(expected), rtol=1e-5, atol=0)
    # no token is masked here, so the mean over tokens is the mean of the microbatches' means
    torch.testing.assert_close(torch.tensor(expected), torch.tensor(alone("llama", SPLIT_STEPS)), rtol=1e-5, atol=0)


def test_bf16_trains_close_to_float32():
    rounded, exact = alone("llama", 10, bf16=True), alone("llama", 10)
    assert rounded[-1][0] == pytest.approx(exact[-1][0], abs=0.02)
    assert rounded != exact
