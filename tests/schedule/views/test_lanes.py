"""The lanes of a step: every piece of its passes is there once, on its lane, and what is exposed is what is left."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from itertools import pairwise
from xml.etree import ElementTree

import pytest

from megapipe.schedule import Costs, Kind, Schedule, build, simulate, unpaired
from megapipe.schedule.costs import ATTENTION, SHARES
from megapipe.schedule.families.offload.copies import with_offload
from megapipe.schedule.shapes.pairs.pairs import pairs
from megapipe.schedule.shapes.slices.slices import slices
from megapipe.schedule.views.draw import to_svg
from megapipe.schedule.views.lanes import ARITHMETIC, LINK, communication, copied, stretches
from megapipe.schedule.views.perfetto import to_perfetto
from megapipe.schedule.views.terminal import facts

COSTS = replace(Costs(10, 11, 8), **dict.fromkeys(SHARES, 0.25))
TABLES = [build("dualpipe-v", 4, 9), pairs(build("interleaved-zb", 4, 8, chunks=2), COSTS), build("zb-h1", 3, 5)]


@pytest.mark.parametrize("piece", [0.0, 0.4])
@pytest.mark.parametrize("table", TABLES, ids=lambda table: table.name)
def test_lanes_of_a_rank_have_all_its_work_and_no_two_pieces_at_a_time(table: Schedule, piece: float) -> None:
    costs = replace(COSTS, piece=piece, overhead=0.5)
    time = simulate(table, costs)
    for rank in range(len(table.ranks)):
        parts = list(stretches(table, costs, time, rank))
        for lane, share in ((ARITHMETIC, 0.75), (LINK, 0.25)):
            mine = sorted((x.start, x.end) for x in parts if x.stream == lane)
            assert all(a[1] <= b[0] + 1e-9 for a, b in pairwise(mine))
            assert sum(end - start for start, end in mine) == pytest.approx(share * 29 * table.num_microbatches)
        assert all(time.start[x.item] <= x.start <= x.end <= time.end[x.item] + 1e-9 for x in parts)


def test_copies_that_are_back_in_time_are_not_exposed_and_others_for_as_long_as_they_are_late() -> None:
    costs = Costs(1.0, 1.0, 1.0, o=2.0, l=3.0)
    alone = with_offload(build("1f1b", 1, 1), costs, chosen={(0, 0)})
    assert copied(alone, costs, simulate(alone, costs)) == [(2.0, 3.0, 5.0)]
    table = with_offload(build("1f1b", 4, 8), costs)
    ranks = copied(table, costs, simulate(table, costs))
    assert [rank.exposed for rank in ranks] == [0.0] * 4
    moved = [sum(x.kind is Kind.O for step in row for x in step) for row in table.ranks]
    assert [(rank.out, rank.back) for rank in ranks] == [(2.0 * n, 3.0 * n) for n in moved]
    late = replace(costs, l=3.5)
    found = copied(table, late, simulate(table, late))
    assert sum(rank.exposed for rank in found) > 0


@pytest.mark.parametrize("table", TABLES, ids=lambda table: table.name)
def test_what_is_exposed_is_what_pairs_do_not_save(table: Schedule) -> None:
    """Alone a pass hides nothing, so that a pair hides what it takes less than its two passes."""
    place = table.placement
    saved = sum(
        sum(COSTS.of_step((x,), place) for x in step) - COSTS.of_step(step, place)
        for row in table.ranks
        for step in row
    )
    found = communication(table, COSTS)
    assert found.total == pytest.approx(0.25 * 29 * table.num_microbatches * len(table.ranks))
    assert found.exposed == pytest.approx(found.total - saved)
    assert communication(unpaired(table), COSTS).share == 1.0


def test_communication_of_slices_is_that_of_the_documents_of_their_own_microbatch() -> None:
    """Each slice was counted as one of microbatch 0."""
    costs = replace(COSTS, f=1.0, b=1.0, w=1.0, **dict.fromkeys(ATTENTION, 1.0))
    table = slices(lambda m: build("1f1b", 1, m), 2, (1.0, 1.0), costs, documents=((1,), ()))
    # Attention alone: a document of half the length takes a quarter. Two of them, then one of the whole length.
    work = 3 * (2 * 0.5**2 + 1)
    assert communication(table, costs).total == pytest.approx(0.25 * work)


def test_a_table_is_told_how_much_of_its_communication_is_exposed() -> None:
    *_, line = facts(build("zb-h1", 2, 4), COSTS, None)
    assert line == "communication within passes: 58 over all ranks, 100.0% of it exposed"
    assert len(facts(build("zb-h1", 2, 4), Costs(10, 11, 8), None)) == 5


def test_the_pictures_have_the_pieces_of_both_lanes() -> None:
    table = TABLES[0]
    time = simulate(table, COSTS)
    picture = ElementTree.fromstring(to_svg(table, COSTS))
    lanes = [g for g in picture.iter("{http://www.w3.org/2000/svg}g") if g.get("class") == "s"]
    assert [g[0].text for g in lanes] == [ARITHMETIC, LINK] * 4
    plot = float(lanes[0][1].get("width") or 0)
    for n, lane in enumerate(lanes):
        drawn = [(box[0].text, float(box.get("x") or 0)) for box in lane[2:]]
        parts = [x for x in stretches(table, COSTS, time, n // 2) if x.stream == lane[0].text]
        assert [name for name, _ in drawn] == [str(x.item) for x in parts]
        assert [x for _, x in drawn] == pytest.approx([x.start * plot / time.makespan for x in parts], abs=0.051)
    assert 'class="s"' not in to_svg(table, Costs(10, 11, 8))


def test_perfetto_has_tracks_of_their_own_for_them() -> None:
    table = TABLES[0]
    events = json.loads(to_perfetto(table, COSTS))["traceEvents"]
    names = {e["tid"]: e["args"]["name"] for e in events if e["name"] == "thread_name"}
    parts = [e for e in events if e.get("cat") in (ARITHMETIC, LINK)]
    assert len(parts) == sum(len(list(stretches(table, COSTS, simulate(table, COSTS), rank))) for rank in range(4))
    assert {names[e["tid"]] for e in parts} == {f"rank {r} {lane}" for r in range(4) for lane in (ARITHMETIC, LINK)}
    assert all(re.fullmatch(r"rank \d " + e["cat"], names[e["tid"]]) for e in parts)
