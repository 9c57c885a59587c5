"""The rest of the step as passes, under every schedule: where they stand, and what the simulator says of them."""

from collections import Counter
from itertools import pairwise

import pytest

from megapipe.schedule import (
    SCHEDULES,
    Costs,
    Kind,
    Schedule,
    ScheduleError,
    build,
    from_json,
    simulate,
    to_json,
    verify,
)
from megapipe.schedule.costs import UNIT
from megapipe.schedule.dependencies import closed_prefix
from megapipe.schedule.families.step.asked import StepPasses
from megapipe.schedule.families.step.optimizer import with_gather, with_optimizer
from megapipe.schedule.families.step.reduction import exposed, with_reduction
from megapipe.schedule.kinds import Lane
from megapipe.schedule.passes import Pass, repeated
from megapipe.schedule.views.perfetto import to_perfetto
from megapipe.schedule.views.terminal import to_terminal

FIXED = [name for name in SCHEDULES if name != "zb-auto"]


def per_step(schedule: Schedule, costs: Costs) -> float:
    """The time that one step more takes."""
    return simulate(repeated(schedule, 9), costs).makespan - simulate(repeated(schedule, 8), costs).makespan


@pytest.mark.parametrize("name", FIXED)
def test_every_schedule_takes_the_rest_of_its_step(name: str) -> None:
    plain, costs = build(name, 4, 8), Costs(10, 14, 7, g=4, u=1, a=2)
    for barrier in (True, False):
        table = with_optimizer(with_reduction(plain, costs), barrier=barrier, gather="ahead")
        verify(repeated(table, 3), costs=costs)
        assert from_json(to_json(table)) == table
        # A copy of the state is no part of a step without --replication.
        left_out = [Kind.V, Kind.P] if barrier else [Kind.P]
        assert [kind for kind in Kind if kind not in table.kinds - plain.kinds and kind.traits.per_stage] == left_out


@pytest.mark.parametrize("name", FIXED)
def test_a_reduction_is_never_worse_than_one_at_the_end(name: str) -> None:
    """One all-reduce of a rank's gradients starts when its last pass is over, under DualPipe its twin's too."""
    plain, costs = build(name, 4, 8), Costs(g=9)
    time = simulate(plain, costs)
    assert 0 <= exposed(with_reduction(plain, costs), costs) <= 9 * plain.placement.num_chains
    if plain.placement.num_chains == 1:
        after = max(
            max(end for item, end in time.end.items() if plain.placement.rank_of[item.stage] == r) for r in range(4)
        )
        assert simulate(with_reduction(plain, costs), costs).makespan <= after + 9


def test_two_chunks_hide_half_of_the_reduction() -> None:
    """ZB-V's second chunk is done long before its first: only the first one's half is left behind the last pass."""
    costs = Costs(g=2)
    assert exposed(with_reduction(build("zb-v", 4, 12), costs), costs) == 1


@pytest.mark.parametrize(("name", "period"), [("zb-h2", 36), ("zb-v", 36), ("1f1b", 45), ("zb-h1", 39)])
def test_without_a_barrier_steps_follow_each_other_in_the_period(name: str, period: float) -> None:
    """Qi et al. 2023, sec. 4: zero bubble needs that no rank waits for the others' last pass. 12 x (F+B+W) = 36."""
    plain = with_reduction(build(name, 4, 12))
    assert per_step(with_optimizer(plain, barrier=False), Costs()) == period == simulate(plain).period
    assert per_step(with_optimizer(plain), Costs()) == simulate(plain).makespan


def test_replicas_are_reduced_in_one_order_on_both_ranks() -> None:
    table = with_reduction(build("dualpipe", 4, 8), Costs(10, 14, 7))
    rows = [[x.stage % 4 for step in row for x in step if x.kind is Kind.G] for row in table.ranks]
    assert rows[:2] == [rows[3], rows[2]]
    row = table.ranks[0]
    first, second = (i for i, step in enumerate(row) if step[0].kind is Kind.G)
    swapped = list(row)
    swapped[second], moved = row[first], row[second]
    swapped = [*swapped[:first], *swapped[first + 1 :]]
    swapped.insert(second - 1, moved)
    wrong = Schedule("mine", table.placement, 8, (tuple(swapped), *table.ranks[1:]))
    with pytest.raises(Exception, match="ranks 0 and 3 run G of the replicas they share in different orders"):
        verify(wrong)


