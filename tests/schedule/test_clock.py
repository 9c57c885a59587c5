"""Times, memory and messages of small tables, worked out by hand."""

import gc
import re

import pytest

from megapipe.schedule import (
    Costs,
    Kind,
    Pass,
    Placement,
    Schedule,
    ScheduleError,
    build,
    share_of_window,
    simulate,
    vee,
)
from megapipe.schedule.families.step.optimizer import with_optimizer
from megapipe.schedule.families.step.reduction import with_reduction
from megapipe.schedule.passes import repeated
from megapipe.schedule.placement import placement_problems


def f(stage: int, microbatch: int) -> Pass:
    return Pass(Kind.F, stage, microbatch)


def bw(stage: int, microbatch: int) -> Pass:
    return Pass(Kind.BW, stage, microbatch)


def test_two_ranks_one_microbatch_with_latency() -> None:
    # rank 0: F0 0-2 ....................... BW 9.5-14.5
    # rank 1:        F0 2.5-4.5, BW 4.5-9
    time = simulate(build("1f1b", 2, 1), Costs((2, 2), (3, 2.5), (2, 2), comm=0.5))
    assert time.start == {f(0, 0): 0, f(1, 0): 2.5, bw(1, 0): 4.5, bw(0, 0): 9.5}
    assert time.end == {f(0, 0): 2, f(1, 0): 4.5, bw(1, 0): 9, bw(0, 0): 14.5}
    assert (time.makespan, time.busy, time.span, time.bubble) == (14.5, (7, 6.5), (14.5, 6.5), 7.5)
    assert (time.idle, time.period, time.sent) == ((7.5, 8), 14.5, (1, 1))


def test_a_message_within_a_rank_costs_nothing() -> None:
    slow = simulate(build("zb-v", 1, 3), Costs(comm=100))
    assert slow.makespan == 9
    assert slow.sent == (0,)


def test_memory_is_held_from_f_to_b_and_in_part_to_w() -> None:
    table = Schedule("mine", Placement((0,), 1), 1, ((((f(0, 0)),), (Pass(Kind.B, 0, 0),), (Pass(Kind.W, 0, 0),)),))
    time = simulate(table, Costs(2, 3, 1, mem_b=10, mem_w=4))
    assert time.curves == (((0, 10), (5, 4), (6, 0)),)
    assert time.peak == (10,)


def test_zb_h1_holds_1f1bs_activations_and_what_w_needs() -> None:
    """Qi et al. 2023, sec. 2.3: the last rank holds one M_B and p - 1 times M_W besides."""
    time = simulate(build("zb-h1", 4, 8), Costs(mem_b=1.0, mem_w=0.25))
    assert time.peak == (4.0, 3.25, 2.5, 1.75)


def test_a_number_is_per_device_share_and_a_tuple_per_stage() -> None:
    by_share = simulate(build("zb-v", 2, 4), Costs(10, 14, 7, mem_b=2, mem_w=1))
    by_stage = simulate(build("zb-v", 2, 4), Costs((5,) * 4, (7,) * 4, (3.5,) * 4, mem_b=(1,) * 4, mem_w=(0.5,) * 4))
    assert by_share == by_stage


def test_both_copies_of_dualpipe_cost_the_same() -> None:
    uneven = simulate(build("dualpipe", 2, 4), Costs((1, 3), (1, 3), (1, 3)))
    assert uneven.busy == (2 * 3 + 2 * 9,) * 2


def test_an_overlapped_pair_starts_when_both_inputs_are_there_and_ends_as_one() -> None:
    pair = (f(0, 1), bw(1, 0))
    table = Schedule(
        "mine", vee(1), 2, (((f(0, 0),), (f(1, 0),), pair, (bw(0, 0),), (f(1, 1),), (bw(1, 1),), (bw(0, 1),)),)
    )
    time = simulate(table, Costs(2, 2, 2, fb=5))
    assert (time.start[f(0, 1)], time.end[f(0, 1)]) == (time.start[bw(1, 0)], time.end[bw(1, 0)]) == (2, 4.5)
    split = tuple(tuple(Pass(Kind.B, x.stage, x.microbatch) if x == bw(1, 0) else x for x in s) for s in table.ranks[0])
    table = Schedule("mine", vee(1), 2, ((*split, (Pass(Kind.W, 1, 0),)),))
    assert simulate(table, Costs(2, 2, 2, fb=5)).end[f(0, 1)] == 3.5


