"""Pairs as a transform: what the rule costs, what they gain by a clock of the test's own, what is refused and why."""

from __future__ import annotations

import re

import pytest

from megapipe.schedule import (
    SCHEDULES,
    Costs,
    Kind,
    Pass,
    Schedule,
    ScheduleError,
    Step,
    build,
    from_json,
    loop,
    simulate,
    to_json,
    unpaired,
    verify,
)
from megapipe.schedule.core.bound import paired_bound
from megapipe.schedule.shapes.pairs.pairs import held_in_pairs, pairs
from megapipe.schedule.shapes.pairs.searched import search_pairs

COSTS = Costs(10, 11, 8, link_f=0.23, link_b=0.23, link_w=0.23)


def other_clock(schedule: Schedule, together: float) -> float:
    """Makespan where a step of two takes so much of the sum: no cost, need or link of ours is asked."""
    place, done = schedule.placement, dict[Pass, float]()
    lasts = {Kind.F: 10, Kind.B: 11, Kind.W: 8, Kind.BW: 19}
    parts = place.num_stages // place.num_chains / place.num_ranks

    def there(x: Pass) -> float:
        kind, stage, i, _ = x
        if kind is Kind.W:
            return done.get(Pass(Kind.B, stage, i), -1)
        if kind is Kind.F:
            return done.get(Pass(kind, stage - 1, i), -1) if stage % place.chain else 0.0
        if stage % place.chain == place.chain - 1:
            return done.get(Pass(Kind.F, stage, i), -1)
        return max(done.get(Pass(k, stage + 1, i), -1) for k in (Kind.B, Kind.BW))

    at, free = [0] * len(schedule.ranks), [0.0] * len(schedule.ranks)
    moved = True
    while moved:
        moved = False
        for rank, row in enumerate(schedule.ranks):
            while at[rank] < len(row) and min(starts := [there(x) for x in row[at[rank]]]) >= 0:
                step = row[at[rank]]
                own = sum(lasts[x.kind] for x in step) / parts * (together if len(step) > 1 else 1)
                free[rank] = max(free[rank], *starts) + own
                done.update(dict.fromkeys(step, free[rank]))
                at[rank] += 1
                moved = True
    assert at == [len(row) for row in schedule.ranks]
    return max(free)


@pytest.mark.parametrize(
    "name, chunks, held",
    [("1f1b", 1, 16), ("interleaved", 2, 12), ("interleaved", 4, 10), ("interleaved-zb", 8, 9), ("zb-v", 2, 8.5),
     ("dualpipe", 2, 9), ("zb-h1", 1, 16)],
)  # fmt: skip
def test_what_the_rule_costs(name: str, chunks: int, held: float) -> None:
    """2p, p (v+1)/v, p + 1/2 and p + 1."""
    assert max(held_in_pairs(build(name, 8, 32, chunks=chunks), COSTS)) == held


def in_place(behind: int) -> Schedule:
    """1F1B with each backward beside the forward before it (0) or behind it (1): warm-ups differ by one pass."""
    table, rows = build("1f1b", 4, 24), []
    for rank, row in enumerate(table.ranks):
        first = 3 - rank + behind
        beside = zip(row[first::2], row[first + 1 :: 2], strict=False)
        both = [tuple(sorted((*x, *y), key=lambda z: z.kind is not Kind.F)) for x, y in beside]
        both = [step for step in both if len({x.kind for x in step}) > 1]
        rows.append((*row[:first], *both, *row[first + 2 * len(both) :]))
    return Schedule("in place", loop(4), 24, tuple(rows))


def test_warm_ups_that_differ_by_one_pass_block_or_halve_the_speed() -> None:
    with pytest.raises(ScheduleError, match="3BW0: runs before 3F0 at step 0"):
        verify(in_place(0))
    verify(in_place(1))
    alone = other_clock(build("1f1b", 4, 24), 1)
    assert other_clock(in_place(1), 0.77) > 1.3 * alone
    assert other_clock(pairs(build("1f1b", 4, 24), COSTS), 0.77) < 0.9 * alone