def test_v_stands_before_what_writes_gradients_and_behind_forwards_alone() -> None:
    table = with_optimizer(with_reduction(build("zb-h2", 4, 8)), barrier=False)
    for row in table.ranks:
        at = next(i for i, step in enumerate(row) if step[0].kind is Kind.V)
        assert all(x.kind is Kind.F for step in row[:at] for x in step)
        assert row[at + 1][0].kind is Kind.B


def test_pictures_have_a_line_for_each_lane() -> None:
    table = with_reduction(build("1f1b", 2, 2))
    assert to_terminal(table, Costs(g=2), width=60).split("\n") == [
        "rank 0 |F0  F1  ........BW0     ....BW1     ........|",
        "    dp |....................................G0      |",
        "rank 1 |....F0  BW0     F1  BW1     ................|",
        "    dp |............................G0      ........|",
        "F forward; BW both gradients; G reduce gradients; . idle",
    ]
    assert '"name":"rank 1 dp"' in to_perfetto(table)


def test_passes_of_a_lane_do_not_overlap() -> None:
    table = with_reduction(build("interleaved", 4, 8), costs := Costs(g=30))
    time = simulate(table, costs)
    for row in table.ranks:
        for lane in Lane:
            own: list[Pass] = [x for step in row for x in step[:1] if x.kind.traits.lane is lane]
            assert all(time.end[a] <= time.start[b] for a, b in pairwise(own))


def test_what_v_may_take_back_can_be_run_again_by_all_ranks_together() -> None:
    """In every schedule all forwards before a rank's first backward; in a table where rank 1 runs a late one, fewer."""
    for name in FIXED:
        rows = build(name, 4, 8).ranks
        assert closed_prefix(build(name, 4, 8)) == [
            next(i for i, step in enumerate(row) if any(x.kind.is_backward for x in step)) for row in rows
        ]
    f, bw = ([[Pass(kind, r, i) for i in range(2)] for r in range(3)] for kind in (Kind.F, Kind.BW))
    rows = ([f[0][0], bw[0][0], f[0][1], bw[0][1]], [f[1][0], bw[1][0], f[1][1], bw[1][1]], [*f[2], *bw[2]])
    rows = tuple(tuple((x,) for x in row) for row in rows)
    table = Schedule("late", build("1f1b", 3, 2).placement, 2, rows)
    assert closed_prefix(table) == [1, 1, 1], "2F1 needs 1F1, which comes after a backward"
    late = with_optimizer(
        with_reduction(Schedule("gpipe", table.placement, 2, build("gpipe", 3, 2).ranks)), barrier=False
    )
    verify(late)
    row = late.ranks[1]
    at = next(i for i, step in enumerate(row) if step[0].kind is Kind.V)
    early = (*row[: at - 1], row[at], row[at - 1], *row[at + 1 :])
    wrong = Schedule("early", late.placement, 2, (late.ranks[0], early, late.ranks[2]))
    with pytest.raises(
        ScheduleError, match="rank 2, step 1, 2F1: stands before V and needs 1F1, which stands after it"
    ):
        verify(wrong)
    first = late.ranks[0]
    swapped = (*first[:at], first[at + 1], first[at], *first[at + 2 :])
    with pytest.raises(ScheduleError, match="only passes that can run again may stand"):
        verify(Schedule("late", late.placement, 2, (swapped, *late.ranks[1:])))


def row(schedule: Schedule, rank: int) -> str:
    return " ".join("&".join(map(str, step)) for step in schedule.ranks[rank])


