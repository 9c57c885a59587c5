"""The search: optimal where the papers' patterns are, never worse than they, within memory, above the bound."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from time import process_time

import pytest

from megapipe.schedule import ScheduleError, loop, vee
from megapipe.schedule.core.bound import lower_bound
from megapipe.schedule.costs import Costs
from megapipe.schedule.generators.blocks import v_half, v_min
from megapipe.schedule.generators.classic import zb_h1, zb_h2
from megapipe.schedule.generators.interleaved import interleaved_zb
from megapipe.schedule.generators.zb_v import zb_v
from megapipe.schedule.patterns import fixed
from megapipe.schedule.search.auto import search, zb_auto
from megapipe.schedule.simulate import simulate
from megapipe.schedule.verify import verify

ROOT = Path(__file__).parents[3]

NIGHTLY = bool(os.environ.get("MEGAPIPE_NIGHTLY"))  # scripts/nightly.sh searches longer
UNEVEN = Costs(
    f=(5.0, 6.0, 4.0, 5.0, 5.0, 7.0, 4.0, 5.0), b=(6.0, 7.0, 5.0, 6.0, 6.0, 8.0, 5.0, 5.0), w=(4.0,) * 8, comm=0.3
)


@pytest.mark.parametrize("objective", ["makespan", "period"])
@pytest.mark.parametrize(("f", "b", "w"), [(1.0, 1.0, 1.0), (10.0, 14.0, 7.0), (10.0, 11.0, 8.0), (5.0, 4.0, 6.0)])
def test_one_chunk_of_uniform_stages_meets_the_bound(f: float, b: float, w: float, objective: str) -> None:
    p, m = 4, 8
    found = search(p, m, placement="loop", chunks=1, costs=Costs(f, b, w), objective=objective, effort=2.0)
    best = m * (f + b + w) + (p - 1) * max(b, f + max(0, b - w)) if objective == "makespan" else found.bound
    assert (found.makespan if objective == "makespan" else found.period) == pytest.approx(best)
    assert found.bound == pytest.approx(best)


def test_zb_v_has_no_bubble_at_equal_costs() -> None:
    assert search(4, 12, placement="v", objective="period", effort=0.1).period == 36


@pytest.mark.parametrize(
    ("placement", "chunks", "peers"),
    [
        ("loop", 1, (zb_h1, zb_h2)),
        ("loop", 2, (lambda p, m: interleaved_zb(p, m, 2),)),
        ("loop", 4, (lambda p, m: interleaved_zb(p, m, 4),)),
        ("v", 2, (zb_v, v_half, v_min)),
    ],
)
@pytest.mark.parametrize("memory", [2.0, 3.0, 4.0, 7.0])
def test_never_worse_than_a_peer_of_the_same_memory(placement, chunks, peers, memory) -> None:
    costs = Costs(10.0, 14.0, 7.0, comm=0.5)
    found = search(4, 7, placement=placement, chunks=chunks, costs=costs, memory=memory, effort=0.05)
    verify(found.schedule, memory=memory, costs=costs)
    for peer in peers:
        timeline = simulate(peer(4, 7), costs)
        if max(timeline.peak) <= memory:
            assert found.makespan <= timeline.makespan + 1e-9


@pytest.mark.parametrize("objective", ["makespan", "period"])
@pytest.mark.parametrize("memory", [1.0, 1.5, 2.0, 4.0])
@pytest.mark.parametrize("place", [loop(4), loop(4, 2), vee(4)])
def test_the_bound_is_below_every_schedule(place, memory, objective) -> None:
    costs = UNEVEN if place.chain == 8 else Costs(10.0, 12.0, 5.0, comm=1.0, mem_b=1.0, mem_w=0.5)
    chunks = place.num_stages // 4
    found = search(
        4,
        6,
        placement="v" if place == vee(4) else "loop",
        chunks=chunks,
        costs=costs,
        memory=memory,
        objective=objective,
        effort=0.1 if NIGHTLY else 0.02,
    )
    verify(found.schedule, memory=memory, costs=costs)
    assert found.bound == lower_bound(place, 6, costs, memory, objective)
    assert found.distance >= -1e-9


def test_bounds_are_those_computed_for_the_table_of_known_schedules() -> None:
    long, real = Costs(10.0, 14.0, 7.0), Costs(10.0, 11.0, 8.0)
    bounds = {
        (vee(4), 8, long, 3): 282.5,
        (vee(4), 8, long, 2): 299.5,
        (vee(8), 16, long, 6): 575.5,
        (vee(8), 16, long, 5): 592.5,
        (vee(8), 16, long, 4): 609.5,
        (vee(8), 16, real, 4): 553.0,
        (loop(8, 2), 16, real, 8): 502.5,
        (loop(4, 2), 8, long, 4): 269.0,
    }
    assert {key: lower_bound(*key, "makespan") for key in bounds} == bounds


def test_a_second_of_search_beats_every_pattern_below_their_memory() -> None:
    """The best peer takes 375 here, annealing for minutes 345.5."""
    costs = Costs(10.0, 14.0, 7.0)
    assert search(4, 8, placement="v", costs=costs, memory=2, effort=1.0).makespan < 360


def test_each_rank_has_its_own_limit() -> None:
    limits = (1.0, 2.0, 3.0, 1.5)
    found = search(4, 8, placement="v", memory=limits, effort=0.2)
    peaks = simulate(found.schedule).peak
    assert all(peak <= limit for peak, limit in zip(peaks, limits, strict=True))


def test_the_same_arguments_give_the_same_schedule() -> None:
    def once() -> object:
        return zb_auto(4, 9, costs=UNEVEN, memory=3, effort=0.2)

    assert once() == once()


def test_a_microbatch_more_costs_no_more_where_many_are_unrolled_from_few() -> None:
    costs = Costs(10.0, 14.0, 7.0)
    few, many = (search(2, m, placement="v", costs=costs, memory=1.5, effort=0.3) for m in (6, 40))
    verify(many.schedule, memory=1.5, costs=costs)
    assert many.makespan / 40 < few.makespan / 6


def test_any_number_of_ranks_and_microbatches() -> None:
    for p in (1, 2, 3, 5):
        for m in (1, 2, 7) if p < 5 else (3,):
            verify(zb_auto(p, m, effort=0.02), memory=p)


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"memory": 0.5}, "zb-auto cannot run in memory 0.5: rank 0 needs 1 for one microbatch. Use --memory 1."),
        ({"memory": (1.0, 2.0)}, "zb-auto takes one memory limit or one for each of 4 ranks, not 2."),
        ({"placement": "mirror"}, 'zb-auto has the placements "loop" and "v", not "mirror".'),
        ({"objective": "speed"}, 'zb-auto has the objectives "makespan" and "period", not "speed".'),
        ({"placement": "v", "chunks": 4}, "zb-auto cannot cut a v in 4 chunks per rank; a V has 2."),
        ({"costs": Costs(f=(1.0, 2.0, 3.0))}, "Costs.f names 3 stages, but the model is cut in 8."),
    ],
)
def test_what_cannot_be_is_refused_in_one_line(arguments, text) -> None:
    with pytest.raises(ScheduleError) as error:
        zb_auto(4, 8, effort=0.1, **arguments)
    assert str(error.value) == text


def test_the_bench_prints_its_table() -> None:
    command = [sys.executable, ROOT / "tools/bench/search.py", "--effort", "0.01", "--only", "0", "12"]
    lines = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
    assert lines[0].endswith("peer    ours   known   bound closed seconds")
    assert [line.split()[:5] for line in lines[1:-1]] == [["0", "v", "2", "4", "8"], ["12", "v", "2", "4", "8"]]
    assert re.fullmatch(r"[0-2] of 2 at two thirds of the way or more, [0-2] at the best known", lines[-1])


@pytest.mark.parametrize("memory", [3.0, 5.0])
@pytest.mark.parametrize("costs", [Costs(10.0, 14.0, 7.0, comm=0.5), Costs(1.0, 1.0, 1.0, comm=0.2, overhead=0.4)])
def test_never_worse_than_any_schedule_of_the_catalogue_that_fits(costs, memory) -> None:
    """With an overhead per pass a whole backward, which pays it once, may be best: then it is what is returned."""
    found = search(4, 6, costs=costs, memory=memory, effort=0.05)
    assert max(simulate(found.schedule, costs).peak) <= memory
    for made in (x for chunks in (1, 2, 4) for x in fixed(4, 6, chunks, costs)):
        time = simulate(made, costs)
        if max(time.peak) <= memory and made.placement in (vee(4), *(loop(4, v) for v in (1, 2, 4))):
            assert found.makespan <= time.makespan + 1e-9, made.name


def test_an_overhead_per_pass_makes_four_chunks_cost_what_they_cost() -> None:
    """Free passes: four chunks have the shortest ramps. At 5% of F each, fewer chunks are faster."""
    chunks = [
        search(4, 8, costs=Costs(10.0, 11.0, 8.0, overhead=o), effort=0.05).schedule.placement.num_stages // 4
        for o in (0.0, 1.0)
    ]
    assert chunks[0] == 4
    assert chunks[1] < 4


def test_a_search_ends_when_its_seconds_of_cpu_are_over() -> None:
    began = process_time()
    found = search(4, 8, placement="v", costs=Costs(10, 14, 7), memory=3, effort=1000, seconds=0.2)
    assert process_time() - began < 10  # patterns and checks come beside
    assert found.makespan <= 298  # the best pattern


def test_of_equally_fast_tables_it_takes_the_one_that_holds_less() -> None:
    # A head worth all other stages together: any order that keeps its rank busy is optimal.
    costs = Costs((3.0, 3.0, 2.0, 10.0), (3.0, 3.0, 2.0, 10.0), (3.0, 3.0, 2.0, 10.0))
    found = search(4, 8, costs=costs, chunks=1, effort=0.5)
    known = simulate(zb_h1(4, 8), costs)
    assert found.makespan == found.bound == known.makespan
    assert sum(simulate(found.schedule, costs).peak) <= sum(known.peak)


@pytest.mark.parametrize(
    ("costs", "memory", "objective"),
    [
        (Costs(10.0, 14.0, 7.0, comm=0.5), 2.0, "makespan"),
        (Costs(1.0, 1.0, 1.0, comm=0.2, overhead=0.4), 3.0, "period"),
        (Costs(9.0, 8.0, 12.0, overhead=3.0), 6.0, "makespan"),
    ],
)
def test_large_tables_are_never_worse_than_the_catalogue_though_few_of_it_are_made(costs, memory, objective) -> None:
    p, m = 3, 345  # 4,140 forwards in four chunks
    found = search(p, m, chunks=4, costs=costs, memory=memory, objective=objective, effort=0.05)
    verify(found.schedule, memory=memory, costs=costs)
    for made in fixed(p, m, 4, costs, loop(p, 4)):
        time = simulate(made, costs)
        if max(time.peak) <= memory:
            assert getattr(found, objective) <= getattr(time, objective) + 1e-9, made.name


def test_a_search_of_a_large_table_ends_soon_after_its_seconds_of_cpu() -> None:
    """The catalogue in full was made twice and played up to nine times, 12 s and more, whatever the seconds."""
    began = process_time()
    found = search(16, 128, costs=Costs(10, 11, 8, overhead=0.2), seconds=0.1)
    assert process_time() - began < 6
    assert found.makespan < (128 + 15) * (10 + 11 + 8 + 2 * 0.2)  # 1F1B's: F and BW each have one overhead
