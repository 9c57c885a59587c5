"""Depths of multi-token prediction in tables: a side chain behind the loss, on any ranks."""

from __future__ import annotations

from itertools import pairwise

import pytest

from megapipe.errors import ScheduleError
from megapipe.schedule import Costs, Kind, Pass, Placement, Schedule, build, forward_only, from_json, simulate, verify
from megapipe.schedule.families.step.reduction import with_reduction
from megapipe.schedule.search.beside import better
from megapipe.schedule.shapes.depths import with_depths
from tools.proofs.tables.depths import apart, makespan, perfect


@pytest.mark.parametrize("name", ["1f1b", "gpipe", "interleaved", "zb-h1", "zb-v", "v-min", "dualpipe", "dualpipe-v"])
@pytest.mark.parametrize("ranks", [(3,), (0, 0), (1, 3, 0)])
def test_any_schedule_takes_depths_on_any_rank(name, ranks):
    table = with_depths(build(name, 4, 8), ranks)
    verify(table)
    place = table.placement
    assert place.rank_of[place.main : place.chain] == ranks
    assert [place.next(s) for s in range(place.main - 1, place.chain)] == [*range(place.main, place.chain), None]
    assert [place.depth(s) for s in range(place.chain)] == [0] * place.main + [*range(1, 1 + len(ranks))]


def test_forwards_and_backwards_of_the_table_keep_their_order():
    before = build("zb-h1", 4, 8)
    after = with_depths(before, (2, 0))
    for kinds in ({Kind.F}, {Kind.B, Kind.W}):
        for old, new in zip(before.ranks, after.ranks, strict=True):
            own = [x for (x,) in new if x.kind in kinds and not after.placement.depth(x.stage)]
            assert own == [x for (x,) in old if x.kind in kinds]


def test_the_backward_of_the_loss_waits_for_every_depth():
    table = with_depths(build("1f1b", 2, 4), (0, 1), Costs(comm=0.5))
    start, end = simulate(table, Costs(comm=0.5)).start, simulate(table, Costs(comm=0.5)).end
    for n in range(4):
        chain = [Pass(Kind.F, 1, n), Pass(Kind.F, 2, n), Pass(Kind.F, 3, n)]
        chain += [Pass(Kind.BW, 3, n), Pass(Kind.BW, 2, n), Pass(Kind.BW, 1, n)]
        assert all(end[a] <= start[b] for a, b in pairwise(chain))


def test_the_second_copy_of_dualpipe_has_its_depths_on_the_mirrored_ranks():
    place = with_depths(build("dualpipe", 4, 8), (3, 0)).placement
    assert place.rank_of == (0, 1, 2, 3, 3, 0, 3, 2, 1, 0, 0, 3)


def test_an_evaluation_has_no_depths():
    table = forward_only(with_depths(build("1f1b", 4, 8), (1, 2)))
    assert {x.stage for row in table.ranks for step in row for x in step} == {0, 1, 2, 3}


def test_depths_are_put_into_a_table_once_and_before_what_is_of_whole_stages():
    table = build("1f1b", 2, 4)
    for other in (with_depths(table, (0,)), with_reduction(table)):
        with pytest.raises(ScheduleError, match="put into a table of F, B, W and BW alone, and without depths"):
            with_depths(other, (1,))


@pytest.mark.parametrize(("p", "depths", "each"), [(4, 2, 12), (4, 3, 14)])
def test_depths_apart_are_within_3_percent_of_perfect_balance_where_those_on_one_stage_are_15_off(p, depths, each):
    """For 8 ranks: tools/proofs/tables/depths.py."""
    whole = perfect(p, 96, each)
    assert makespan(p, 96, each, apart(p, depths)) < 1.03 * whole
    assert min(makespan(p, 96, each, [rank] * depths) for rank in (p - 2, p - 1)) > 1.15 * whole


def test_a_search_beside_a_run_keeps_its_depths():
    """A slow table of two ranks: a better one of the model's own chain, and the depth comes into it again."""
    costs = Costs(*[(1.0, 1.0, 0.5)] * 3)
    place = with_depths(build("naive", 2, 4), (0,), costs).placement
    orders = "0F 2F 2BW 0BW", "1F 1BW"
    rows = [tuple((Pass(Kind(x[1:]), int(x[0]), n),) for n in range(4) for x in order.split()) for order in orders]
    slow, memory = Schedule("mine", place, 4, tuple(rows)), (6.0, 6.0)
    found = better(slow, costs, memory, 0.5)
    made = from_json(found.table)
    assert all(held <= most for held, most in zip(simulate(made, costs).peak, memory, strict=True))
    assert made.placement == slow.placement
    assert simulate(made, costs).makespan == found.after < found.before


@pytest.mark.parametrize("rank_of", [(0, 1, 3, 2), (0, 1, 2, 3)])
def test_a_table_with_a_rank_of_depths_alone_stays_as_it_is(rank_of):
    """The search for the other ranks ended in a ValueError in its process: it had a row or a limit too many."""
    stage_of = [rank_of.index(rank) for rank in range(4)]
    rows = tuple(((Pass(Kind.F, stage, 0),), (Pass(Kind.BW, stage, 0),)) for stage in stage_of)
    table = Schedule("made", Placement(rank_of, 4, depths=1), 1, rows)
    verify(table)
    found = better(table, Costs(), (1.0,) * 4, 0.1)
    assert from_json(found.table) == table
    assert found.after == found.before == pytest.approx(4 * 3 * 4 / 3)  # stages in turn, each of a third
