"""A pipeline trains what one process trains: every loss, gradient, gradient norm and weight, under every schedule.

Cases, their training and the comparison are those of the fuzzer (tools/proofs/equivalence.py).
"""

from __future__ import annotations

import math
import os
from dataclasses import replace
from itertools import cycle, product
from random import Random

import pytest
from continued import go_on

from megapipe.pipeline_parallel.threads import run_threads
from megapipe.schedule import SCHEDULES
from megapipe.tensor_parallel.weight_grad import WeightGrads
from tools.proofs.equivalence import alone, differences, train
from tools.proofs.equivalence_case import Case, table
from tools.proofs.fuzz_equivalence import command, draw, read, run

pytestmark = pytest.mark.usefixtures("one_thread")


CHUNKS = {"zb-auto": 1, "hanayo": 2} | dict.fromkeys(
    ("interleaved", "interleaved-zb", "breadth-first", "group-interleaved"), 2
)


def case_of(schedule: str, pp: int, layers: int, **settings) -> Case:
    """The layers spread evenly, one at least for each position of the chain."""
    case = replace(Case(schedule, pp, 2 * pp, (), chunks=CHUNKS.get(schedule)), **settings)
    chain = table(case).placement.chain
    return replace(case, layers=(max(1, layers // chain),) * chain)


# scripts/nightly.sh trains under every schedule, for as many steps as tests ask for below; here, but for two ranks, of
# each placement and way to split B.
NIGHTLY = bool(os.environ.get("MEGAPIPE_NIGHTLY"))
FEW = ("1f1b", "interleaved", "zb-h1", "zb-v", "hanayo", "dualpipe", "dualpipe-v", "zb-auto")
SPREAD = tuple(SCHEDULES) if NIGHTLY else FEW
STEPS = (
    2 if NIGHTLY else 1
)  # by day float32 and processes below take more: what a step leaves to the next is seen there
ONE_COPY = [name for name in SPREAD if SCHEDULES[name].copies == 1]

# (tp, dp), and which of two pairs of tied x recomputed a schedule is split with; nightly pp alone has both.
SPLITS = [((2, 1), 0), ((1, 2), 1), ((2, 2), 0), ((2, 1), 1), ((1, 2), 0), ((2, 2), 1)]
TIED_RECOMPUTE = [[(True, "none"), (False, "full")], [(True, "full"), (False, "none")]]


@pytest.mark.parametrize(("schedule", "split", "pairs"), list(zip(SCHEDULES, cycle(SPLITS), cycle(TIED_RECOMPUTE))))
def test_every_schedule_trains_what_one_process_trains(schedule, split, pairs):
    (tp, dp), nth = split
    layouts = [((tp, dp), [pairs[nth]]), *[((1, 1), pairs)] * NIGHTLY]
    layers = 4 if NIGHTLY or schedule == "1f1b" else 2  # two on each rank, or one on each stage
    for layout, chosen in layouts:
        sizes = dict(zip(("tp", "dp"), layout, strict=True))
        cases = [case_of(schedule, 2, layers, tied=tied, recompute=how, steps=STEPS, **sizes) for tied, how in chosen]
        ranks = run_threads(lambda mesh: [train(mesh, case) for case in cases], pp=2, **sizes, timeout_s=60)  # noqa: B023
        for case, outcomes in zip(cases, zip(*ranks, strict=True), strict=True):
            assert differences(case, outcomes) == []


@pytest.mark.parametrize(("schedule", "style"), list(zip(SPREAD, cycle(["gpt2", "llama"]))))
def test_four_ranks_train_what_one_process_trains(schedule, style):
    case = case_of(schedule, 4, 4, style=style, tied=style == "gpt2", variable=style == "llama", steps=STEPS)
    assert differences(case, run_threads(lambda mesh: train(mesh, case), pp=4, timeout_s=60)) == []


MANY = {"zb-v": 10}


@pytest.mark.parametrize("schedule", ONE_COPY)
def test_float32_has_the_bits_of_one_process_for_many_steps(schedule):
    case = case_of(schedule, 2, 4, dtype="float32", steps=20 if NIGHTLY else MANY.get(schedule, 2))
    assert case.same_bits
    assert differences(case, run_threads(lambda mesh: train(mesh, case), pp=2, timeout_s=60)) == []


def test_dualpipe_rounds_otherwise_in_float32():
    case = case_of("dualpipe", 2, 4, dtype="float32", steps=20 if NIGHTLY else 5)
    mine, whole = run_threads(lambda mesh: train(mesh, case), pp=2, timeout_s=60)[0], alone(case.whole)
    assert mine.losses == pytest.approx(whole.losses, rel=1e-5)


LAYOUTS = [(4, 1, 1), (2, 1, 2), (2, 2, 1)]  # pp, dp, tp
PROCESSES = tuple(SCHEDULES) if NIGHTLY else ("1f1b", "zb-h1", "zb-v", "dualpipe")
IN_PROCESSES = [(schedule, layout) for schedule, layout in zip(SCHEDULES, cycle(LAYOUTS)) if schedule in PROCESSES]


@pytest.mark.parametrize(("schedule", "layout"), IN_PROCESSES)
def test_processes_train_what_one_process_trains(pool, schedule, layout):
    """As with ranks that are threads, what differs is the process: its random numbers, groups and pickles."""
    pp, dp, tp = layout
    number = list(SCHEDULES).index(schedule)
    recompute = ("none", "full", "selective", "modules", "partial")[number // 3 % 5]
    case = case_of(schedule, pp, 4, tp=tp, dp=dp, tied=number % 2 == 0, recompute=recompute, steps=2)
    assert differences(case, pool.run(train, [layout], case)) == []


@pytest.mark.parametrize(
    ("before", "after", "c", "layers", "microbatches"),
    [
        ("dualpipe", "1f1b", (1, 1), 4, 8),
        ("zb-v", "dualpipe", (1, 1), 8, 4),
        ("interleaved", "dualpipe-v", (1, 2), 8, 4),
        ("1f1b", "zb-v", (2, 1), 4, 4),
    ],
)
def test_a_run_goes_on_under_another_schedule_and_layout(pool, tmp_path, before, after, c, layers, microbatches):
    """c: context-parallel ranks before and after."""
    one, two = c
    first = case_of(before, 4 // one, layers, cp=one, microbatches=microbatches)
    then = case_of(after, 2, layers, tp=2 // two, cp=two, microbatches=microbatches)
    layouts = [(4 // one, 1, 1, one), (2, 1, 2 // two, two)]
    assert differences(then, pool.run(go_on, layouts, first, then, tmp_path)) == []


CONTEXT = {"p2p": (2, 1, 1), "all_gather": (2, 2, 1), "a2a": (2, 1, 2)}  # cp, tp, dp


@pytest.mark.parametrize(
    ("schedule", "way", "settings"),
    [
        ("dualpipe", "p2p", {"documents": "both"}),
        ("zb-v", "all_gather", {"sequence_parallel": True, "recompute": "full"}),
        ("interleaved", "a2a", {"distributed": True, "overlap": True, "window": 2, "recompute": "selective"}),
    ],
)
def test_context_parallel_ranks_train_what_one_process_trains(schedule, way, settings):
    """With dropout. The fuzzer draws all schedules and ways."""
    cp, tp, dp = CONTEXT[way]
    # The loss of a validation after a step tells of its update.
    case = case_of(schedule, 2, 1, cp=cp, tp=tp, dp=dp, way=way, steps=STEPS, style="llama", **settings)
    ranks = run_threads(lambda mesh: train(mesh, case), cp=cp, tp=tp, dp=dp, pp=2, timeout_s=120)
    assert differences(case, ranks) == []


TWENTY_STEPS = [
    Case(
        "naive", 1, 1, (1,), cp=cp, way=way, style=style, documents=documents, window=window, dtype="float32", steps=20
    )
    for cp, way, style, documents, window in product((4, 2), CONTEXT, ("llama", "gpt2"), ("none", "both"), (None, 3))
    if (way, style, cp) != ("a2a", "llama", 4)  # which has two groups
]


@pytest.mark.parametrize("case", TWENTY_STEPS if NIGHTLY else TWENTY_STEPS[:1])
def test_context_parallel_ranks_have_the_losses_of_one_process_in_float32_for_twenty_steps(case):
    ranks = run_threads(lambda mesh: train(mesh, case), cp=case.cp, timeout_s=120)
    assert ranks[0].losses == pytest.approx(alone(case.whole).losses, rel=1e-6)


MIXED_CASES = [
    ("zb-h1", {"tp": 2}, {"style": "latent", "sequence_parallel": True, "recompute": "modules", "tied": False}),
    ("zb-v", {"cp": 2}, {"style": "latent", "documents": "both", "experts": "groups"}),
    ("zb-v", {}, {"experts": "bias", "dtype": "float32", "recompute": "full"}),
    ("dualpipe", {}, {"experts": "groups", "style": "llama"}),
    ("zb-h1", {"tp": 2}, {"experts": "softmax", "sequence_parallel": True}),
    ("interleaved", {"dp": 2}, {"experts": "shared", "distributed": True, "overlap": True, "recompute": "modules"}),
    ("1f1b", {"cp": 2}, {"experts": "bias", "style": "llama", "per_token_loss": True}),
    ("hanayo", {"dp": 2}, {"experts": "dropping", "vocabulary": True}),
    ("dualpipe-v", {"tp": 2}, {"experts": "some", "overrides": "halves"}),
    ("zb-v", {"dp": 2, "ep": 2}, {"experts": "bias", "dispatcher": "alltoall", "distributed": True, "overlap": True}),
    ("dualpipe", {"dp": 2, "ep": 2}, {"experts": "dropping", "dispatcher": "alltoall", "recompute": "full"}),
    (
        "interleaved",
        {"tp": 2, "dp": 2, "ep": 2, "etp": 1},
        {"experts": "shared", "sequence_parallel": True, "distributed": True, "overlap": True, "buckets": 3},
    ),
    ("zb-h1", {"cp": 2, "etp": 2}, {"experts": "groups", "dispatcher": "alltoall", "per_token_loss": True}),
]


@pytest.mark.parametrize(("schedule", "sizes", "settings"), MIXED_CASES)
def test_experts_and_latents_train_what_they_train_in_one_process(schedule, sizes, settings):
    """Router losses and tokens of each expert too. The fuzzer draws all schedules and kinds."""
    # A bias of a router moves after a step; of all else the loss of a validation after one step tells.
    steps = 2 if NIGHTLY or settings.get("experts") == "bias" else 1
    layers = 4 if settings.get("experts") == "some" else 1
    case = case_of(schedule, 2, layers, steps=steps, **sizes, **settings)
    ranks = run_threads(lambda mesh: train(mesh, case), pp=2, **sizes, timeout_s=60)
    assert differences(case, ranks) == []


def test_a_rank_without_layers_takes_part():
    case = Case("1f1b", 3, 4, (1, 0, 1), dp=2, steps=1)
    assert differences(case, run_threads(lambda mesh: train(mesh, case), pp=3, dp=2, timeout_s=60)) == []


@pytest.mark.parametrize("settings", [{}, {"dtype": "bfloat16", "dp": 2}, {"dtype": "float16", "tp": 2}])
def test_the_comparison_sees_a_single_lost_product(monkeypatch, settings):
    run = WeightGrads.run

    def lossy(self, microbatch):
        if microbatch == 1:
            self._owed[microbatch].pop()
        run(self, microbatch)

    case = case_of("zb-h1", 2, 2, microbatches=2, steps=1, **settings)
    alone(case.whole)
    monkeypatch.setattr(WeightGrads, "run", lossy)
    ranks = run_threads(lambda mesh: train(mesh, case), tp=case.tp, dp=case.dp, pp=2, timeout_s=60)
    found = differences(case, ranks)
    assert any("gradients of decoder.layers.0" in text for text in found)


def test_a_step_of_fp16_that_overflows_on_ranks_alone_is_a_difference():
    case = case_of("1f1b", 1, 1, steps=1, dtype="float16", tp=2)
    own = alone(case.whole)
    assert any("norms" in text for text in differences(case, [own._replace(norms=[math.inf])]))


def test_a_printed_command_is_the_case():
    case = draw(Random(3))
    assert read(command(case).split("'")[1]) == case


@pytest.mark.parametrize("seed", [1, 5])
def test_a_drawn_case_trains_what_one_process_trains(seed):
    """scripts/nightly.sh draws for half an hour."""
    case = draw(Random(seed))
    assert case.config.world_size > 1
    assert run(case) == []