def test_a_pair_is_never_shorter_than_one_of_its_passes() -> None:
    """It took fb - w, which may be negative."""
    pair = (f(0, 1), Pass(Kind.B, 1, 0))
    assert Costs(1, 2, 10, fb=5).of_step(pair, vee(1)) == Costs(1, 2, 10).of_step(pair[1:], vee(1)) == 1.0


def test_costs_for_another_number_of_stages_are_refused() -> None:
    with pytest.raises(ScheduleError, match=r"Costs\.f names 3 stages, but the model is cut in 4\."):
        simulate(build("1f1b", 4, 4), Costs(f=(1, 1, 1)))


@pytest.mark.parametrize("bad", [-1.0, float("nan"), float("inf"), 1e308])
def test_costs_are_numbers_from_0(bad: float) -> None:
    with pytest.raises(ScheduleError, match=rf"Costs\.w must be a number from 0 to 1e\+100, got {re.escape(str(bad))}"):
        Costs(w=(1.0, bad))


def test_every_pass_pays_the_overhead_once_however_small_its_stage() -> None:
    costs = Costs(10, 11, 8, overhead=0.5)
    assert simulate(build("gpipe", 1, 4), costs).makespan == 4 * (29 + 2 * 0.5)
    assert simulate(build("zb-h1", 1, 4), costs).makespan == 4 * (29 + 3 * 0.5)
    assert simulate(build("interleaved-zb", 1, 4, chunks=4), costs).makespan == 4 * (29 + 12 * 0.5)


def test_a_message_between_ranks_that_are_no_neighbours_takes_the_slowest_link_but_has_the_rings_own() -> None:
    costs = Costs(comm=(1, 5, 2, 3))
    assert [costs.lag(*ends, 4) for ends in ((0, 1), (2, 1), (0, 3), (3, 0), (0, 2), (3, 1))] == [1, 5, 3, 3, 5, 5]


def test_a_message_takes_the_time_of_its_link() -> None:
    """Down over links 0 and 1, back over both again: 3 F, 3 BW, and in a loop of two chunks once over link 2."""
    costs = Costs(1, 1, 1, comm=(0.25, 4, 100))
    assert simulate(build("1f1b", 3, 1), costs).makespan == 9 + 2 * (0.25 + 4)
    assert simulate(build("interleaved", 3, 1), costs).makespan == 9 + 2 * (2 * (0.25 + 4) + 100)


def test_a_timeline_prints_what_people_ask_and_not_every_pass() -> None:
    # 1F1B: bubble (p-1)(F+B+W), makespan m(F+B+W) more, peak p - rank.
    said = repr(simulate(build("1f1b", 4, 8)))
    assert said == "Timeline(makespan 33, bubble 9, peak by rank 4 3 2 1)"


def test_a_schedule_prints_its_size_and_not_every_pass() -> None:
    # F and BW of each of 8 microbatches on each of 4 ranks.
    assert repr(build("1f1b", 4, 8)) == "Schedule('1f1b', 4 ranks, 8 microbatches, 64 passes)"


def test_a_name_or_plain_numbers_are_refused_where_a_table_and_costs_are_needed() -> None:
    """It was `'tuple' object has no attribute 'lag'`."""
    with pytest.raises(TypeError, match=r"takes Costs, such as Costs\(f=10, b=11, w=8\), not \(10, 11, 8\)"):
        simulate(build("1f1b", 2, 2), (10, 11, 8))  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"takes a Schedule, such as build\(\"zb-v\", 4, 8\), not 'zb-v'"):
        simulate("zb-v")  # type: ignore[arg-type]


def test_single_passes_may_take_what_they_took() -> None:
    """The second forward of two ranks takes 4 more on the first rank, and all that waits for it comes as much later."""
    schedule = build("gpipe", 2, 2)
    plain, slow = simulate(schedule), simulate(schedule, took={f(0, 1): 5.0})
    assert slow.makespan == plain.makespan + 4
    assert slow.start[f(1, 1)] == plain.start[f(1, 1)] + 4


