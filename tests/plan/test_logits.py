"""Logits are kept for backward where the plan's bytes leave a device room for them."""

from __future__ import annotations

from dataclasses import replace

import pytest

from megapipe.config import Config
from megapipe.flags.parse import parse
from megapipe.plan import make_plan
from megapipe.plan.logits import most_kept
from megapipe.tensor_parallel.fused_cross_entropy import KEPT_ELEMENTS

FLAGS = (
    "--bf16 --num-layers 8 --hidden-size 1024 --num-attention-heads 16 --seq-length 2048 --micro-batch-size 4 "
    "--max-position-embeddings 2048 --global-batch-size 32 --untie-embeddings-and-output-weights "
    "--pipeline-model-parallel-size 4 "
)
LOGITS = 4 * 2048 * 50304


def planned(flags: str):
    config = replace(parse(Config, (FLAGS + flags).split()), world_size=4)
    config = replace(config, model=replace(config.model, padded_vocab_size=50304)).with_batch(32)
    return config, make_plan(config)


@pytest.mark.parametrize("schedule, at_once", [("1f1b", 1), ("gpipe", 8), ("zb-h1", 4)])
def test_what_the_last_rank_holds_at_once_must_fit_beside_the_plans_bytes(schedule, at_once):
    """1F1B's last rank has one microbatch under way, GPipe's all; ZB-H1's W passes wait for up to as many as ranks."""
    config, plan = planned(f"--cross-entropy-loss-fusion --pipeline-schedule {schedule} ")
    needed = (plan.peak_bytes[3] + at_once * 2 * LOGITS) / 0.9  # a tenth of a device stays free
    assert most_kept(config, plan, needed * 1.001) == LOGITS
    assert most_kept(config, plan, needed * 0.999) == KEPT_ELEMENTS


def test_nothing_changes_where_no_memory_is_known_or_the_loss_is_not_fused():
    for flags, memory in (("--cross-entropy-loss-fusion ", None), ("", 1e15)):
        assert most_kept(*planned(flags), memory) == KEPT_ELEMENTS
