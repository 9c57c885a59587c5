"""Code of the search in C: what it finds takes the time and memory that Python counts, to the bit."""

from __future__ import annotations

import os
from dataclasses import replace
from math import inf
from pathlib import Path
from random import Random

import pytest

from megapipe.schedule import Placement, loop, simulate, unpaired, vee, verify
from megapipe.schedule.core.compiled import compiled_fill, library
from megapipe.schedule.core.fit import fill_weights
from megapipe.schedule.core.orders import clock, fits, length, problem
from megapipe.schedule.costs import Costs
from megapipe.schedule.patterns import fixed
from megapipe.schedule.search import auto
from megapipe.schedule.search.anneal import Cooling, anneal
from megapipe.schedule.search.seeds import patterns
from megapipe.schedule.shapes.pairs.manner import GRID, changed
from megapipe.schedule.shapes.pairs.pairs import limits_in_pairs
from megapipe.schedule.shapes.pairs.played import compiled_play
from megapipe.schedule.shapes.pairs.together import Play
from tools.proofs.tables.paired import drawn, drawn_costs

compiled = pytest.mark.skipif(library() is None, reason="no C compiler here")


def uneven(chain: int, dice: Random) -> Costs:
    f, b, w, held = (tuple(dice.uniform(0.5, 1.5) for _ in range(chain)) for _ in range(4))
    return Costs(f, b, w, comm=dice.choice((0.0, 0.3)), mem_b=held, mem_w=tuple(x * 0.4 for x in held))


@compiled
@pytest.mark.parametrize("period", [False, True])
@pytest.mark.parametrize("place", [loop(3), loop(4, 2), loop(2, 4), vee(4)])
def test_orders_that_c_anneals_take_the_time_and_memory_that_python_counts(place: Placement, period: bool) -> None:
    shorter = 0
    for seed in range(3):
        dice = Random(seed)
        costs = uneven(place.chain, dice) if seed else Costs(10.0, 14.0, 0.0, comm=0.5)
        of = problem(place, 7, costs, (dice.uniform(4, 9),) * place.num_ranks, period)
        start, _ = patterns(of)[-1]
        cooling = Cooling(5000, dice.choice((0.4, 2.0)), 0.02, dice.choice((0.05, 4.0)))
        found = anneal(of, start, cooling, seed, 0.0)
        assert found == anneal(of, start, cooling, seed, 0.0)
        assert clock(of, found.orders) == found.end
        assert length(of, found.orders, found.end) == found.length <= start.length
        assert fits(of, found.orders)
        assert [sorted(order) for order in found.orders] == [sorted(order) for order in start.orders]
        shorter += found.length < start.length
    assert shorter > 0


@compiled
@pytest.mark.parametrize("place", [loop(3), loop(4, 2), vee(4)])
def test_c_fills_waits_with_w_as_python_does(place: Placement) -> None:
    results = set()
    for seed in range(8):
        dice = Random(seed)
        of = problem(place, 7, uneven(place.chain, dice), (dice.uniform(2, 9),) * place.num_ranks, False)
        for order, _ in patterns(replace(of, memory=(inf,) * place.num_ranks)):
            bare = [[x for x in row if x // of.microbatches % 3 != 2] for row in order.orders]
            fill = compiled_fill(of, bare)
            assert fill is not None
            for patience in (0.0, 0.3, 1.0):
                filled = fill_weights(of, bare, patience)
                assert fill(patience) == filled
                results.add(filled is None)
    assert results == {True, False}


@compiled
def test_c_plays_pairs_as_python_does() -> None:
    """tools/proofs/tables/paired.py draws the tables and costs."""
    dice, blocked = Random(3), 0
    for _ in range(30):
        if (table := drawn(dice)) is None:
            continue
        costs, split = drawn_costs(dice), dice.random() < 0.5
        limits = limits_in_pairs(unpaired(table), costs, dice.choice((None, dice.uniform(1, 12))))
        in_c, in_python = (
            compiled_play(unpaired(table), costs, limits, split),
            Play(unpaired(table), costs, limits, split),
        )
        assert in_c is not None
        manner = dice.choice(GRID)
        for _ in range(2):
            manner = changed(manner, len(limits), dice)
            here, there = in_python.timed(manner), in_c(manner)
            blocked += here is None
            assert (here and (here[0], here[1]())) == (there and (there[0], there[1]()))
    assert 0 < blocked < 20


@compiled
def test_a_third_of_a_second_of_moves_finds_what_minutes_in_python_do() -> None:
    """V-Half takes 375 in memory 2; minutes of annealing in Python, of an earlier version, found 345.5."""
    found = auto.search(4, 8, placement="v", costs=Costs(10.0, 14.0, 7.0), memory=2, effort=0.4)
    assert found.makespan <= 345.5


def test_without_a_compiler_the_search_goes_on_in_python(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("CC", "no-such-compiler")
    assert library.__wrapped__() is None
    monkeypatch.setenv("CC", "false")  # one that fails
    assert library.__wrapped__() is None
    assert os.listdir(tmp_path / "megapipe") == []


@compiled
def test_one_process_compiles_for_all_later_ones(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert library.__wrapped__() is not None
    monkeypatch.setenv("CC", "no-such-compiler")
    assert library.__wrapped__() is not None
    assert (tmp_path / "megapipe").stat().st_mode & 0o777 == 0o700


def test_without_a_compiler_a_search_is_the_best_known_order_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    costs = Costs(10.0, 14.0, 7.0)
    monkeypatch.setattr("megapipe.schedule.search.anneal.library", lambda: None)
    monkeypatch.setattr("megapipe.schedule.search.auto.library", lambda: None)
    found = auto.search(4, 7, costs=costs, memory=3, effort=0.1)
    verify(found.schedule, memory=3, costs=costs)
    for table in fixed(4, 7, 1, costs):
        time = simulate(table, costs)
        assert found.makespan <= time.makespan or max(time.peak) > 3
    assert any("no C compiler" in line for line in auto.describe_search(found.schedule, costs, 3, "makespan"))
