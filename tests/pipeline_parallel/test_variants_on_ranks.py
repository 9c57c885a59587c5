"""What a family has of its own, trained under pipeline, tensor and other parallelism as in one process."""

from __future__ import annotations

import os
from dataclasses import replace

import pytest
import torch

from megapipe.pipeline_parallel.threads import run_threads
from tools.proofs.equivalence import differences, train
from tools.proofs.equivalence_case import Case, table
from tools.proofs.families.styles import PARTS

CASES = [
    *((parts, {"tp": 2, "sequence_parallel": True}) for parts in PARTS),
    ("factors", {"vocabulary": True, "tp": 2}),
    ("factors", {"depths": (1,), "fused": True}),
    ("one norm", {"tp": 2, "recompute": "modules", "schedule": "dualpipe-v"}),
    ("two norms", {"cp": 2, "style": "llama"}),
    ("none", {"dp": 2, "experts": "on input", "ep": 2, "dispatcher": "alltoall"}),
    ("biases", {"tp": 2, "experts": "on input", "sequence_parallel": True}),
    ("none", {"dp": 2, "experts": "softmax bias", "ep": 2}),
    ("none", {"cp": 2, "style": "phi3", "way": "a2a"}),
    ("none", {"tp": 2, "style": "phi3", "slices": (4, 4)}),
    ("none", {"tp": 2, "style": "ministral3", "documents": "both"}),
    ("clamped", {"tp": 2, "experts": "softmax", "sequence_parallel": True}),
]


@pytest.mark.parametrize(("parts", "settings"), CASES)
def test_every_part_trains_what_one_process_trains(parts, settings):
    torch.set_num_threads(1)
    # The loss of a validation after a step tells of its update; scripts/nightly.sh takes two steps.
    steps = 2 if os.environ.get("MEGAPIPE_NIGHTLY") else 1
    microbatches = 4 if "schedule" in settings else 2
    case = replace(Case("zb-h1", 2, microbatches, (), parts=parts, steps=steps), **settings)
    case = replace(case, layers=(1,) * table(case).placement.main)
    sizes = {axis: getattr(case, axis) for axis in ("tp", "cp", "dp", "pp", "ep")}
    outcomes = run_threads(lambda mesh: train(mesh, case), **sizes, timeout_s=60)
    assert differences(case, outcomes) == []
