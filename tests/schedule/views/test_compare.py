"""The comparison of schedules: bubbles of the papers, what fits a memory, and honest advice."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from megapipe.schedule import SCHEDULES, Costs, build
from megapipe.schedule.verify import verify
from megapipe.schedule.views.compare import Refusal, Row, advise, compare, measure, to_table

FIXED = [name for name in SCHEDULES if name != "zb-auto"]


def fixed_rows(ranks: int, microbatches: int, costs: Costs, memory: float | None = None) -> list[Row]:
    return [measure(build(name, ranks, microbatches), costs, memory=memory) for name in FIXED]


def test_bubble_shares_are_those_of_the_papers():
    p, m = 4, 12
    share = {row.label: row.bubble_share for row in fixed_rows(p, m, Costs(10, 11, 8))}
    assert share["naive"] == pytest.approx((p - 1) / p)
    assert share["gpipe"] == share["1f1b"] == pytest.approx((p - 1) / (m + p - 1))


def test_compare_has_a_row_or_a_reason_for_every_schedule():
    shares = []
    rows = compare(3, 6, Costs(1, 1, 1), effort=0.1, progress=lambda share, doing: shares.append(share))
    assert {row.label.split()[0] for row in rows} == {*SCHEDULES, "zb-auto"}
    assert shares == sorted(shares)
    assert shares[-1] == 1
    reasons = {row.label: row.reason for row in rows if isinstance(row, Refusal)}
    assert "even number of ranks" in reasons["dualpipe"]
    assert all(row.label in to_table(rows) for row in rows)


def test_costs_of_equal_stages_are_those_of_a_rank_however_many_stages_a_schedule_has():
    """Costs of a plan of 4 stages dropped 14 of 23 schedules: "Costs.f names 4 stages, ... cut in 8"."""
    names = [name for name in FIXED if not SCHEDULES[name].searched]
    of_rank = Costs(10, 11, 8, mem_b=3, mem_w=2)
    expected = compare(4, 8, of_rank, names=names)
    assert not any(isinstance(row, Refusal) for row in expected)
    # Four stages are divided for zb-v, and sixteen are merged for all others.
    for stages in (4, 8, 16):
        tuples = {name: (4 / stages * getattr(of_rank, name),) * stages for name in ("f", "b", "w", "mem_b", "mem_w")}
        rows = compare(4, 8, Costs(**tuples), names=names)
        for row, other in zip(rows, expected, strict=True):
            assert (row.label, row.sent) == (other.label, other.sent)
            assert (row.makespan, row.peak) == pytest.approx((other.makespan, other.peak))
            assert row.divided in {0, 4, 8, 16} - {stages}


def test_stages_that_do_not_go_into_each_other_stay_refused():
    rows = compare(3, 6, Costs(f=(1.0,) * 4, b=(1.0,) * 4, w=(1.0,) * 4), names=["1f1b", "zb-v"])
    assert [row.reason for row in rows if isinstance(row, Refusal)] == [
        f"Costs.f names 4 stages, but the model is cut in {stages}." for stages in (3, 6)
    ]


def test_what_does_not_fit_is_neither_hidden_nor_recommended():
    rows = fixed_rows(4, 8, Costs(10, 11, 8), memory=3)
    assert {row.label for row in rows if row.fits} == {"naive", "group-interleaved", "1f1b-v", "v-half", "v-min"}
    assert advise(rows, 4, 8, Costs(10, 11, 8))[0].startswith("Take v-half: makespan 266.5, 16.5% less than 1f1b (319")
    assert to_table(rows).count("over the limit") == len(rows) - 5


def test_advice_is_honest_when_no_schedule_helps():
    many = advise(fixed_rows(2, 256, Costs()), 2, 256)
    assert many == ["Stay with 1f1b (makespan 771): none that fits saves 2% of it; group-interleaved would take 769.5."]
    alone = [measure(build(name, 1, 8)) for name in ("naive", "1f1b", "zb-h1")]
    assert advise(alone, 1, 8)[0] == "Stay with 1f1b (makespan 24): none that fits saves 2% of it."
    assert advise(fixed_rows(4, 8, Costs(), memory=0.5), 4, 8)[0].startswith("No schedule fits: naive needs least, 1.")


def test_advice_names_uneven_stages_as_what_no_schedule_can_mend():
    costs = Costs(f=(1, 1, 1, 3), b=(1, 1, 1, 3), w=(1, 1, 1, 3))
    rows = [measure(build(name, 4, 16), costs) for name in ("1f1b", "zb-h1")]
    assert any("busiest rank works 144, the mean rank 72" in line for line in advise(rows, 4, 16, costs))


def test_advice_says_how_cheap_pairs_must_be_for_dualpipe_v():
    costs = Costs(10, 11, 8)
    rows = [row for row in fixed_rows(8, 16, costs) if row.label in ("1f1b", "zb-v", "dualpipe-v")]
    found = [
        re.search(r"dualpipe-v is as fast as zb-v only if .* at most (\d+) %", x) for x in advise(rows, 8, 16, costs)
    ]
    percent = next(int(match[1]) for match in found if match)
    at = [measure(build("dualpipe-v", 8, 16), Costs(10, 11, 8, fb=29 * x / 100)) for x in (percent, percent + 1)]
    zb_v = measure(build("zb-v", 8, 16), costs)
    assert at[0].makespan <= zb_v.makespan < at[1].makespan


def test_a_table_that_verify_lets_through_is_not_said_to_be_over_the_limit():
    """Sums of bytes round: eight activations are 1e-4 bytes more than eight times one."""
    costs = Costs(10, 11, 8, mem_b=1e12 / 11, mem_w=1e11 / 11)
    schedule, limit = build("1f1b", 8, 16), 8e12 / 11
    verify(schedule, memory=limit, costs=costs)
    assert measure(schedule, costs, memory=limit).fits
    assert not measure(schedule, costs, memory=limit * 0.999).fits


def test_a_name_that_a_run_takes_comes_before_the_search_for_the_shortest_period():
    """A comparison said to take "zb-auto period", which --pipeline-schedule does not know, for an equal zb-v."""
    plain = measure(build("1f1b", 4, 16), Costs())
    zb_v = replace(plain, label="zb-v", makespan=0.8 * plain.makespan, sent=2 * plain.sent)
    searched = replace(zb_v, label="zb-auto period", makespan=0.999 * zb_v.makespan, sent=zb_v.sent - 1)
    assert advise([plain, searched, zb_v], 4, 16)[0].startswith("Take zb-v: ")
