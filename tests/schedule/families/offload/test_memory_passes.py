"""Activations moved out of the way by passes: what is held, what waits, what is refused and in which words."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
from refusals import refusal

from megapipe.schedule import (
    Costs,
    Kind,
    Pass,
    Schedule,
    ScheduleError,
    build,
    from_csv,
    from_json,
    simulate,
    to_csv,
    to_json,
    verify,
)
from megapipe.schedule.families.offload.copies import with_offload, with_recompute
from megapipe.schedule.families.step.asked import StepPasses
from megapipe.schedule.kinds import Lane
from megapipe.schedule.lower import forward_only
from megapipe.schedule.passes import Shared, repeated
from megapipe.schedule.views.perfetto import to_perfetto
from megapipe.schedule.views.terminal import to_terminal
from tools.proofs.tables import memory
from tools.proofs.tables.proof import Proof

HALF = Costs(o=0.5, l=0.5)


def one_rank(*steps: str) -> Schedule:
    """One rank, one stage, two microbatches: kinds and numbers, as `F0 O0 L0 BW0`."""
    row = tuple((Pass(Kind[text[:-1]], 0, int(text[-1])),) for text in steps)
    return replace(build("1f1b", 1, 2), name="mine", ranks=(row,))


def test_a_copy_frees_when_it_ends_and_takes_when_it_starts_to_come_back() -> None:
    # compute: F0 0-1, F1 1-2, BW1 2-4, BW0 4-6; d2h: O0 1-2.5; h2d: L0 stands behind BW1, 4-4.5
    table = one_rank("F0", "O0", "F1", "BW1", "L0", "BW0")
    verify(table)
    time = simulate(table, Costs(o=1.5, l=0.5))
    assert time.curves[0] == ((0, 1), (1, 2), (2.5, 1), (4, 0), (4, 1), (6.5, 0))
    assert (time.start[Pass(Kind.BW, 0, 0)], time.makespan) == (4.5, 6.5)


def test_what_is_computed_again_leaves_its_input_alone() -> None:
    table = one_rank("F0", "F1", "R1", "BW1", "R0", "BW0")
    verify(table)
    time = simulate(table, Costs(mem_r=0.25))
    assert [held for _, held in time.curves[0]] == [0.25, 0.5, 1.25, 0.25, 1, 0]
    assert time.makespan == 8


def test_1f1b_price_copies_that_fit_takes_no_longer_and_holds_two() -> None:
    plain = build("1f1b", 8, 16)
    table = with_offload(plain, HALF)
    verify(table, costs=HALF)
    assert simulate(table, HALF).makespan == simulate(plain, HALF).makespan
    assert simulate(plain).peak == (8, 7, 6, 5, 4, 3, 2, 1)
    assert simulate(table, HALF).peak == (2, 2, 2, 2, 2, 2, 2, 1)


def test_two_ranks_behind_one_switch_copy_one_after_the_other() -> None:
    table = with_offload(build("1f1b", 4, 8), HALF, switches=[(0, 1), (2, 3)])
    verify(table, costs=HALF)
    time = simulate(table, HALF)
    for lane in table.shared:
        spans = [(time.start[x], time.end[x]) for x in lane.order]
        assert all(end <= start for (_, end), (start, _) in pairwise(spans))
    assert {(lane.lane, lane.ranks) for lane in table.shared} == {
        (lane, ranks) for lane in (Lane.D2H, Lane.H2D) for ranks in ((0, 1), (2, 3))
    }


def test_a_share_takes_those_that_are_held_longest_and_no_copy_that_would_be_late() -> None:
    table = with_offload(build("gpipe", 1, 4), HALF, share=0.5)
    assert {x.microbatch for step in table.ranks[0] for x in step if x.kind is Kind.O} == {2, 3}
    slow = with_offload(build("1f1b", 2, 4), Costs(o=9, l=9))
    assert not slow.kinds & {Kind.O, Kind.L}


@pytest.mark.parametrize(
    "steps, told",
    [
        ("F0 L0 O0 BW0 F1 BW1", "rank 0, step 1, 0L0: stands before 0O0 at step 2, whose copy it brings back"),
        (
            "F0 O0 BW0 L0 F1 BW1",
            "rank 0, step 3, 0L0: comes too late: 0BW0 at step 2 uses what 0O0 at step 1 has",
        ),
        ("F0 BW0 O0 L0 F1 BW1", "rank 0, step 2, 0O0: frees what 0BW0 at step 1 has used already"),
        ("O0 F0 L0 BW0 F1 BW1", "rank 0, step 0, 0O0: stands before 0F0 at step 1, which makes what it copies"),
        ("F0 O0 BW0 F1 BW1", "rank 0, step 1, 0O0: nothing brings it back; 0L0 is missing"),
        ("F0 L0 BW0 F1 BW1", "rank 0, step 1, 0L0: brings back what nothing has copied; 0O0 is missing"),
        ("R0 F0 BW0 F1 BW1", "rank 0, step 0, 0R0: stands before 0F0 at step 1, which makes what it repeats"),
        ("F0 BW0 R0 F1 BW1", "rank 0, step 2, 0R0: comes too late: 0BW0 at step 1 uses what 0F0 has not kept"),
        ("F0 O0 L0 R0 BW0 F1 BW1", "rank 0, step 3, 0R0: computes again what 0O0 at step 1 copies; one of the two is"),
    ],
)
def test_a_misorder_is_refused_by_the_line(steps: str, told: str) -> None:
    assert f"\n  {told}" in refusal(one_rank(*steps.split()))


def test_two_ranks_that_disagree_on_a_shared_lane_are_refused() -> None:
    table = with_offload(build("1f1b", 2, 4), HALF, switches=[(0, 1)])
    lane = next(x for x in table.shared if x.lane is Lane.D2H)
    turned = replace(table, shared=(lane._replace(order=lane.order[::-1]),))
    where = "on the d2h stream that ranks 0, 1 share"
    assert f"\n  rank 0, step 1, 0O0: stands before 0O1 at step 3, and after it {where}" in refusal(turned)
    short = replace(table, shared=(lane._replace(order=lane.order[1:]),))
    said = "the d2h stream that ranks 0, 1 share: its order must name each of their passes once; look at 0O0"
    assert said in refusal(short)


def test_a_rank_in_two_lanes_of_a_kind_is_refused() -> None:
    """The order of the first was lost: a table that blocks was accepted."""
    table = with_offload(build("1f1b", 3, 4), HALF)
    back = {
        rank: [x for step in table.ranks[rank] for x in step if x.kind.traits.lane is Lane.H2D] for rank in range(3)
    }
    lanes = tuple(Shared(Lane.H2D, pair, (*back[pair[0]], *back[pair[1]])) for pair in ((0, 1), (1, 2)))
    assert "rank 1 is in two shared streams h2d" in refusal(replace(table, shared=lanes))
    out = with_offload(build("1f1b", 4, 4), HALF, switches=[(0, 1), (2, 3)])
    verify(out)  # a rank has a lane of each kind, and neighbours another
    assert len(out.shared) == 4


def test_drawn_tables_hold_what_is_counted_by_hand_and_their_misorders_are_refused() -> None:
    proof = Proof("memory", memory.draw, memory.check, memory.wrong)
    assert proof.fuzzer.fuzz(7, most=30), proof.fuzzer.found
    assert proof.refused.total() >= 6


def test_files_and_pictures_know_the_letters() -> None:
    table = with_offload(build("zb-h1", 2, 4), HALF, switches=[(0, 1)])
    assert from_json(to_json(table)) == table
    with pytest.raises(ScheduleError, match=r"says in which order ranks share a stream, which CSV cannot\. Write JSON"):
        to_csv(table)
    again = with_recompute(with_offload(build("1f1b", 2, 4), HALF), HALF, chosen=[(1, 0)])
    assert from_csv(to_csv(again), "1f1b").ranks == again.ranks
    picture = to_terminal(again, HALF, width=120)
    assert [line.split("|")[0].strip() for line in picture.splitlines()[:3]] == ["rank 0", "d2h", "h2d"]
    assert "O offload; L load again; R forward again; " in picture.splitlines()[-1]
    assert '"rank 1 h2d"' in to_perfetto(table, HALF)


def test_a_shared_lane_in_a_file_is_checked_like_the_rest() -> None:
    text = to_json(with_offload(build("1f1b", 2, 4), HALF, switches=[(0, 1)]))
    with pytest.raises(ScheduleError, match=r"shared must be a list of objects with lane .d2h or h2d., ranks"):
        from_json(text.replace('"lane": "d2h"', '"lane": "compute"'))
    with pytest.raises(ScheduleError, match="the d2h stream that ranks 0, 1 share: not a pass"):
        from_json(text.replace('"order": ["0O0"', '"order": ["0-0"'))


def test_other_transforms_carry_them_along() -> None:
    table = with_offload(build("1f1b", 2, 4), HALF, switches=[(0, 1)])
    step = replace(HALF, g=1, u=1, a=1)
    twice = repeated(StepPasses.whole(step, barrier=False).around(table, step), 2)
    verify(twice, costs=HALF)
    assert len(twice.shared[0].order) == 2 * len(table.shared[0].order)
    assert forward_only(table).kinds == {Kind.F}
    verify(table, costs=HALF)
    with pytest.raises(ScheduleError, match=r"1f1b has L and O already\. Put them into the table without"):
        with_offload(table, HALF)
    with pytest.raises(ScheduleError, match="1f1b has no microbatch 4 on stage 0"):
        with_recompute(table, HALF, chosen=[(0, 4)])
