"""Vocabulary passes under every table: each needs what it should, and the ends weigh no more than the middle."""

import os
from collections import Counter
from itertools import cycle, product

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
from megapipe.schedule.core.merge import activation
from megapipe.schedule.dependencies import Dependencies
from megapipe.schedule.families.step.reduction import with_reduction
from megapipe.schedule.families.vocabulary.shares import all_shared, with_vocabulary
from megapipe.schedule.lower import Exchange, forward_only, lower
from megapipe.schedule.shapes.depths import with_depths
from megapipe.schedule.views.perfetto import to_perfetto
from megapipe.schedule.views.terminal import to_terminal
from tools.proofs.tables.drawn import drawn_table

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


@pytest.mark.parametrize("name", ["1f1b", "zb-h1", "interleaved-zb", "dualpipe", "dualpipe-v"])
def test_depths_embed_and_lose_by_the_passes_of_all_ranks(name: str) -> None:
    """One S, T, E and EW a rank for all heads; what each depth combines is its own, and no evaluation runs depths."""
    table = with_depths(build(name, 4, 8), (3, 0) if "dual" in name else (2, 1), COSTS, shared=all_shared)
    verify(table)
    assert from_json(to_json(table)) == table
    evaluated = forward_only(table)
    verify_programs(evaluated, lower(evaluated))
    found = Counter(
        (x.kind.value, table.placement.depth(x.stage) > 0) for row in table.ranks for step in row for x in step
    )
    assert [found[kind, False] for kind in ("S", "T", "E", "EW", "C")] == [32, 32, 32, 32, 8]
    assert found["C", True] == found["F", True] == 16
    assert all(not table.placement.depth(x.stage) for row in evaluated.ranks for step in row for x in step)


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
    with pytest.raises(ScheduleError, match="into a table of F, B, W and BW of whole microbatches alone"):
        with_vocabulary(table)


def test_only_the_first_stage_waits_for_looked_up_rows() -> None:
    of = Dependencies(with_vocabulary(build("1f1b", 3, 3))).of
    assert {str(item) for item in of(Pass(Kind.F, 0, 0))} == {"0E0", "1E0", "2E0"}
    assert {str(item) for item in of(Pass(Kind.F, 1, 0))} == {"0F0"}


def test_rows_are_looked_up_in_the_order_in_which_the_first_stage_takes_them() -> None:
    table = with_vocabulary(drawn_table(1, 3, 4))  # whose second stage takes them in another
    first, second = [
        [x.microbatch for row in table.ranks for (x,) in row if (x.kind, x.stage) == (Kind.F, s)] for s in (0, 1)
    ]
    assert first != second
    for row in table.ranks:
        assert [x.microbatch for (x,) in row if x.kind is Kind.E] == first


HEADS = (1.2, 9.6)
WITH_HEADS = product(FIXED, HEADS) if os.environ.get("MEGAPIPE_NIGHTLY") else zip(FIXED, cycle(HEADS))


@pytest.mark.parametrize(("name", "layers"), list(WITH_HEADS))
def test_shares_take_their_work_and_a_microbatch_of_memory_and_no_more(name: str, layers: float) -> None:
    """Yeung et al. 2024, sec. 5: the bubble is that of the schedule without head and embedding."""
    p, m, share = 4, 8, 10 / 4 * layers / 4
    plain, costs = build(name, p, m), Costs(10, 11, 8, s=2 * share, t=share, mem_b=1.0, mem_w=0.25)
    table = with_vocabulary(plain, costs)
    time, before = simulate(table, costs), simulate(plain, costs)
    assert time.makespan <= before.makespan + m * (2 * share + share) + 1e-9
    held = [len(plain.placement.stages_on(rank)) * p / plain.placement.chain for rank in range(p)]
    more = [now - then for now, then in zip(activation(table, costs, time), before.peak, strict=True)]
    assert all(extra <= one + 1e-9 for extra, one in zip(more, held, strict=True))


