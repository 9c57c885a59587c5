"""--pipeline-slices: how a run's sequences are cut, what the plan says of it, what it does not go with."""

from dataclasses import replace
from itertools import pairwise

import pytest

from megapipe.checks.run import flag_problems
from megapipe.config import Config
from megapipe.flags.parse import parse
from megapipe.plan import changes, make_plan
from megapipe.plan.shapes.slices import in_words, lengths
from megapipe.schedule import Kind, build

FLAGS = (
    "--num-layers 4 --hidden-size 64 --num-attention-heads 4 --seq-length 1024 --max-position-embeddings 1024 "
    "--micro-batch-size 1 --global-batch-size 2 --mock-data --tokenizer-type NullTokenizer --vocab-size 99 "
    "--padded-vocab-size 128 --lr 1e-3 --train-iters 2 --pipeline-model-parallel-size 4"
)


def config(*more):
    made = parse(Config, [*FLAGS.split(), *more])
    size = made.parallel.ranks_of_a_replica
    return Config(**{**vars(made), "world_size": size}).with_batch(2)


def test_slices_have_equal_work_of_forward_and_backward():
    tokens = lengths(config("--pipeline-slices", "4"))
    assert sum(tokens) == 1024
    assert list(tokens) == sorted(tokens, reverse=True)
    # A layer's products are 24 h^2 a token forward and as much twice more, its scores 4 h s / 2 and twice that again.
    work = [72 * 64 + 12 * (t + 0.5) for t in range(1024)]
    ends = [sum(tokens[:k]) for k in range(5)]
    parts = [sum(work[a:b]) / sum(work) for a, b in pairwise(ends)]
    assert parts == pytest.approx([0.25] * 4, abs=0.01)
    assert lengths(config("--pipeline-slices", "4", "--pipeline-slice-cuts", "equal")) == (256,) * 4


def test_slices_are_multiples_of_what_ranks_share_them_among():
    shared = "--context-parallel-size 2 --tensor-model-parallel-size 2 --sequence-parallel"
    tokens = lengths(config("--pipeline-slices", "3", *shared.split()))
    assert sum(tokens) == 1024
    assert all(n % 8 == 0 for n in tokens)


def test_auto_takes_as_many_as_a_short_batch_gains_by():
    given = (), ("--pipeline-slices", "4"), ("--pipeline-slices", "auto")
    whole, four, best = (make_plan(config(*more)) for more in given)
    assert not whole.schedule.cuts
    assert len(four.schedule.cuts) == 4
    assert len(best.schedule.cuts) >= 4
    assert best.timeline.makespan <= four.timeline.makespan < 0.6 * whole.timeline.makespan
    assert max(four.peak_bytes) < max(whole.peak_bytes) * 1.1


def test_a_schedule_of_slices_by_name_has_its_own_number_or_the_one_asked_for():
    chunks = "--pipeline-schedule", "slimpipe", "--num-virtual-stages-per-pipeline-rank", "1"
    four, eight = (make_plan(config(*chunks, *more)).schedule for more in ((), ("--pipeline-slices", "8")))
    assert four.cuts == lengths(config("--pipeline-slices", "4"))  # as many as ranks
    assert eight.cuts == lengths(config("--pipeline-slices", "8"))
    problems = flag_problems(config(*chunks, "--pipeline-slices", "6"))
    assert any("slimpipe takes a multiple of 4 slices, one for each rank, got 6. Use 8." in x for x in problems)


def test_recomputed_layers_keep_their_keys_for_later_slices():
    given = ("--pipeline-slices", "2", "--recompute-granularity", "full")
    costs = make_plan(config(*given)).costs
    # An input of [s, b, h] in float32, and keys and values as wide each.
    assert costs.mem_b[1] == 3 * 1024 * 64 * 4
    assert costs.mem_k[1] == 2 * 1024 * 64 * 4
    half = make_plan(config(*given, "--bf16")).costs
    assert half.gradients_of_keys(1, build("1f1b", 4, 4).placement) == costs.mem_k[1], "added up in float32"


COPIED = "--fine-grained-activation-offloading", "--offload-time", "0.1"


def test_copies_of_slices_leave_less_than_half_and_take_no_longer():
    given = "--pipeline-slices", "4"
    plain, made, half = (
        make_plan(config(*given, *more)) for more in ((), COPIED, (*COPIED, "--activation-offload-fraction", "0.5"))
    )
    assert changes(made).startswith(f"{COPIED[0]}: of 32 activations of a stage and slice 30 copied")
    assert made.timeline.makespan == plain.timeline.makespan
    assert max(made.peak_bytes) - max(made.state_bytes) < 0.5 * plain.timeline.peak[0]
    # Of what graphs save half goes, of keys and values all.
    whole = zip(half.costs.mem_b, half.costs.mem_k, strict=True)
    assert half.costs.mem_o == pytest.approx([0.5 * (x - k) + k for x, k in whole])


def test_a_memory_limit_is_met_by_slices_that_are_moved():
    given = "--pipeline-slices", "4", "--offload-time", "0.5"
    plain = make_plan(config(*given[:2]))
    limit = (max(plain.state_bytes) + 0.4 * plain.timeline.peak[0]) / 2**30
    made = make_plan(config(*given, "--memory-limit-gib", str(limit)))
    assert max(made.peak_bytes) <= limit * 2**30
    assert {Kind.O, Kind.R} & made.schedule.kinds


def test_an_order_of_slices_is_searched_for_the_costs_of_the_run():
    given = "--pipeline-slices", "4", "--pipeline-schedule"
    by_hand, found = (make_plan(config(*given, name)) for name in ("zb-h1", "zb-auto"))
    assert found.schedule.cuts == by_hand.schedule.cuts
    assert found.timeline.makespan < by_hand.timeline.makespan
    assert found.schedule == make_plan.__wrapped__(config(*given, "zb-auto")).schedule, "on every rank the same"


@pytest.mark.parametrize(
    "cuts, text", [((), ""), ((4, 4), " in 2 slices of 4 tokens"), ((6, 2), " in 2 slices of 6 to 2 tokens")]
)
def test_slices_are_said_with_their_longest_and_their_shortest(cuts, text):
    assert in_words(replace(build("1f1b", 2, 4), cuts=cuts)) == text