def test_a_rank_without_passes_waits_for_the_others() -> None:
    table = Schedule("mine", Placement((0, 1), 1), 1, (((f(0, 0),), (bw(0, 0),)), ()))
    time = simulate(table, Costs(1, 1, 1))
    # Two device shares.
    assert (time.span, time.busy, time.idle, time.peak, time.makespan) == (
        (6, 0),
        (6, 0),
        (0, 6),
        (2, 0),
        6,
    )


def test_weights_that_are_gathered_reduced_or_updated_are_waited_for() -> None:
    """One stage, two steps: A 5, F 1, V 2, BW 2, G 10, U 3, each of which needs the one before."""
    table = with_optimizer(with_reduction(build("gpipe", 1, 1)), barrier=False, gather="ahead")
    time = simulate(repeated(table, 2), Costs(g=10, u=3, a=5, v=2))
    starts = [0, 5, 6, 8, 10, 20, 23, 28, 29, 31, 33, 43]
    order = "0A0 0F0 0V0 0BW0 0G0 0U0 0A1 0F1 0V1 0BW1 0G1 0U1"
    assert {str(x): start for x, start in time.start.items()} == dict(zip(order.split(), starts, strict=True))
    assert (time.makespan, time.busy) == (46, (2 * (1 + 2 + 2 + 3),))  # A and G run beside
    assert time.curves == (((5, 1), (10, 0), (28, 1), (33, 0)),)


def test_a_rank_updates_when_all_its_stages_are_reduced() -> None:
    """Without a barrier too: its part of the norm is of all of them."""
    time = simulate(with_optimizer(with_reduction(build("zb-v", 1, 2)), barrier=False), Costs(g=9))
    reduced = [end for x, end in time.end.items() if x.kind is Kind.G]
    updated = [start for x, start in time.start.items() if x.kind is Kind.U]
    assert min(updated) == max(reduced) > min(reduced)


def test_replicas_wait_for_each_other() -> None:
    """DualPipe's stages s and s + chain: reduced when both have all gradients, gathered when both are updated."""
    table = with_optimizer(with_reduction(build("dualpipe", 2, 4)), gather="after")
    time = simulate(table, Costs(1, 1, 1, g=3, u=2, a=1))
    for s in range(4):
        both = [x for x in time.end if x.stage % 2 == s % 2]
        weights = max(time.end[x] for x in both if x.kind in (Kind.W, Kind.BW))
        assert time.start[Pass(Kind.G, s, 0)] >= weights
        updates = max(time.end[x] for x in both if x.kind is Kind.U)
        assert time.start[Pass(Kind.A, s, 1)] >= updates
    assert simulate(build("dualpipe", 4, 8)).parameters == (2.0,) * 4
    assert simulate(build("interleaved", 4, 8)).parameters == (1.0,) * 4


@pytest.mark.parametrize("collects", [True, False])
def test_pythons_garbage_collection_is_off_meanwhile_and_afterwards_as_it_was(collects: bool) -> None:
    seen = []

    class Took(dict[Pass, float]):
        def __contains__(self, item: object) -> bool:
            seen.append(gc.isenabled())
            return False

    before = gc.isenabled()
    try:
        (gc.enable if collects else gc.disable)()
        simulate(build("1f1b", 2, 2), took=Took())
        assert gc.isenabled() == collects
        assert set(seen) == {False}
    finally:
        (gc.enable if before else gc.disable)()


@pytest.mark.parametrize("n", [0, 1, 2])
def test_the_first_microbatches_of_every_window_are_kept(n: int) -> None:
    """1F1B: stage s has p - s in flight, in windows of so many; GPipe has all at once."""
    windows = share_of_window(build("1f1b", 4, 12), n)
    assert windows == tuple(frozenset(m for m in range(12) if m % (4 - s) < n) for s in range(4))
    assert share_of_window(build("gpipe", 2, 6), n) == (frozenset(range(n)),) * 2


def test_a_placement_names_every_rank_and_cuts_its_stages_in_equal_chains() -> None:
    assert not [*placement_problems((0, 1), 1, 2), *placement_problems((0, 1, 1, 0), 2, 2)]
    assert list(placement_problems((0, 2), 2, 2)) == [
        "rank_of must name every rank from 0 to 1 and no other, got [0, 2]"
    ]
    for chain in (0, 3):
        said = [f"chain {chain} must divide the number of stages, 4"]
        assert list(placement_problems((0, 0, 1, 1), chain, 2)) == said
