"""Schedules cut in slices against the papers' formulas, and cuts against the work that they divide."""

from dataclasses import replace
from functools import partial
from itertools import pairwise

import pytest

from megapipe.schedule import Costs, ScheduleError, build, simulate
from megapipe.schedule.core.cuts import at_borders, in_tokens, shares
from megapipe.schedule.costs import UNIT
from megapipe.schedule.shapes.slices.slices import in_place, slices

ATTENTION = Costs(attention_f=0.6, attention_b=0.6, attention_w=0.6)


def cut(name, p, m, n, costs=UNIT, how="work", **more):
    chunks = more.pop("chunks", None)
    return slices(lambda k: build(name, p, k, chunks=chunks), m, shares(n, how, costs), costs, **more)


@pytest.mark.parametrize(("p", "m", "n"), [(2, 2, 2), (4, 3, 4), (8, 8, 4), (8, 2, 8)])
def test_1f1b_in_slices_is_seq1f1b(p, m, n):
    table = cut("1f1b", p, m, n)
    time = simulate(table)
    # Sun et al. 2024: warm-up of p - r - 2 + n slices before the turns, so that rank 0 holds p - 1 + n of them.
    first = [str(step[0]) for step in table.ranks[0]]
    warmup = next(i for i, x in enumerate(first) if "B" in x)
    assert warmup == min(p - 1 + n, m * n)
    assert max(time.peak) == pytest.approx(min(p - 1 + n, m * n) / n)
    if m * n >= p - 1 + n:
        assert time.bubble == pytest.approx((p - 1) * 3 / n)


@pytest.mark.parametrize(
    ("name", "chunks", "bubble", "memory"),
    [
        # Li et al. 2021: GPipe over slices. Sun et al. 2024. Li et al. 2025: "from several microbatches to just one".
        ("terapipe", 1, 7 * 3 / 8, 4),
        ("seq1f1b", 1, 7 * 3 / 8, 1 + 7 / 8),
        ("slimpipe", 2, 7 * 3 / 16, 1 + 2 * 7 / 16),
        ("slimpipe", 4, 7 * 3 / 32, 1 + 2 * 7 / 32),
    ],
)
def test_tables_of_the_literature_in_eight_slices_have_their_bubble_and_memory(name, chunks, bubble, memory):
    time = simulate(build(name, 8, 4, chunks=chunks, slices=8))
    assert time.bubble == pytest.approx(bubble)
    assert max(time.peak) == pytest.approx(memory)
    assert build(name, 8, 4, chunks=chunks, slices=8).name == name


def test_terapipe_cut_by_work_takes_as_little_as_the_paper_says():
    # Sec. 3.3: a pipeline of p takes the sum of its slices and p - 1 times the longest; a cut of equal work has both
    # at their least, so that no other cut in as many does better.
    table = build("terapipe", 4, 1, slices=3)

    def forward(cuts):
        costs = Costs(b=0, w=0, attention_f=0.6)
        return simulate(replace(table, cuts=cuts), costs).makespan

    best = forward(shares(3, "work", ATTENTION))
    assert best == pytest.approx(1 + 3 * 1 / 3)
    others = [(a, b, 24 - a - b) for a in range(1, 23) for b in range(1, 24 - a)]
    assert all(forward(cuts) >= best - 1e-9 for cuts in others)


@pytest.mark.parametrize(
    ("a", "n", "ideals"), [(0.0, 4, 1.219), (0.3, 4, 1.465), (0.6, 4, 1.711), (0.3, 16, 1.242), (0.6, 16, 1.430)]
)
def test_slices_of_equal_length_wait_for_the_one_that_attends_most(a, n, ideals):
    costs = Costs(attention_f=a, attention_b=a, attention_w=a)
    assert simulate(cut("1f1b", 8, 8, n, costs, "equal"), costs).makespan / 24 == pytest.approx(ideals, abs=0.001)


def test_slices_of_equal_work_cost_ramps_alone():
    # 8 ranks, 8 microbatches, 4 slices: 1F1B takes 1.875 of the work and holds 8.
    plain, zero = (simulate(cut(name, 8, 8, 4, ATTENTION), ATTENTION) for name in ("1f1b", "zb-h1"))
    assert plain.makespan / 24 < 1.22
    assert max(plain.peak) / 8 < 0.38
    assert zero.makespan / 24 < 1.08
    assert max(zero.peak) / 8 < 0.38


def test_few_microbatches_fill_the_pipeline():
    whole = {name: simulate(build(name, 8, 2)).makespan for name in ("1f1b", "zb-h1", "interleaved")}
    assert simulate(cut("1f1b", 8, 2, 4)).makespan < 0.7 * min(whole.values())
    assert max(simulate(cut("1f1b", 8, 2, 4)).peak) == 2


