"""Seconds of a step that no barrier ends, against steps that follow each other by hand."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
from small_searches import MODEL

from megapipe.config import Config
from megapipe.flags.parse import parse
from megapipe.plan import Plan, make_plan
from megapipe.plan.seconds.device import Device
from megapipe.plan.seconds.page import LATE, digest, numbers, page
from megapipe.plan.seconds.step import in_seconds, timed

FREE = Device(flops=1e11, inside=1e30, outside=1e30, latency=0.0, overhead=0.0, memory=0.0, node=2)
LINE = "--num-layers 8 --pipeline-model-parallel-size 4 --global-batch-size 16 --padded-vocab-size 128"
FLAG = "--enable-optimizer-post-validation"


def planned(flags: str, ranks: int = 4) -> tuple[Config, Plan]:
    config = replace(parse(Config, f"{MODEL} {LINE} {flags}".split()), world_size=ranks)
    return config, make_plan(config)


def by_hand(plan: Plan, updates: Sequence[float] = (0.0,) * 4, steps: int = 6) -> float:
    """Return the seconds between the ends of two late steps, each rank's row following itself without a barrier.

    Args:
        updates: seconds that each rank adds at the end of its row.
    """
    costs = in_seconds(plan, parse(Config, MODEL.split()), FREE)
    place = plan.schedule.placement
    last = place.num_stages - 1
    length = {"F": costs.f, "B": costs.b, "W": costs.w, "BW": [b + w for b, w in zip(costs.b, costs.w, strict=True)]}
    done: dict[tuple[str, int, int, int], float] = {}
    free = [0.0] * place.num_ranks
    ends = []
    for step in range(steps):
        todo = [[x for entry in row for x in entry if x.kind in length] for row in plan.schedule.ranks]
        assert all(len(entry) == 1 for row in plan.schedule.ranks for entry in row)
        while any(todo):
            before = sum(map(len, todo))
            for rank, row in enumerate(todo):
                while row:
                    kind, stage, microbatch, _ = row[0]
                    needs = []
                    if kind == "F" and stage:
                        needs = [("F", step, stage - 1, microbatch)]
                    elif kind == "W":
                        needs = [("B", step, stage, microbatch)]
                    elif kind in ("B", "BW"):
                        needs = [("F", step, stage, microbatch)]
                        if stage < last:
                            needs.append(("B", step, stage + 1, microbatch))
                    if any(need not in done for need in needs):
                        break
                    free[rank] = max([free[rank], *(done[need] for need in needs)]) + length[kind][stage]
                    done["B" if kind == "BW" else kind, step, stage, microbatch] = free[rank]
                    row.pop(0)
            assert sum(map(len, todo)) < before
        ends.append(max(free))
        free = [x + added for x, added in zip(free, updates, strict=True)]
    return ends[-1] - ends[-2]


@pytest.mark.parametrize(
    ("schedule", "gains"), [("1f1b", False), ("zb-h1", False), ("zb-h2", True), ("zb-v", False), ("gpipe", False)]
)
def test_without_a_barrier_a_step_takes_the_time_to_the_end_of_the_next_one(schedule, gains):
    """A plan of zb-h2 took as long with the flag as without, though no rank waits for the end of the step."""
    config, plan = planned(f"--pipeline-schedule {schedule} {FLAG}")
    with_barrier = timed(*planned(f"--pipeline-schedule {schedule}")[::-1], FREE)
    late = timed(plan, config, FREE)
    assert late.step == pytest.approx(by_hand(plan))
    assert late.step <= with_barrier.step * (1 + 1e-9)
    assert (late.step < 0.95 * with_barrier.step) == gains
    assert sum(numbers(late, FREE)["shares"].values()) == pytest.approx(1, abs=2e-3)
    assert LATE in page(plan, config, FREE)
    waits = replace(config, parallel=with_barrier.config.parallel)
    assert LATE not in page(plan, waits, FREE)
    assert digest(plan, waits) != digest(plan, config)


def test_each_rank_updates_before_its_next_step():
    """All ranks of zb-h2 work as long, so each has its own update between two steps."""
    config, plan = planned(f"--pipeline-schedule zb-h2 {FLAG}")
    slow = replace(FREE, memory=1e9)
    late = timed(plan, config, slow)
    assert late.parts["update"] > 0.02 * late.step
    # The slowest rank decides, as all have equal work.
    assert late.step == pytest.approx(by_hand(plan, [late.parts["update"]] * 4), rel=0.02)


@pytest.mark.parametrize(("flag", "size"), [("", 8), ("--use-distributed-optimizer", 6)])
def test_each_rank_sums_its_gradients_before_its_next_step(flag, size):
    """Of two replicas each sends half: gradients of 4 bytes twice, or once and weights of 2 bytes."""
    config, plan = planned(f"--pipeline-schedule zb-h2 {flag} {FLAG}", 8)
    slow = replace(FREE, outside=1e8, inside=1e8)
    late = timed(plan, config, slow)
    sums = [size / 2 * work.parameters / 1e8 for work in plan.works]
    assert late.parts["gradient sums"] == pytest.approx(by_hand(plan, sums) - by_hand(plan))
    assert sum(numbers(late, slow)["shares"].values()) == pytest.approx(1, abs=2e-3)
    # Buckets that begin within the last pass take less, and gathers as long wherever they are.
    zero = "--pipeline-schedule zb-h2 --use-distributed-optimizer --overlap-grad-reduce --ddp-num-buckets 4 "
    hidden, gathered = (
        timed(*planned(f"{zero} {more} {FLAG}", 8)[::-1], slow).parts["gradient sums"]
        for more in ("", "--overlap-param-gather")
    )
    most = 3 * plan.works[0].parameters / 1e8
    assert 2 / 3 * most < hidden < 0.99 * most
    assert gathered == pytest.approx(hidden)


def test_two_copies_of_the_model_are_summed_before_the_next_step():
    """Mirrored ranks send each of their two stages to each other, in float32."""
    config, plan = planned(f"--pipeline-schedule dualpipe {FLAG}")
    late = timed(plan, config, replace(FREE, outside=1e8, inside=1e8))
    sums = [4 * (plan.works[stage].parameters + plan.works[3 - stage].parameters) / 1e8 for stage in range(4)]
    assert min(sums) <= late.parts["gradient sums"] <= max(sums)
