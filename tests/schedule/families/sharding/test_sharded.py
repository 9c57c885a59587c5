"""Tables whose weights are gathered for runs: how often, what it costs, and what fits how much memory."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest

from megapipe.commands.schedules import main
from megapipe.schedule import Costs, Kind, Pass, Schedule, ScheduleError, build, load, simulate, verify
from megapipe.schedule.families.offload.solve import solve
from megapipe.schedule.families.sharding.sharded import (
    UnshardedStages,
    sharded_within,
    whole_at_most,
    with_sharded_weights,
)
from tools.proofs.tables import weights
from tools.proofs.tables.proof import Proof

LINK = Costs(mem_b=0, mem_w=0, a=0.5, g=1, mem_a=1, mem_g=2)
"""A gather takes as long as half a forward, a reduction as a whole one."""


def count(table: Schedule, *kinds: Kind) -> int:
    return sum(x.kind in kinds for row in table.ranks for step in row for x in step)


@pytest.mark.parametrize("v, places", [(4, 1), (4, 2), (4, 3), (6, 2)])
def test_breadth_first_gathers_each_stage_twice_but_those_that_stay(v: int, places: int) -> None:
    table = with_sharded_weights(build("breadth-first", 1, 8, chunks=v), LINK, UnshardedStages(places, 1))
    verify(table)
    assert count(table, Kind.AF, Kind.AB) == 2 * v - places
    assert count(table, Kind.RS) == v


def test_depth_first_gathers_and_sums_for_every_microbatch() -> None:
    table = with_sharded_weights(build("1f1b-v", 1, 8), LINK, UnshardedStages(1, 1))
    assert count(table, Kind.AF, Kind.AB) == 2 * 8 + 1  # 0F 1F 1BW 0BW 0F 1F ...: the turns share a gather
    assert count(table, Kind.RS) == 2 * 8


def test_a_second_place_hides_all_gathers_behind_passes_but_the_first() -> None:
    plain = build("breadth-first", 1, 8, chunks=4)
    time = simulate(with_sharded_weights(plain, LINK, UnshardedStages(2, 1)), LINK)
    # What shows is the gather before the first pass and the reduction behind the last, of a stage of a quarter.
    assert time.makespan == simulate(plain).makespan + (0.5 + 1) / 4
    # Weights of two stages, gradients of two, those on the link and those of the next; shares are not counted.
    assert time.peak == (2 / 4 * 1 + 2 / 4 * 2,)


def test_least_memory_that_is_as_fast_to_a_hundredth_and_the_fastest_that_fits() -> None:
    plain, costs = build("breadth-first", 1, 8, chunks=4), replace(LINK, mem_g=0.5)
    free, tight = simulate(sharded_within(plain, costs), costs), simulate(sharded_within(plain, costs, 0.5), costs)
    assert (free.makespan, free.peak) == (24.375, (0.75,))
    assert (tight.makespan, tight.peak) == (25.125, (0.5,))  # six gathers of 0.125 that nothing hides
    with pytest.raises(ScheduleError, match=r"rank 0 needs 0.5 for activations, .* the limit is 0.4\."):
        sharded_within(plain, costs, 0.4)


def test_activations_are_moved_where_weights_need_their_room() -> None:
    plain, costs = build("breadth-first", 1, 8, chunks=4), Costs(a=0.5, g=1, mem_a=1, mem_g=2, mem_r=0.1)
    with pytest.raises(ScheduleError, match=r"rank 0 needs 8\.[0-9]* for activations"):
        sharded_within(plain, costs, 5)
    asked: list[float] = []

    def moved(room: float) -> Schedule:
        asked.append(room)
        return solve([plain], costs, room, tries=10).schedule

    table = sharded_within(plain, costs, 5, moved=moved)
    verify(table, memory=5, costs=costs)
    assert max(asked) == 5 - whole_at_most(plain, costs, UnshardedStages(1, 1))[0] == 5 - (1 / 4 * 1 + 2 / 4 * 2)
    assert table.kinds & {Kind.O, Kind.R}


def test_no_more_activations_are_moved_than_the_memory_asks_for() -> None:
    """A room for many gathered weights, which were dropped soon, cost copies of 145 GiB where 112 do."""
    plain = build("breadth-first", 1, 1, chunks=8)
    costs = Costs(a=0.01, g=0.01, mem_a=2, mem_g=2, mem_b=16, mem_w=0, o=0.2, l=0.2, mem_o=16, mem_r=0.1)
    table = sharded_within(plain, costs, 8, moved=lambda room: solve([plain], costs, room, tries=10).schedule)
    # A stage's activation has 2, its weight and its gradient 0.25 each; two gradients live at once.
    stay = (8 - 3 * 0.25) // 2
    assert sum(x.kind in (Kind.O, Kind.R) for x in table.passes()) == 8 - stay


def test_a_gradient_waits_for_all_reductions_but_the_last() -> None:
    slow = replace(LINK, g=20)  # each of the four takes five passes' time, so only their memory holds the passes back
    table = with_sharded_weights(build("breadth-first", 1, 4, chunks=4), slow, UnshardedStages(2, 1))
    time = simulate(table, slow)
    assert time.start[Pass(Kind.BW, 1, 0)] == time.end[Pass(Kind.RS, 3, 3)]
    assert time.peak == (whole_at_most(table, slow, UnshardedStages(2, 1))[0],)


def test_what_a_table_has_already_is_not_sharded() -> None:
    table = with_sharded_weights(build("zb-v", 2, 4), LINK)
    with pytest.raises(ScheduleError, match="zb-v has AF and RS already"):
        with_sharded_weights(table)


def test_each_copy_of_a_model_is_gathered_on_its_own_rank() -> None:
    """DualPipe on two ranks: the first has stage 0, and stage 3, the last of the other chain."""
    table = with_sharded_weights(build("dualpipe", 2, 4), LINK)
    verify(table)
    gathered = [{x.stage for step in row for x in step if x.kind is Kind.AF} for row in table.ranks]
    assert gathered == [{0, 3}, {1, 2}]


def test_show_draws_gathers_on_their_lane_and_says_what_they_take(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    path = tmp_path / "whole.json"
    flags = "show breadth-first --pp 1 --microbatches 4 --chunks 2 --shard 0.5,1,1,2 --memory 7 --costs 1,1,1"
    assert main(flags.split()) == 0
    said = capsys.readouterr().out
    assert re.search(r"dp \|A\.+a\.+rs\.+RS\|", said)
    assert "the step takes 12.75, where each rank keeps them 12" in said
    assert re.search(r"rank +gathers +sums +whole at most +peak +they take\n +0 +2 +2 +2\.5 +6 +1\.5", said)
    assert main([*flags.split(), "--json", str(path)]) == 0
    assert load(path).kinds == {Kind.AF, Kind.F, Kind.BW, Kind.RS}


def test_drawn_tables_hold_what_is_counted_by_hand_and_their_misorders_are_refused() -> None:
    proof = Proof("weights", weights.draw, weights.check, weights.wrong)
    assert proof.fuzzer.fuzz(3, most=28), proof.fuzzer.found
    assert proof.refused.total() >= 12
