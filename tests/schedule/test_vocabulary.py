"""Vocabulary passes under every table: each needs what it should, and the ends weigh no more than the middle."""

import pytest

from megapipe.schedule import (
    SCHEDULES,
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
    verify_programs,
)
from megapipe.schedule.lower import forward_only, lower
from megapipe.schedule.passes import Exchange
from megapipe.schedule.transforms.reduction import with_reduction
from megapipe.schedule.transforms.vocabulary import activation, with_vocabulary
from megapipe.schedule.views.perfetto import to_perfetto
from megapipe.schedule.views.terminal import to_terminal

FIXED = [name for name in SCHEDULES if name != "zb-auto"]
COSTS = Costs(10, 11, 8, s=3, t=1.5)


@pytest.mark.parametrize("name", FIXED)
def test_every_schedule_takes_vocabulary_passes(name: str) -> None:
    plain = build(name, 4, 8)
    table = with_vocabulary(plain, COSTS)
    verify(table)
    verify(with_reduction(table, COSTS))
    verify_programs(forward_only(table), lower(forward_only(table)))
    assert from_json(to_json(table)) == table
    assert from_csv(to_csv(table)).placement.vocabulary
    for row, before in zip(table.ranks, plain.ranks, strict=True):
        forwards = [x for step in row for x in step if x.kind.is_forward]
        assert forwards == [x for step in before for x in step if x.kind.is_forward]
        assert sum(step[0].kind is Kind.S for step in row) == 8
    assert sum(x.kind is Kind.C for row in table.ranks for step in row for x in step) == 8


@pytest.mark.parametrize("microbatches", [8, 12, 24])
@pytest.mark.parametrize("name", [name for name in FIXED if SCHEDULES[name].copies == 2])
def test_chains_look_up_in_turn(name: str, microbatches: int) -> None:
    """One chain's lookups stood before all of the other's, which waited for each other: chimera 4 x 12."""
    verify(with_vocabulary(build(name, 4, microbatches), COSTS))


def test_loss_waits_for_all_shares_and_everything_after_it_for_the_loss() -> None:
    """F 1, messages 0.5, S 2 on both ranks at once, then B of the last stage; T and EW when their inputs are there."""
    time = simulate(with_vocabulary(build("1f1b", 2, 1)), Costs(s=2, t=1, comm=0.5))
    at = {str(x): start for x, start in time.start.items()}
    assert (at["0F0"], at["1F0"], at["1S0"], at["0S0"], at["1C0"]) == (0.5, 2, 3, 3.5, 6)
    assert (at["1BW0"], at["0T0"], at["0BW0"], at["1EW0"]) == (6, 6.5, 8.5, 11)


@pytest.mark.parametrize(("name", "layers"), [("1f1b", 1.2), ("1f1b-v", 1.2), ("zb-h1", 9.6), ("zb-v", 9.6)])
def test_eight_ranks_are_balanced_with_any_head(name: str, layers: float) -> None:
    """A head of so many layers (32k and 256k words beside a Llama of width 4096), 4 layers a rank."""
    share = 10 / 4 * layers / 8
    plain, even = build(name, 8, 32), Costs(10 + share, 11 + share, 8 + share)
    costs = Costs(10, 11, 8, s=2 * share, t=share)
    table = with_vocabulary(plain, costs)
    time, balanced = simulate(table, costs), simulate(plain, even)
    assert time.makespan <= 1.02 * balanced.makespan
    assert max(activation(table, costs, time)) <= max(balanced.peak) + 1


def test_messages_go_to_every_rank_and_an_evaluation_needs_no_gradients() -> None:
    table = with_vocabulary(build("1f1b", 4, 2))
    for schedule, kinds in ((table, {"E", "F", "S", "C", "BW"}), (forward_only(table), {"E", "F", "S"})):
        sent = [
            message
            for rank, program in enumerate(lower(schedule))
            for item in program
            if isinstance(item, Exchange)
            for message in item.messages
            if message.src == rank
        ]
        assert {message.made_by.kind.value for message in sent} == kinds
        to = sorted(message.dst for message in sent if message.made_by == Pass(Kind.F, 3, 1))
        assert to == [0, 1, 2]


def test_pictures_and_text_show_vocabulary_passes() -> None:
    table = with_vocabulary(build("1f1b", 2, 2), COSTS)
    assert "S0" in to_terminal(table, COSTS)
    assert '"0S1"' in to_perfetto(table, COSTS)


def test_what_is_wrong_with_shares_is_named() -> None:
    plain = build("1f1b", 2, 2)
    table = with_vocabulary(plain)
    rows = tuple(tuple(step for step in row if str(step[0]) != "0T1") for row in table.ranks)
    with pytest.raises(ScheduleError, match="rank 0: 0T1 is missing"):
        verify(Schedule("mine", table.placement, 2, rows))
    with pytest.raises(ScheduleError, match="not shared in this placement"):
        verify(Schedule("mine", plain.placement, 2, table.ranks))
    with pytest.raises(ScheduleError, match="into a table of F, B, W and BW alone"):
        with_vocabulary(table)
