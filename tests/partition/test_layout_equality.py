"""Any split under any schedule computes what the unsplit model computes: every loss, every gradient, in float64."""

import os
from collections import Counter
from dataclasses import replace
from functools import cache, partial
from random import Random

import pytest
import torch
from tiny import LAYERS, STYLES, run_step

from megapipe.distributed.mesh import ProcessMesh
from megapipe.partition.layout import layout_string
from megapipe.pipeline_parallel.threads import run_threads
from megapipe.schedule import build

MICROBATCHES = 8 if os.environ.get("MEGAPIPE_NIGHTLY") else 4
OVERRIDES = (
    '{"0": {"ffn_hidden_size": 24}, "1": {"no_attention": true}, "3": {"no_mlp": true, "num_attention_heads": 2}, '
    '"2": {"multi_latent_attention": true, "group_query_attention": false, "kv_lora_rank": 10, "qk_head_dim": 8, '
    '"qk_pos_emb_head_dim": 4, "v_head_dim": 6}}'
)
MODELS = STYLES | {"mixed": replace(STYLES["llama"], per_layer_overrides=OVERRIDES)}
SCHEDULES = [
    ("gpipe", 2, None),
    ("1f1b", 4, None),
    ("interleaved", 2, 3),
    ("interleaved", 4, 2),
    ("interleaved-zb", 2, 2),
    ("zb-h1", 2, None),
    ("zb-h2", 4, None),
    ("zb-v", 2, None),
    ("zb-v", 4, None),
    ("v-half", 2, None),
    ("v-min", 4, None),
    ("dualpipe-v", 2, None),
]


def random_counts(random: Random, chain: int) -> tuple[int, ...]:
    """Layers dealt at random: some stages get none, an end may stand alone."""
    dealt = Counter(random.choices(range(chain), k=LAYERS))
    return tuple(dealt[position] for position in range(chain))


@cache
def whole(style: str):
    return run_step(ProcessMesh.single(), MODELS[style], build("naive", 1, MICROBATCHES))


@pytest.mark.parametrize(
    ("name", "pp", "chunks", "style"),
    [(*schedule, style) for n, schedule in enumerate(SCHEDULES) for style in (list(STYLES)[n % 2], "mixed")],
)
def test_a_random_split_computes_what_the_unsplit_model_does(name, pp, chunks, style):
    schedule = build(name, pp, MICROBATCHES, chunks=chunks)
    counts = random_counts(Random(f"{name}{pp}{style}"), schedule.placement.chain)
    losses, gradients = whole(style)
    step = partial(run_step, model=MODELS[style], schedule=schedule, counts=counts)
    ranks = run_threads(step, pp=pp, timeout_s=30)

    assert [reported for reported, _ in ranks if reported] == [pytest.approx(losses, rel=1e-12)], layout_string(counts)
    seen = [(name, gradient) for _, local in ranks for name, (gradient, _, _) in local.items()]
    assert sorted(name for name, _ in seen) == sorted(gradients), layout_string(counts)
    for param, gradient in seen:
        torch.testing.assert_close(gradient, gradients[param][0], rtol=1e-9, atol=1e-14)
