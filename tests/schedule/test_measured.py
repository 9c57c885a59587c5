"""What was measured is what it was made of: simulated steps under known costs, written down as clocks would."""

import pytest

from megapipe.schedule import Costs, build, simulate
from megapipe.schedule.measured import Ran, measured_costs


def ran(schedule, costs, ahead):
    """A step as each rank's clock shows it; rank r's is `ahead[r]` seconds ahead. The overhead is before a pass."""
    time = simulate(schedule, costs)
    return [
        [Ran(x, time.start[x] + costs.overhead + a, time.end[x] + a) for (x,) in row]
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