@pytest.mark.parametrize(("chunks", "memory", "tries", "bar"), [(4, 10.5, 40, 790), (8, 9, 2, 815)])
def test_the_bar_by_another_clock(chunks: int, memory: float, tries: int, bar: float) -> None:
    """At p 8, m 32: 1131 for 1F1B without pairs, 773 here; arithmetic alone takes 715."""
    made = pairs(build("interleaved-zb", 8, 32, chunks=chunks), COSTS, memory=memory, tries=tries)
    verify(made, memory=memory, costs=COSTS)
    read = from_json(to_json(made))  # as `show --json` writes it
    assert simulate(made, COSTS).makespan == pytest.approx(other_clock(read, 0.77))
    bound = paired_bound(made, COSTS, memory)
    assert bound is not None
    assert 715 <= bound <= other_clock(read, 0.77) <= bar
    assert other_clock(unpaired(made), 0.77) > 900
    assert max(map(held_at_once, read.ranks)) / chunks <= memory


def held_at_once(row: tuple[Step, ...]) -> int:
    """Most microbatches of any stage of a rank between the start of F and the end of W, or of BW."""
    held = most = 0
    for step in row:
        held += sum(x.kind is Kind.F for x in step)
        most = max(most, held)
        held -= sum(x.kind in (Kind.W, Kind.BW) for x in step)
    return most


def test_of_a_bare_v_come_pairs_as_good_as_dualpipe_v() -> None:
    by_hand = simulate(build("dualpipe-v", 8, 32), COSTS)
    made = simulate(pairs(build("zb-v", 8, 32), COSTS), COSTS)
    assert by_hand.makespan == pytest.approx(828, abs=0.5)
    assert made.makespan <= by_hand.makespan * 1.02
    assert max(made.peak) <= max(by_hand.peak)


@pytest.mark.parametrize("name", [name for name, entry in SCHEDULES.items() if not entry.searched])
@pytest.mark.parametrize("p, m", [(2, 4), (4, 10)])
def test_every_table_gains_and_keeps_each_stages_order(name: str, p: int, m: int) -> None:
    table = build(name, p, m)
    made = pairs(table, COSTS, tries=24)
    assert other_clock(made, 0.77) < other_clock(unpaired(table), 0.77)
    for kinds in ((Kind.F,), (Kind.B, Kind.BW)):
        for stage in range(table.placement.num_stages):
            before, after = (
                [x.microbatch for step in s.ranks[table.placement.rank_of[stage]] for x in step
                 if x.stage == stage and x.kind in kinds] for s in (table, made)
            )  # fmt: skip
            assert before == after


def test_a_memory_without_gain_is_refused_with_the_least_that_gains() -> None:
    table = build("naive", 4, 8)
    with pytest.raises(ScheduleError) as error:
        pairs(table, COSTS, memory=1)
    text = str(error.value)
    assert text.startswith("naive is no shorter with pairs than without, 928, at a memory of 1: to run each F with")
    assert "must differ by two passes, which takes a memory of 8." in text
    found = re.search(r"They gain from --memory (\S+) on: (\S+)\.$", text)
    assert found
    assert simulate(pairs(table, COSTS, memory=float(found[1])), COSTS).makespan <= float(found[2]) + 0.01


def test_what_cannot_be_paired_is_refused() -> None:
    with pytest.raises(ScheduleError, match=r"one microbatch has no two passes that could run together\. Take more"):
        pairs(build("1f1b", 4, 1), COSTS)
    with pytest.raises(
        ScheduleError, match=r"nothing to hide, as no pass has communication\. Say its share .*--comm-s"
    ):
        pairs(build("1f1b", 4, 8), Costs(10, 11, 8))


def test_the_search_is_no_worse_than_any_order_at_its_memory() -> None:
    made = search_pairs(2, 4, costs=COSTS, chunks=2, memory=2.75, effort=0.01)
    assert made == search_pairs(2, 4, costs=COSTS, chunks=2, memory=2.75, effort=0.01)
    verify(made, memory=2.75, costs=COSTS)
    for name, chunks in (("zb-v", 2), ("interleaved-zb", 2)):
        other = simulate(pairs(build(name, 2, 4, chunks=chunks), COSTS, memory=2.75, tries=8), COSTS)
        assert simulate(made, COSTS).makespan <= other.makespan * (1 + 1e-9)
    with pytest.raises(ScheduleError, match=r"searched for the makespan, not the period\. Leave out --objective\.$"):
        search_pairs(2, 4, costs=COSTS, objective="period")
