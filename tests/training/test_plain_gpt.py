"""Five features train what a GPT in plain torch trains on one process in float64.

They are CUDA graphs (emulated), activations that are copied or computed again, slices of
microbatches, ZeRO-2 and ZeRO-3, and weights gathered in FP8. Other tests compare these only with
our own runs.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache, partial

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from megapipe.config import Config
from megapipe.distributed.mesh import ProcessMesh
from megapipe.pipeline_parallel.threads import run_threads
from tools.proofs.equivalence import Outcome, Training, train
from tools.proofs.equivalence_case import EOD, LR, Case
from tools.proofs.gpu.graphs import with_graphs

from .plain_gpt import EMBEDDING, HybridLinear, PlainGPT, Trained, trained

HEAD = "output_layer.weight"
LAYERS, SEQUENCES, STEPS = 4, 8, 2
RTOL = 1e-9
"""Relative. Sums are added in another order, and Adam divides by gradients that may be small."""
BASE = Case("1f1b", 2, SEQUENCES, (2, 2), steps=STEPS, attention_dropout=0.0, hidden_dropout=0.0)
SPLIT = replace(BASE, dp=2, microbatches=SEQUENCES // 2, distributed=True, overlap=True)
SHARDS = {"schedule": "interleaved", "chunks": 2, "layers": (1,) * LAYERS, "living": (1, 1, False)}
"""A stage's gradients are reduced, and its weights gathered, several times a step."""
EIGHT_BITS = {"fp8_format": "hybrid", "fp8_recipe": "tensorwise", "fp8_param_gather": True}


@dataclass(frozen=True)
class InEightBits(Case):
    """A case whose linear layers multiply in FP8, and whose ranks gather FP8 weights."""

    @property
    def config(self) -> Config:
        config = super().config
        return replace(config, model=replace(config.model, **EIGHT_BITS))


@cache
def judge(linear=F.linear) -> Trained:
    initial = Training(ProcessMesh.single(), BASE.whole).weights()
    weights = {name: part.tensor for name, part in initial.items() if name != HEAD}
    steps = [samples(step * SEQUENCES) for step in range(BASE.steps)]
    return trained(PlainGPT(weights, LAYERS, 4, linear), steps, samples(10_000), LR, EOD)


def samples(first: int) -> list[Tensor]:
    return [BASE.sample(first + n) for n in range(SEQUENCES)]


def agrees(ranks: list[Outcome], wanted: Trained) -> None:
    """Assert that every rank's numbers are the judge's, and that the ranks hold all weights."""
    for mine in ranks:
        assert mine.losses == pytest.approx(wanted.losses, rel=RTOL)
        assert mine.norms == pytest.approx(wanted.norms, rel=RTOL)
        for kind in ("gradients", "weights"):
            found = {name: part.tensor for name, part in getattr(mine, kind).items()}
            every = getattr(wanted, kind)
            every = every | {HEAD: every[EMBEDDING]}
            same = {name: every[name] for name in found}
            torch.testing.assert_close(found, same, rtol=RTOL, atol=RTOL / 100)
    assert set().union(*(mine.weights for mine in ranks)) == wanted.weights.keys() | {HEAD}


def run(case: Case) -> list[Outcome]:
    return run_threads(partial(train, case=case), pp=case.pp, dp=case.dp, timeout_s=60)


def test_passes_replayed_as_graphs_train_as_plain_torch():
    ranks, replays = with_graphs(replace(BASE, schedule="zb-h1"), [])
    assert replays == (STEPS - 1) * 3 * 2 * SEQUENCES  # steps after the first; F, B, W; stages; microbatches
    agrees(ranks, judge())


@pytest.mark.parametrize(
    "case",
    [
        replace(BASE, schedule="zb-h1", memory="some"),
        replace(BASE, slices=(3, 3, 2)),
        replace(SPLIT, **SHARDS, sharding="grads"),
        replace(SPLIT, **SHARDS, sharding="weights"),
        replace(SPLIT, schedule="zb-h1", sharding="weights", memory="some", slices=(3, 3, 2)),
    ],
    ids=["copies and recomputation", "slices", "zero-2", "zero-3", "all of them"],
)
def test_what_moves_or_cuts_a_run_trains_as_plain_torch(case):
    agrees(run(case), judge())


def test_weights_gathered_in_fp8_train_as_plain_torch_with_rounded_operands():
    case = InEightBits(**vars(SPLIT))  # whole microbatches, as each has its own scales
    assert case.config.gathers_fp8
    agrees(run(case), judge(HybridLinear.apply))
