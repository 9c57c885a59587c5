"""Orders of slices that a search finds beside a run: faster, of the same cuts, within the memory of each rank."""

from __future__ import annotations

import pytest

from megapipe.schedule import Costs, build, from_json, simulate
from megapipe.schedule.core.cuts import shares
from megapipe.schedule.core.sliced_search import searched_slices
from megapipe.schedule.search.beside import better
from megapipe.schedule.shapes.slices.slices import in_place, slices

COSTS = Costs(1, 1.1, 0.8, comm=0.02, attention_f=0.6, attention_b=0.6, mem_k=0.1)
CUTS = shares(4, "work", COSTS)


def test_a_run_in_slices_gets_a_better_order_of_the_same_slices():
    slow = in_place(build("gpipe", 4, 2), CUTS)
    peak = simulate(slow, COSTS).peak
    found = better(slow, COSTS, peak, effort=0.2)
    table = from_json(found.table)
    time = simulate(table, COSTS)
    assert (table.cuts, table.placement) == (CUTS, slow.placement)
    assert time.makespan == found.after < 0.86 * found.before
    by_hand = slices(lambda n: build("zb-h1", 4, n), 2, CUTS, COSTS)
    assert time.makespan <= simulate(by_hand, COSTS).makespan
    assert all(now <= most * (1 + 1e-9) for now, most in zip(time.peak, peak, strict=True))


@pytest.mark.parametrize("room", [0.1, 0.9])
def test_where_not_one_microbatch_fits_there_is_none(room):
    assert searched_slices(build("1f1b", 2, 2).placement, 2, CUTS, COSTS, (room, room), effort=0.1) is None
