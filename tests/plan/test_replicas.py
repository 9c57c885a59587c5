"""Data-parallel communication that a step shows, against hand-made sums and the simulated table."""

from dataclasses import replace

import pytest

from megapipe.config import Config
from megapipe.flags.parse import parse
from megapipe.plan import Plan, make_plan, step_of
from megapipe.plan.seconds.device import Device
from megapipe.plan.seconds.replicas import exposed
from megapipe.plan.seconds.step import SUMS, in_seconds, timed
from megapipe.schedule.families.step import reduction
from megapipe.schedule.recipe import Recipe
from megapipe.schedule.simulate import run_clock

H, LAYERS, ROWS, TOKENS = 64, 4, 1064, 128
MODEL = (
    "--num-layers 4 --hidden-size 64 --num-attention-heads 4 --seq-length 64 --max-position-embeddings 64 "
    "--micro-batch-size 2 --train-iters 9 --lr 1e-3 --mock-data --vocab-size 999 --global-batch-size 64 "
    "--tokenizer-type NullTokenizer --make-vocab-size-divisible-by 1 --bf16 --use-distributed-optimizer "
)
REDUCE = "--overlap-grad-reduce"
BOTH = f"{REDUCE} --overlap-param-gather"
BYTES = 1e10
"""Bytes per second."""


def planned(flags: str, world_size: int) -> tuple[Plan, Config]:
    config = parse(Config, [*MODEL.split(), *flags.split()])
    model = replace(config.model, padded_vocab_size=1000)
    config = replace(config, model=model, world_size=world_size)
    return make_plan(config), config


def shown(flags: str, world_size: int, flops: float = 1e13) -> float:
    device = Device(flops=flops, inside=BYTES, latency=0.0, overhead=0.0)
    return timed(*planned(flags, world_size), device).parts[SUMS]


@pytest.mark.parametrize("flops", [1e11, 1e13, 1e16])
@pytest.mark.parametrize("buckets", [1, 2, 4])
def test_on_one_stage_the_last_backward_hides_all_buckets_but_the_last(buckets, flops):
    of_layers = LAYERS * (12 * H * H + 13 * H)
    parameters = of_layers + ROWS * H + 2 * H
    reduce, gather = (size * parameters * 3 / 4 / BYTES for size in (4, 2))
    assert shown("", 4) == pytest.approx(reduce + gather)
    # Twice the forward's products, of which attention is half of two products of each row.
    products = LAYERS * (2 * 12 * H * H + 2 * 64 * H) + 2 * H * 1000
    backward = 2 * TOKENS * products / flops
    last = reduce * (1 - of_layers / parameters * (1 - 1 / buckets))
    hand = max(last, reduce - (1 - 1 / buckets) * backward)
    found = shown(f"{REDUCE} --ddp-num-buckets {buckets}", 4, flops)
    assert found == pytest.approx(hand + gather)
    # No forward can run before the stage's only gather.
    assert shown(f"{BOTH} --ddp-num-buckets {buckets}", 4, flops) == pytest.approx(found)


def test_a_bucket_of_a_size_has_whole_layers():
    layer = 12 * H * H + 13 * H
    for size, number in ((layer, 4), (layer + 1, 2), (2 * layer + 1, 2), (4 * layer, 1)):
        found = shown(f"{REDUCE} --ddp-bucket-size {size}", 4)
        assert found == pytest.approx(shown(f"{REDUCE} --ddp-num-buckets {number}", 4)) or size == 2 * layer + 1


@pytest.mark.parametrize("flops", [1e12, 1e13, 1e14])
@pytest.mark.parametrize("flags", [REDUCE, BOTH])
@pytest.mark.parametrize(
    "schedule",
    ["1f1b", "gpipe", "zb-h1", "zb-v", "interleaved --num-virtual-stages-per-pipeline-rank 2", "dualpipe"],
)
def test_it_is_what_a_table_with_these_passes_takes_longer(schedule, flags, flops):
    plan, config = planned(f"--pipeline-model-parallel-size 2 --pipeline-schedule {schedule} {flags}", 8)
    device = Device(flops=flops, inside=BYTES, latency=0.0, overhead=0.0)
    costs = in_seconds(plan, config, device)
    each = [work.parameters * 3 / 4 / BYTES for work in plan.works]
    chain = plan.schedule.placement.chain
    costs = replace(costs, g=tuple(4 * x for x in each[:chain]), a=tuple(2 * x for x in each[:chain]))
    whole = Recipe("whole", step=step_of(config, plan.schedule)).around(plan.schedule, costs)
    copies = 0.0
    if plan.schedule.placement.num_chains > 1:
        copies = 4 * sum(plan.works[stage].parameters for stage in (0, 3)) / BYTES
    by_hand = reduction.exposed(whole, costs) + copies
    if flags == REDUCE:
        by_hand += max(sum(2 * each[s] for s in plan.schedule.placement.stages_on(r)) for r in (0, 1))
    found = exposed(plan, config, device, plan.schedule, run_clock(plan.schedule, costs))
    assert found == pytest.approx(by_hand)
