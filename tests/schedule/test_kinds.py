"""Kinds are data: lanes run side by side, passes of a stage as a whole wait for what their rows name."""

import pytest

from megapipe.schedule import Costs, Kind, Pass, Placement, Schedule, ScheduleError, build, simulate, verify
from megapipe.schedule.kinds import Lane, Where


def table(*steps: str, ranks: int = 1) -> Schedule:
    """One rank, one microbatch, one stage: kinds and numbers, as `F0 BW0 G0`."""
    row = tuple((Pass(Kind[text[:-1]], 0, int(text[-1])),) for text in steps)
    return Schedule("mine", Placement((0,), 1), 1, (row,))


def test_a_lane_runs_beside_the_other_and_what_needs_it_waits() -> None:
    # compute: U 7-8; dp: G 3-7, behind the gather of the weights for the next step, 8-10
    time = simulate(table("F0", "BW0", "G0", "U0", "A1"), Costs(1, 1, 1, g=4, u=1, a=2))
    assert time.start[Pass(Kind.G, 0, 0)] == 3
    assert time.start[Pass(Kind.U, 0, 0)] == 7
    assert (time.start[Pass(Kind.A, 0, 1)], time.makespan) == (8, 10)
    assert (time.busy, time.bubble) == ((4,), 6)


def test_the_first_forward_waits_for_the_weights_gathered_in_its_step() -> None:
    time = simulate(table("A0", "F0", "BW0"), Costs(1, 1, 1, a=5))
    assert time.start[Pass(Kind.F, 0, 0)] == 5


def test_an_update_with_a_barrier_waits_for_the_gradients_of_all_ranks() -> None:
    plain = build("1f1b", 2, 2)
    rows = [[*row, (Pass(Kind.G, r, 0),), (Pass(Kind.U, r, 0),)] for r, row in enumerate(plain.ranks)]
    schedule = Schedule("mine", plain.placement, 2, tuple(map(tuple, rows)))
    verify(schedule)
    time = simulate(schedule, Costs(g=1, u=1))
    assert time.start[Pass(Kind.U, 0, 0)] == time.start[Pass(Kind.U, 1, 0)] == time.end[Pass(Kind.G, 0, 0)]


def test_what_stands_before_its_needs_is_named() -> None:
    with pytest.raises(ScheduleError, match="rank 0 waits at step 1, 0G0, for 0BW0"):
        verify(table("F0", "G0", "BW0"))
    with pytest.raises(ScheduleError, match="rank 0 waits at step 1, 0U0, for 0G0"):
        simulate(table("F0", "U0", "BW0", "G0"))
    with pytest.raises(ScheduleError, match="there is no step 1, only 0 to 0"):
        verify(table("F0", "BW0", "G1"))
    with pytest.raises(ScheduleError, match="runs twice"):
        verify(table("F0", "BW0", "G0", "G0"))


def test_what_is_done_to_one_stage_is_done_to_all() -> None:
    plain = build("1f1b", 2, 2)
    rows = (plain.ranks[0], (*plain.ranks[1], (Pass(Kind.G, 1, 0),)))
    with pytest.raises(ScheduleError, match="rank 0: 0G0 is missing"):
        verify(Schedule("mine", plain.placement, 2, rows))


def test_every_row_is_whole() -> None:
    """A kind of a stage as a whole needs nothing within one microbatch, and someone makes whatever is needed."""
    made = {made for kind in Kind for made in kind.traits.makes}
    for kind in Kind:
        assert {need.made for need in kind.traits.needs} <= made
        assert kind.traits.lane in Lane
        assert not (kind.traits.per_stage and {need.where for need in kind.traits.needs} & {Where.PREV, Where.NEXT})