@pytest.mark.parametrize(
    ("name", "chunks"), [("interleaved", 2), ("interleaved-zb", 2), ("zb-v", None), ("dualpipe", None), ("hanayo", 2)]
)
def test_slices_of_other_placements_run(name, chunks):
    table = cut(name, 4, 4, 2, chunks=chunks)  # verified
    assert {x.slice for row in table.ranks for step in row for x in step} == {0, 1}


def test_a_limit_of_memory_is_kept_or_refused_with_what_is_needed():
    assert max(simulate(cut("zb-v", 4, 4, 4, memory=2.5)).peak) <= 2.5
    with pytest.raises(ScheduleError, match=r"1f1b in 4 slices holds 1\.75, over the memory limit of 1\.5"):
        cut("1f1b", 4, 4, 4, memory=1.5)


def test_a_table_of_a_file_is_cut_in_the_places_of_its_passes():
    table = in_place(build("zb-h1", 2, 2), (2, 1))
    assert [str(step[0]) for step in table.ranks[0]][:4] == ["0F0.0", "0F0.1", "0F1.0", "0F1.1"]
    with pytest.raises(ScheduleError, match="zb-h1 is cut in 2 slices already"):
        in_place(table, (1, 1))


def test_a_cut_by_work_divides_what_a_sum_over_tokens_says():
    wanted = shares(4, "work", ATTENTION)
    assert wanted[0] == pytest.approx(0.39, abs=0.005)
    tokens = in_tokens(wanted, 1000)
    work = [0.4 + 0.6 * (2 * t + 1) / 1000 for t in range(1000)]  # of each token
    ends = [sum(tokens[:k]) for k in range(5)]
    parts = [sum(work[a:b]) / sum(work) for a, b in pairwise(ends)]
    assert parts == pytest.approx([0.25] * 4, abs=0.002)
    # One cut for three passes: without attention in W it lies between theirs.
    uneven = Costs(attention_f=0.6, attention_b=0.8)
    assert 0.25 < shares(4, "work", uneven)[0] < shares(4, "work", Costs(attention_f=1, attention_b=1))[0]


@pytest.mark.parametrize(
    ("borders", "multiple", "cut"),
    [
        ((7, 17, 18), 1, (7, 11, 12)),  # 10 -> 7, 20 -> 18: the nearest of those before 25
        ((4, 5, 14, 15, 26), 1, (14, 6, 10)),  # half of the way to the cut beside it is another's: 15, 25
        ((7, 8, 18), 4, (8, 12, 10)),
        ((), 1, (10, 10, 10)),
    ],
)
def test_a_cut_goes_to_the_nearest_border_that_is_no_nearer_to_another(borders, multiple, cut):
    assert at_borders((10, 10, 10), borders, multiple) == cut


@pytest.mark.parametrize(("length", "multiple"), [(64, 8), (33, 1), (4096, 128), (32, 8)])
def test_cuts_are_multiples_and_none_is_empty(length, multiple):
    tokens = in_tokens(shares(4, "work", ATTENTION), length, multiple)
    assert sum(tokens) == length
    assert all(n > 0 and n % multiple == 0 for n in tokens)


def test_a_length_that_cannot_be_cut_is_refused():
    with pytest.raises(ScheduleError, match="4 slices of 30 tokens, each a multiple of 8, cannot be"):
        in_tokens((0.25,) * 4, 30, 8)


@pytest.mark.parametrize(
    ("costs", "told"),
    [
        (Costs(f=(1, 1, 1, 2), o=0.5, l=0.5, mem_k=(0.1,) * 4), "Costs name o of all stages together"),
        (Costs(f=(1, 1, 2)), "Costs.f names 3 stages, but the model is cut in 4."),
        (Costs(comm=(1, 1)), "Costs.comm names 2 links, but 4 ranks have at least 3."),
    ],
)
def test_costs_that_do_not_go_with_the_table_are_not_blamed_on_the_number_of_slices(costs, told):
    with pytest.raises(ScheduleError) as caught:
        slices(partial(build, "1f1b", 4), 8, (1.0, 1.0), costs)
    assert told in str(caught.value)


def test_more_slices_than_messages_can_be_numbered_by_are_refused_at_once():
    """Nine quintillion of them took the machine's memory."""
    with pytest.raises(ScheduleError, match="65 slices of a microbatch: 64 are the most"):
        shares(65, "work", Costs())
    with pytest.raises(ScheduleError):
        shares(2**63 - 1, "equal", Costs())
    assert len(shares(64, "equal", Costs())) == 64