@pytest.mark.parametrize(
    ("name", "m", "costs"),
    [
        ("dualpipe-v", 6, Costs(10, 5, 8, s=3, t=4, e=1, comm=3, mem_b=(1.0, 6.0, 1.0, 6.0), mem_w=(0.5,) * 4)),
        ("dualpipe-v", 6, Costs(10, 5, 8, s=3, t=4, e=1, comm=3, mem_b=(0.1, 0.6, 0.1, 0.6), mem_w=(0.05,) * 4)),
        ("hanayo", 4, Costs(2, 11, 8, s=1, t=2, mem_b=(1.0, 6.0, 6.0, 1.0, 6.0, 1.0, 6.0, 1.0), mem_w=(0.5,) * 8)),
    ],
)
def test_a_faster_order_that_holds_more_than_a_microbatch_more_is_not_taken(name: str, m: int, costs: Costs) -> None:
    """A large stage may wait several times where one is to wait: 0.25 and 1% faster, and 5 more."""
    plain = build(name, 2, m)
    table = with_vocabulary(plain, costs)
    assert isinstance(costs.mem_b, tuple)
    held = [sum(costs.mem_b[s] for s in plain.placement.stages_on(rank)) for rank in range(2)]
    most = [peak + one for peak, one in zip(simulate(plain, costs).peak, held, strict=True)]
    found = activation(table, costs, simulate(table, costs))
    assert all(now <= limit for now, limit in zip(found, most, strict=True))


PICTURES = {
    ("dualpipe-v", 2, 4, Costs(10, 14, 7, s=9, t=4, e=2, comm=1)): (
        "0E0 0E1 0F0 0E2 0F1 0E3 0F2 3F0 0S0 3F1 3C0 0S1 0F3 3C1 0T0 3B0 3W0 3F2 0S2 3BW1 3C2 0T1 3F3 0S3 0BW0 3C3 "
        "0EW0 0T2 3BW2 0BW1 0EW1 3BW3 0T3 0B2 0EW2 0W2 0B3 0EW3 0W3",
        "1E0 1E1 1E2 1F0 1E3 2F0 1F1 2F1 1S0 1F2 1S1 2F2 1T0 1F3 1T1 2BW0 1S2 2F3 1BW0 2BW1 1S3 1BW1 1EW0 1T2 1T3 "
        "2BW2 1EW1 1BW2 2B3 1B3 1EW2 2W3 1W3 1EW3",
    ),
    ("zb-h1", 3, 4, Costs(4, 5, 3, s=1, t=4, e=1, comm=3)): (
        "0E0 0E1 0F0 0E2 0F1 0E3 0F2 0F3 0S0 0S1 0T0 0T1 0S2 0B0 0EW0 0W0 0T2 0S3 0B1 0EW1 0W1 0T3 0B2 0EW2 0W2 0B3 "
        "0EW3 0W3",
        "1E0 1E1 1E2 1E3 1F0 1F1 1F2 1S0 1S1 1T0 1B0 1S2 1F3 1B1 1EW0 1W0 1S3 1T1 1T2 1B2 1EW1 1W1 1B3 1W2 1EW2 1W3 "
        "1T3 1EW3",
        "2E0 2E1 2E2 2E3 2F0 2S0 2F1 2S1 2C0 2B0 2C1 2F2 2S2 2B1 2T0 2C2 2F3 2EW0 2S3 2B2 2W0 2C3 2B3 2EW1 2W1 2W2 "
        "2W3 2T1 2EW2 2T2 2T3 2EW3",
    ),
}


@pytest.mark.parametrize("case", PICTURES, ids=lambda case: case[0])
def test_two_pictures(case: tuple[str, int, int, Costs]) -> None:
    """Lookups at most two ahead of the first stage; S, C and EW as soon as they can; T where a rank waits or has too
    many; backwards a forward later where that keeps the last stage busy. Beside the bounds above: a rule that is taken
    back mends nothing that they see, but costs a bit more somewhere."""
    name, p, m, costs = case
    rows = with_vocabulary(build(name, p, m), costs).ranks
    assert tuple(" ".join("&".join(map(str, step)) for step in row) for row in rows) == PICTURES[case]
