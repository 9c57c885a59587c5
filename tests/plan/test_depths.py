"""The plan of a model with depths of multi-token prediction: their pairs, their shares of a vocabulary, their costs."""

from dataclasses import replace

import pytest

from megapipe.config import Config
from megapipe.flags.parse import parse
from megapipe.partition.spans import LayerSpan
from megapipe.plan import GIB, Plan, make_plan
from megapipe.plan.plan import added_by_depths
from megapipe.schedule import simulate
from megapipe.schedule.costs_file import dump_costs

FLAGS = (
    "--num-layers 8 --hidden-size 256 --num-attention-heads 4 --seq-length 64 --max-position-embeddings 64 --mock-data "
    "--tokenizer-type NullTokenizer --vocab-size 2047 --micro-batch-size 1 --train-iters 1 --lr 1e-3 "
    "--untie-embeddings-and-output-weights --global-batch-size 16 --pipeline-model-parallel-size 4 --mtp-num-layers 2 "
)
EXPERTS = "--expert-model-parallel-size 2 --num-experts 4 --moe-ffn-hidden-size 64 --overlap-moe-expert-parallel-comm "


def planned(flags: str) -> Plan:
    parsed = parse(Config, (FLAGS + flags).split())
    return make_plan(replace(parsed, model=replace(parsed.model, padded_vocab_size=2048), world_size=8))


@pytest.mark.parametrize("layout", ["Et|t|t|t|t|t|tm|tmL", "Et|tt|tt||t|t||tmmL"])
def test_pairs_are_made_of_depths_too(layout):
    """They were made before depths came in, and a depth that was not beside the loss took all pairs apart again."""
    plan = planned(f"{EXPERTS}--pipeline-schedule dualpipe-v --pipeline-model-parallel-layout {layout}")
    paired = {x.stage for row in plan.schedule.ranks for step in row for x in step if len(step) > 1}
    assert paired == set(range(10))
    links = replace(plan.costs, link_f=0.2, link_b=0.2)
    alone = planned(
        f"{EXPERTS.replace('--overlap-moe-expert-parallel-comm', '')}--pipeline-schedule dualpipe-v "
        f"--pipeline-model-parallel-layout {layout}"
    )
    assert simulate(plan.schedule, links).makespan < 0.95 * simulate(alone.schedule, links).makespan


def test_an_automatic_layout_puts_depths_where_they_fit_the_memory_limit():
    """Fastest is the depth on rank 0, which holds the most microbatches."""
    flags = "--pipeline-model-parallel-size 2 --pipeline-model-parallel-layout auto --mtp-num-layers 1 --seq-length 512"
    flags = f"{flags} --max-position-embeddings 512 --hidden-size 64 --pipeline-schedule 1f1b"
    free = planned(flags)
    limit = 0.7 * max(free.peak_bytes)
    kept = planned(f"{flags} --memory-limit-gib {limit / GIB}")
    assert (free.schedule.placement.rank_of, kept.schedule.placement.rank_of) == ((0, 1, 0), (0, 1, 1))
    assert max(kept.peak_bytes) <= limit


def test_a_shared_head_is_taken_from_the_depths_and_dealt_to_all_ranks():
    apart, shared = planned(""), planned("--vocab-parallel-pipeline")
    whole = [sum(getattr(work, name) for work in plan.works) for plan in (apart, shared) for name in ("f", "b", "w")]
    assert whole[:3] == pytest.approx(whole[3:])
    head, p = apart.pieces.head, 4
    assert (shared.costs.s, shared.costs.t) == pytest.approx((3 * (head.f + head.b) / p, 3 * head.w / p))
    hidden = 4 * 64 * 256  # a share sees all hidden states, of each head, and keeps a p-th of the logits
    assert shared.costs.mem_s == pytest.approx(3 * (hidden + (head.held - 2 * hidden) / p))
    assert [depth.f for depth in shared.works[4:]] == pytest.approx([apart.works[4].f - head.f] * 2)


@pytest.mark.parametrize(
    "embeds, ends, untied, tied", [(False, False, 2, 1), (True, False, 1, 0), (False, True, 1, 0), (True, True, 0, 0)]
)
def test_a_depth_borrows_the_weights_that_no_other_stage_of_its_rank_has(embeds, ends, untied, tied):
    """Embedding and head, one weight where they are tied; a gradient of each, which the owner adds to its own."""
    here, depth = LayerSpan(0, 2, embeds, ends), LayerSpan(4, 1, False, False, depth=1)
    assert added_by_depths([here], tied=False) == (0, 0)
    assert added_by_depths([here, depth], tied=False) == (2, untied)
    assert added_by_depths([here, depth], tied=True) == (2, tied)


@pytest.mark.parametrize("schedule", ["zb-h1", "zb-auto"])
def test_saved_costs_of_a_plan_with_depths_are_those_of_a_run(tmp_path, schedule):
    counted = planned(f"--pipeline-schedule {schedule}")
    slow = replace(counted.costs, f=(*counted.costs.f[:-1], 9 * counted.costs.f[-1]))
    (tmp_path / "costs.json").write_text(dump_costs(slow))
    timed = planned(f"--pipeline-schedule {schedule} --pipeline-costs {tmp_path / 'costs.json'}")
    assert timed.costs == slow
    assert timed.timeline.makespan > counted.timeline.makespan


@pytest.mark.parametrize("full", ["", "--recompute-granularity full --recompute-method uniform --seq-length 64"])
def test_a_depth_without_a_head_needs_nothing_of_a_head_while_it_runs(full):
    """With a vocabulary over ranks it had the head's gradient of logits too."""
    flags = f"--mtp-num-layers 1 --pipeline-schedule 1f1b {full}"
    alone = planned(f"{flags} --vocab-parallel-pipeline").costs.mem_p
    whole = planned(flags)
    *main, last, depth = whole.costs.mem_p
    assert alone == (main[0],) * 5
    # A head frees the logits that it holds before the layers below it run backward.
    assert last == depth == max(whole.pieces.head.passing, main[0] - whole.pieces.head.held)
