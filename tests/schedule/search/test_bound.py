"""Lower bounds lie below every table, its backwards whole, split or in pairs, whatever the overhead of a pass."""

from __future__ import annotations

from random import Random

import pytest

from megapipe.schedule import ScheduleError
from megapipe.schedule.core.bound import paired_bound
from megapipe.schedule.costs import SHARES, Costs
from megapipe.schedule.generators.interleaved import interleaved
from megapipe.schedule.patterns import fixed
from megapipe.schedule.search.auto import search
from megapipe.schedule.shapes.pairs.pairs import pairs
from megapipe.schedule.simulate import simulate


def drawn_costs(dice: Random) -> Costs:
    f, b, w = (dice.choice((1.0, dice.uniform(0.2, 3.0))) for _ in range(3))
    return Costs(f, b, w, comm=dice.choice((0.0, 0.3)), overhead=dice.choice((0.1, 1.0)))


@pytest.mark.parametrize("objective", ["makespan", "period"])
def test_a_reported_bound_is_below_every_table_of_the_catalogue_that_fits(objective: str) -> None:
    dice, compared = Random(5), 0
    for _ in range(25):
        p, chunks, costs = dice.randint(1, 4), dice.choice((1, 2)), drawn_costs(dice)
        m, memory = dice.randint(1, 3 * p), dice.uniform(1.5, 2.5 * p)
        place = dice.choice(("loop", "v")) if chunks == 2 else "loop"
        given = {"placement": place, "chunks": chunks, "costs": costs, "objective": objective}
        found = search(p, m, memory=memory, effort=0.01, **given)
        assert found.distance >= -1e-9
        for made in fixed(p, m, chunks, costs):
            time = simulate(made, costs)
            if made.placement == found.schedule.placement and max(time.peak) <= memory:
                assert found.bound <= (time.makespan if objective == "makespan" else time.period) * (1 + 1e-9)
                compared += 1
    assert compared > 50


@pytest.mark.parametrize("hidden", [{"fb": 2.2}, dict.fromkeys(SHARES, 0.4)])
def test_a_reported_bound_is_below_pairs_of_dualpipe_v(hidden: dict[str, float]) -> None:
    found = search(2, 8, placement="v", costs=Costs(overhead=0.2, **hidden), memory=3.0, effort=0.05)
    assert any(len(step) > 1 for row in found.schedule.ranks for step in row)
    assert found.distance >= -1e-9


def test_a_pair_pays_one_overhead_and_its_bound_knows() -> None:
    costs = Costs(10.0, 11.0, 8.0, overhead=3.0, **dict.fromkeys(SHARES, 0.4))
    dice, compared = Random(6), 0
    tables = [interleaved(4, 16, 4), *(x for p in (2, 3, 4) for v in (1, 2) for x in fixed(p, dice.randint(p, 9), v))]
    for table in tables:
        try:
            made = pairs(table, costs, tries=8)
        except ScheduleError:  # no pair makes it shorter
            continue
        time = simulate(made, costs)
        bound = paired_bound(made, costs, max(time.peak))
        assert bound is not None
        assert bound <= time.makespan * (1 + 1e-9)
        compared += 1
    assert compared > 10