PLAIN = build("interleaved-zb", 2, 2)  # the second chunk's gradients are whole first
FORWARDS, BACKWARDS = "0F0 0F1 2F0 2F1", "2B0 2W0 2B1 2W1 {} 0B0 0W0 0B1 0W1"
REDUCED = BACKWARDS.format("2G0") + " 0G0"


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, f"{FORWARDS} {REDUCED} 2U0 0U0"),
        ({"gather": "after"}, f"{FORWARDS} {REDUCED} 0U0 0A1 2U0 2A1"),
        ({"gather": "ahead"}, f"0A0 2A0 {FORWARDS} {REDUCED} 2U0 0U0"),
        ({"barrier": False}, f"{FORWARDS} 0V0 2V0 {REDUCED} 2U0 0U0"),
    ],
)
def test_updates_stand_behind_all_gathers_where_they_are_asked_for_v_behind_forwards(options, expected) -> None:
    assert row(with_optimizer(with_reduction(PLAIN), **options), 0) == expected
    without = [x for x in expected.replace("2U0 0U0", "0U0 2U0").split() if "G" not in x]
    assert row(with_optimizer(PLAIN, **options), 0).split() == without


@pytest.mark.parametrize(
    ("there", "options", "twice"),
    [
        ({"gather": "ahead"}, {}, "U"),
        ({"gather": "ahead"}, {"gather": "after"}, "A, U"),
        ({"barrier": False}, {"barrier": False}, "U, V"),
        ({"barrier": False}, {}, "U"),
    ],
)
def test_nothing_is_put_in_twice(there, options, twice) -> None:
    with pytest.raises(ScheduleError, match=f"^interleaved-zb has {twice} already, and each stage has one a step"):
        with_optimizer(with_optimizer(PLAIN, **there), **options)
    gathered = with_gather(PLAIN)
    assert row(with_optimizer(gathered), 0) == f"0A0 2A0 {row(PLAIN, 0)} 0U0 2U0"


def whole(schedule: Schedule, costs: Costs = UNIT, *, barrier: bool = True) -> Schedule:
    return StepPasses.whole(costs, barrier=barrier).around(schedule, costs)


def test_a_whole_step_gathers_where_that_takes_time() -> None:
    end = f"{REDUCED} 2U0 0U0"
    assert row(whole(PLAIN), 0) == f"{FORWARDS} {end}"
    for costs in (Costs(a=1), Costs(a=(0, 0, 0, 1))):
        assert row(whole(PLAIN, costs), 0) == f"0A0 2A0 {FORWARDS} {end}"
        assert row(whole(PLAIN, costs, barrier=False), 0) == f"0A0 2A0 {FORWARDS} 0V0 2V0 {end}"
    assert row(whole(PLAIN, Costs(a=(0, 0, 0, 0))), 0) == f"{FORWARDS} {end}"
    assert row(with_gather(PLAIN), 1).startswith("1A0 3A0 1F0 ")


def test_steps_that_follow_are_numbered_on() -> None:
    table = repeated(whole(build("1f1b", 2, 2), Costs(a=1)), 3)
    assert row(table, 1) == " ".join(
        f"1A{n} 1F{2 * n} 1BW{2 * n} 1F{2 * n + 1} 1BW{2 * n + 1} 1G{n} 1U{n}" for n in range(3)
    )
    assert (table.training_steps, table.num_microbatches, table.all_microbatches) == (3, 2, 6)


@pytest.mark.parametrize("name", FIXED)
def test_stages_are_reduced_in_the_order_in_which_their_weight_gradients_end(name: str) -> None:
    plain = build(name, 2, 4)
    end: Counter[int] = Counter()
    for item, at in simulate(plain).end.items():
        if item.kind in (Kind.W, Kind.BW):
            end[item.stage] = max(end[item.stage], at)
    for row in with_reduction(plain).ranks:
        order = [x.stage for step in row for x in step if x.kind is Kind.G]
        ready = [max(end[twin] for twin in plain.placement.replicas(s)) for s in order]
        assert ready == sorted(ready)


def test_a_reduction_begins_behind_the_last_weight_gradient_of_its_stage() -> None:
    assert row(with_reduction(build("zb-v", 1, 2)), 0).endswith(" 1F1 1B1 1W1 1G0 0B1 0W1 0G0")
    alone, costs = build("gpipe", 1, 1), Costs(g=5)
    assert row(with_reduction(alone), 0) == "0F0 0BW0 0G0"
    assert (exposed(with_reduction(alone), costs), exposed(alone, costs)) == (5, 0)
