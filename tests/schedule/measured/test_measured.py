"""What was measured is what it was made of: simulated steps under known costs, written down as clocks would."""

from dataclasses import replace

import pytest

from megapipe.schedule import Costs, Kind, build, simulate
from megapipe.schedule.families.offload.copies import with_offload
from megapipe.schedule.measured.costs import MeasuredPass, measured_costs


def ran(schedule, costs, ahead):
    """A step as each rank's clock shows it; rank r's is `ahead[r]` seconds ahead. The overhead is before a pass."""
    time = simulate(schedule, costs)
    return [
        [MeasuredPass(x, time.start[x] + costs.overhead + a, time.end[x] + a) for step in row for x in step]
        for row, a in zip(schedule.ranks, ahead, strict=True)
    ]


@pytest.mark.parametrize("name", ["1f1b", "zb-h1", "zb-v"])
def test_costs_of_stages_links_and_host_come_back_whatever_the_clocks_say(name):
    schedule = build(name, 4, 12)
    n = schedule.placement.chain
    f, b, w = (tuple(base + 0.1 * s for s in range(n)) for base in (1.0, 1.5, 0.5))
    known = Costs(f, b, w, comm=(0.2, 0.3, 0.4, 0.0), overhead=0.05)
    found = measured_costs([ran(schedule, known, (0.0, 7.0, -3.0, 0.5))] * 2, schedule.placement, known)
    assert (found.f, found.b, found.w) == (pytest.approx(f), pytest.approx(b), pytest.approx(w))
    assert found.overhead == pytest.approx(0.05)
    assert found.comm == pytest.approx((0.2, 0.3, 0.4, 0.0))


def test_copies_come_back_too_and_where_none_was_timed_as_many_bytes_take_as_long():
    """The last stage of 1F1B copies nothing, as its backward follows at once."""
    known = Costs((1.0,) * 3, (1.0,) * 3, (1.0,) * 3, o=(0.2, 0.4, 0.3), l=(0.1, 0.2, 0.3))
    schedule = with_offload(build("1f1b", 3, 6), known)
    assert {x.stage for row in schedule.ranks for step in row for x in step if x.kind is Kind.O} == {0, 1}
    rows = ran(schedule, known, (0.0, 2.0, 1.0))
    passes, copies = (
        [[x for x in row if (x.item.kind in (Kind.O, Kind.L)) is of] for row in rows] for of in (False, True)
    )
    counted = replace(known, o=(2.0, 4.0, 3.0), l=(2.0, 4.0, 3.0))
    found = measured_costs([passes], schedule.placement, counted, copies=[copies])
    assert (found.o, found.l) == (pytest.approx((0.2, 0.4, 0.3)), pytest.approx((0.1, 0.2, 0.15)))
    assert (found.f, found.overhead) == (pytest.approx(known.f), pytest.approx(0.0))


def test_an_overlapped_pair_has_one_gap_before_it_when_it_is_measured_and_when_it_is_simulated():
    """It was simulated with two: 25.6 for a step of 24.2."""
    schedule = build("dualpipe-v", 2, 8)
    known = Costs((0.25,) * 4, (0.3,) * 4, (0.2,) * 4, fb=1.25, comm=(0.0, 0.0), overhead=0.05)
    found = measured_costs([ran(schedule, known, (0.0, 3.0))], schedule.placement, known)
    assert found.fb == pytest.approx(1.25)
    assert found.overhead == pytest.approx(0.05)
    assert simulate(schedule, found).makespan == pytest.approx(simulate(schedule, known).makespan)
    pairs = sum(len(step) == 2 for step in schedule.ranks[0])
    singles = [x for step in schedule.ranks[0] if len(step) == 1 for x in step]
    work = sum(known.of_step((x,), schedule.placement) for x in singles) + pairs * (1.25 / 2 + 0.05)
    assert simulate(schedule, known).busy[0] == pytest.approx(work)
