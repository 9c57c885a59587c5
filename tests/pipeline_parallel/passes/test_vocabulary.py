"""A vocabulary that all pipeline ranks share trains what one process trains, and its checkpoints are like any other."""

import os
from dataclasses import replace

import pytest
import torch
from continued import go_on

from megapipe.distributed.axis import Axis
from megapipe.pipeline_parallel.threads import run_threads
from megapipe.plan import sharing
from megapipe.tensor_parallel import fused_cross_entropy as fused
from megapipe.tensor_parallel.vocabulary import (
    add_head_gradient,
    combine,
    packed_loss,
    share_of_loss,
    size_of_loss,
    size_of_share,
)
from tools.proofs.equivalence import differences, train
from tools.proofs.equivalence_case import Case, table

TOKENS, HIDDEN, VOCAB = 6, 8, 384
# The loss of a validation after a step tells of its update; scripts/nightly.sh takes two steps in each case.
STEPS = 2 if os.environ.get("MEGAPIPE_NIGHTLY") else 1


def case_of(schedule: str, pp: int, **settings: object) -> Case:
    """Four layers, or one for each position of a longer chain."""
    case = replace(Case(schedule, pp, 2 * pp, (), vocabulary=True, steps=STEPS), **settings)
    chain = table(case).placement.main
    return replace(case, layers=(max(1, 4 // chain),) * chain)


@pytest.mark.parametrize("shares", [1, 3])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.bfloat16, 2e-2)])
def test_shares_of_any_number_make_torchs_cross_entropy(monkeypatch, shares, dtype, tolerance):
    monkeypatch.setattr(fused, "BLOCK_ELEMENTS", TOKENS * 64)  # several blocks in a share
    draw = torch.Generator().manual_seed(3)
    x, weight = (torch.randn(n, HIDDEN, generator=draw, dtype=torch.float64).to(dtype) for n in (TOKENS, VOCAB))
    labels = torch.tensor([0, 127, 128, 383, 250, -100])
    scale = torch.rand(TOKENS, generator=draw, dtype=torch.float64)
    exact, exact_weight = (one.double().clone().requires_grad_() for one in (x, weight))
    wanted = torch.nn.functional.cross_entropy(exact @ exact_weight.t(), labels, reduction="none")
    grad_x, grad_weight = torch.autograd.grad(wanted, (exact, exact_weight), scale)

    rows = VOCAB // shares
    made = [
        share_of_loss(x, part, labels - i * rows, differentiated=True) for i, part in enumerate(weight.chunk(shares))
    ]
    assert {share.numel() for share, _ in made} == {size_of_share(TOKENS, HIDDEN, dtype)}
    loss = combine([share for share, _ in made], HIDDEN, Axis())
    scale = scale.to(loss.losses.dtype).masked_fill(loss.ignored, 0)
    message = packed_loss(loss.log_sum, scale, dtype)
    assert message.numel() == size_of_loss(TOKENS, dtype)
    into = torch.zeros(VOCAB, HIDDEN, dtype=torch.promote_types(dtype, torch.float32))
    for (_, kept), part, own in zip(made, weight.chunk(shares), into.chunk(shares), strict=True):
        add_head_gradient(kept, part, own, message)

    def far(found: torch.Tensor, from_: torch.Tensor) -> float:
        return float((found.double() - from_).norm() / from_.norm())

    assert far(loss.losses, wanted.detach()) < tolerance
    assert far(loss.to_input * scale[:, None], grad_x) < tolerance
    assert far(into, grad_weight) < tolerance


@pytest.mark.parametrize(
    ("schedule", "pp", "settings"),
    [
        ("1f1b", 2, {"tied": False, "tp": 2, "sequence_parallel": True, "depths": (1, 0), "steps": 2}),
        ("zb-h1", 4, {"documents": "both", "per_token_loss": True, "depths": (2,)}),
        ("zb-v", 2, {"dp": 2, "distributed": True, "overlap": True, "recompute": "full"}),
        ("interleaved", 2, {"chunks": 2, "style": "llama", "p2p": "ring"}),
        ("dualpipe", 2, {"file": "csv", "steps": 2}),
        ("dualpipe", 2, {"depths": (1,), "style": "llama"}),
        ("chimera", 2, {"dp": 2, "distributed": True, "overlap": True}),
        ("dualpipe-v", 2, {"dtype": "float32", "fused": True}),
    ],
)
def test_a_shared_vocabulary_trains_what_one_process_trains(schedule, pp, settings):
    """With --vocab-parallel-pipeline."""
    case = case_of(schedule, pp, **settings)
    case = replace(case, layers=(1,) * len(case.layers))
    assert differences(case, trained(case)) == []


def trained(case):
    shares = sharing(table(case).placement, tied=case.tied)
    return run_threads(lambda mesh: train(mesh, case), tp=case.tp, dp=case.dp, pp=case.pp, shares=shares, timeout_s=120)


def test_depths_have_the_same_losses_to_the_bit_wherever_they_are_and_under_every_schedule():
    ways = (("1f1b", (0, 1)), ("zb-h1", (1, 1)), ("zb-v", (0, 0)))
    cases = [case_of(name, 2, microbatches=4, depths=depths, dtype="float32", steps=2) for name, depths in ways]
    # of each step, of a validation, of both depths in each step: the model's where its loss is, depths' where they are
    known = [{x for rank in trained(case) for x in rank.losses if x == x} for case in cases]
    assert known[0] == known[1] == known[2]
    assert len(known[0]) == 3 + 2 * 2


@pytest.mark.parametrize(
    ("saves", "loads"),
    [
        (case_of("1f1b", 4, microbatches=4), case_of("zb-v", 2, tp=2, vocabulary=False)),
        (case_of("1f1b", 4, microbatches=4, vocabulary=False), case_of("zb-v", 2, tp=2)),
        (case_of("dualpipe", 4), case_of("chimera", 2, tp=2, microbatches=8)),
    ],
    ids=["to ends", "from ends", "two copies"],
)
def test_a_checkpoint_moves_between_with_and_without(pool, tmp_path, saves, loads):
    layouts = [(x.pp, x.dp, x.tp) for x in (saves, loads)]
    assert differences(replace(loads, steps=3), pool.run(go_on, layouts, saves, loads, tmp_path)) == []
