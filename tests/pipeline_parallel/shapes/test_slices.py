"""A run whose sequences are cut in slices trains what one on whole sequences trains.

Attention of a slice adds up in another order than that of a whole sequence: the same to 1e-12 in float64. With the same
cuts every schedule and number of ranks has the same bits.
"""

import os
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import ClassVar

import pytest
import torch

from megapipe.distributed.mesh import ProcessMesh
from megapipe.errors import ConfigError
from megapipe.pipeline_parallel.loss import Loss
from megapipe.pipeline_parallel.shapes.slices import Lengths, Slices, joined
from megapipe.pipeline_parallel.threads import run_threads
from megapipe.training.steps import batches
from tools.proofs.equivalence import alone, differences, train
from tools.proofs.equivalence_case import Case, table

pytestmark = pytest.mark.usefixtures("one_thread")


# The loss of a validation after a step tells of its update; scripts/nightly.sh takes two steps in each case.
STEPS = 2 if os.environ.get("MEGAPIPE_NIGHTLY") else 1


def case_of(schedule="1f1b", pp=1, **settings):
    case = replace(Case(schedule, pp, 4, (), slices=(3, 3, 2), steps=STEPS), **settings)
    return replace(case, layers=(max(1, 2 // pp),) * table(case).placement.chain)


@pytest.mark.parametrize(
    "settings",
    [
        {"steps": 2},
        {"style": "llama", "window": 3, "recompute": "full", "batch": 2},
        {"style": "latent", "documents": "both", "recompute": "selective", "tied": False},
        {"documents": "attention", "window": 2, "per_token_loss": True},
        {"slices": (1, 1, 1, 1, 1, 1, 1, 1), "style": "llama", "documents": "positions"},
        {"documents": "both", "follows": True, "recompute": "full", "experts": "bias", "batch": 2},
        {"experts": "softmax", "per_token_loss": True, "recompute": "selective"},
    ],
)
def test_slices_train_what_whole_sequences_train(settings):
    case = case_of(**{"microbatches": 2} | settings)
    mine, whole = alone(case.whole), alone(replace(case.whole, slices=(), follows=False))
    assert mine.losses == pytest.approx(whole.losses, rel=1e-12)
    assert mine.norms == pytest.approx(whole.norms, rel=1e-12)
    assert mine.routers == pytest.approx(whole.routers, rel=1e-12)
    for name, (gradient, _) in mine.gradients.items():
        torch.testing.assert_close(gradient, whole.gradients[name].tensor, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize(
    "case",
    [
        case_of("1f1b", 2, dtype="float32", recompute="full", steps=2),
        case_of("zb-h1", 2, dtype="float32", style="llama", file="json", documents="attention", follows=True),
        case_of("interleaved", 2, chunks=2, documents="both"),
        # One rank has nothing to gather: gradients of keys are added up before they are rounded, whatever the way.
        case_of("zb-v", 2, dtype="bfloat16", p2p="batched", experts="softmax", way="all_gather"),
        case_of("interleaved-zb", 4, chunks=2, window=3),
        case_of("dualpipe", 2, style="latent"),
    ],
    ids=lambda case: case.schedule,
)
def test_with_the_same_cuts_schedules_and_ranks_have_the_same_bits(case):
    assert case.same_bits or case.schedule == "dualpipe"
    assert differences(case, run_threads(lambda mesh: train(mesh, case), pp=case.pp, timeout_s=60)) == []


@pytest.mark.parametrize(("schedule", "pp", "m"), [("1f1b", 2, 1), ("zb-h1", 2, 3), ("1f1b", 2, 5)])
def test_any_number_of_microbatches_has_the_bits_of_one_process(schedule, pp, m):
    case = case_of(schedule, pp, microbatches=m, dtype="float32", documents="attention", follows=True, steps=1)
    assert case.same_bits
    assert differences(case, run_threads(lambda mesh: train(mesh, case), pp=pp, timeout_s=60)) == []


@pytest.mark.parametrize(
    "settings",
    [
        {"tp": 2, "sequence_parallel": True, "slices": (4, 2, 2), "recompute": "full", "steps": 2},
        {"cp": 2, "slices": (4, 4), "documents": "both", "schedule": "zb-h1", "experts": "bias"},
        {"cp": 2, "slices": (4, 4), "way": "a2a", "recompute": "selective"},
        {"cp": 2, "slices": (4, 4), "way": "all_gather", "window": 3, "pp": 1},
        {"dp": 2, "distributed": True, "overlap": True, "buckets": 2, "style": "llama"},
    ],
    ids=lambda x: "-".join(x),
)
def test_ranks_share_the_tokens_of_each_slice(settings):
    case = case_of(**{"pp": 2, "microbatches": 2} | settings)
    sizes = {axis: getattr(case, axis) for axis in ("tp", "cp", "dp", "pp")}
    assert differences(case, run_threads(lambda mesh: train(mesh, case), timeout_s=60, **sizes)) == []


def test_the_documents_of_a_microbatch_are_found_once_a_step(monkeypatch):
    """They were found anew for every stage, slice and pass."""
    calls = []
    found = partial(batches.find_documents)
    monkeypatch.setattr(batches, "find_documents", lambda *given, **also: calls.append(0) or found(*given, **also))
    case = case_of("interleaved", 1, chunks=2, documents="attention", follows=True, steps=3)
    train(ProcessMesh.single(), case)
    evaluation = 1
    assert len(calls) == 4 * (3 + evaluation)


class Borders(tuple[int, ...]):
    """Counts how often somebody looks through it."""

    looks: ClassVar[list[int]] = []

    def __iter__(self):
        self.looks.append(0)
        return super().__iter__()


def test_cuts_are_moved_to_the_borders_of_documents_once_for_all_passes_of_a_microbatch():
    """Each stream, message and batch of each slice compared all cuts with all borders: 0.8 ms, for 64 slices and 200
    documents."""
    documents = SimpleNamespace(borders=Borders((5, 14, 30)))
    slices = Slices(Lengths((8,) * 4, 1, lambda microbatch: documents))
    tokens = [slices.tokens(number)[0] for number in (*range(4), *range(4))]
    assert tokens == [range(0, 5), range(5, 14), range(14, 24), range(24, 32)] * 2
    assert len(Borders.looks) <= 3, "of three cuts each one"


def test_a_mean_of_a_slice_is_no_part_of_a_microbatchs():
    part = Loss(torch.tensor(1.0), None, {})
    with pytest.raises(ConfigError, match=r"return \(sum of token losses, number of tokens, dict\)"):
        joined([part, part])
    part = Loss(torch.tensor(1.0), torch.tensor(3), {"a": 2.0})
    with pytest.raises(ConfigError, match=r"'a' is one number, .* report \(sum, count\)"):
        joined([part, part])


def test_what_slices_report_is_added_up():
    def part(x, n):
        return Loss(torch.tensor(x), torch.tensor(n), {"a": (x, n), "b": torch.tensor([x, 1.0])})

    whole = joined([part(1.0, 3), part(4.0, 1)])
    assert (whole.value.item(), whole.tokens.item(), whole.reported["a"]) == (5.0, 4, (5.0, 4))
    assert whole.reported["b"].tolist() == [5.0, 2.0]
