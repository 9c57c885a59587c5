"""Predict a step again from the measured passes of the first steps, in place of their FLOPs.

A single slow step must not spoil the prediction of all later ones, so medians over the steps count.
The simulator replays each of these steps with the passes' own times. So a stage that takes longer
than its FLOPs say, a late message, the host between two passes, and passes that vary are counted.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from statistics import mean, median

from megapipe.schedule import Costs, Pass, Placement, Schedule, simulate
from megapipe.schedule.measured.costs import (
    StepsRan,
    arrivals,
    host_times,
    links,
    measured_costs,
    spent,
)

DIFFERS = 0.02
"""Least difference of two predicted bubbles, as shares of the passes' time, that is reported."""
MEASURED = 5
"""Steps that must be measured before a step is predicted from them."""
_WAITS = 1e-4
"""Seconds from which a pass that asks for a message is said to wait for it."""


@dataclass(frozen=True)
class Again:
    """A prediction of a step from measured passes.

    `step` is the time of a whole step, `of_table` the prediction for another table.

    Attributes:
        costs: the medians of the measured passes and messages, in seconds.
        schedule: the table of the measured steps.
        passes: seconds from the first pass to the last. Each measured step is simulated with its
            own passes' times, and the median over these simulations counts.
        bubble: the share of these seconds in which the most idle rank is idle, also a median. Time
            in which the host prepares a pass counts as idle.
        outside: seconds of a step outside its passes: samples, gradient sums, norm, update.
    """

    costs: Costs
    schedule: Schedule
    passes: float
    bubble: float
    outside: float

    @property
    def step(self) -> float:
        """Return the predicted seconds of a step."""
        return self.passes + self.outside

    def of_table(self, schedule: Schedule) -> tuple[float, float]:
        """Return (seconds from the first pass to the last, bubble), predicted for another table.

        The bubble is a share of these seconds. The table must have the same stages, but may have
        another batch size or order of passes.
        """
        if schedule is self.schedule:
            return self.passes, self.bubble
        return _played(schedule, self.costs, {}, {})


def predict_again(
    steps: StepsRan,
    counted: Costs,
    schedule: Schedule,
    seconds: Sequence[float],
    copies: StepsRan = (),
) -> Again:
    """Return the prediction of a step from measured steps under the same table.

    Args:
        steps: [step][pipeline rank] -> the measured passes.
        counted: the plan's costs, which divide a fused backward into B and W.
        seconds: the duration of each step so far but the first, from its samples to its update.
        copies: [step][pipeline rank] -> the measured copies O and L; empty without any.
    """
    place = schedule.placement
    costs = measured_costs(steps, place, counted, schedule.cuts, copies)
    hosts = [host_times(step) for step in steps]
    costs = replace(costs, comm=_messages(steps, hosts, place))
    played = []
    for step, host in zip(steps, hosts, strict=True):
        took = {}
        for x in chain.from_iterable(step):
            # V computes next to nothing: its time is a wait for other ranks.
            if not x.item.kind.traits.border:
                took[x.item] = x.end - x.begin + host[x.item]
        played.append(_played(schedule, costs, took, host))
    passes, bubbles = zip(*played, strict=True)
    measured = median(max(spent(row).makespan for row in step) for step in steps)
    outside = max(0.0, median(seconds) - measured)
    return Again(costs, schedule, median(passes), median(bubbles), outside)


def _played(
    schedule: Schedule, costs: Costs, took: Mapping[Pass, float], host: Mapping[Pass, float]
) -> tuple[float, float]:
    """Return (seconds from the first pass to the last, bubble) of a simulated step.

    The bubble is a share of these seconds.

    Args:
        took: {pass: its measured seconds, with the host's time before it}, in place of the costs.
        host: {pass: the host's seconds before it}, which are idle time of the device.
    """
    timeline = simulate(schedule, costs, took)
    # The host's time between two passes is no work: a measured bubble has it too.
    idle = []
    for row, span, busy in zip(schedule.ranks, timeline.span, timeline.busy, strict=True):
        between = sum(host.get(step[0], costs.overhead) for step in row[1:])
        idle.append(span - busy + between)
    return timeline.makespan, max(idle) / (timeline.makespan or 1.0)


def _messages(
    steps: StepsRan, hosts: Sequence[Mapping[Pass, float]], place: Placement
) -> float | tuple[float, ...]:
    """Return the time of a message on each link, in seconds: the median over the steps.

    A step has the mean of its messages. Only messages that a pass waited for show their time. A
    link without such a message gets the shortest time between the end of a sending pass and the
    start of the receiving pass.

    Args:
        steps: [step][pipeline rank] -> the measured passes.
        hosts: for each step the host's time before each pass. The simulator adds it to the pass.
        place: the rank of each stage.
    """
    # For each link the mean of each step in which a pass waited for one of its messages.
    late: dict[tuple[int, int], list[float]] = defaultdict(list)
    least: dict[tuple[int, int], float] = {}
    for step, host in zip(steps, hosts, strict=True):
        of_step: dict[tuple[int, int], list[float]] = defaultdict(list)
        for link, x, lag in arrivals(step, place):
            took = lag - host[x.item]
            least[link] = min(took, least.get(link, took))
            if x.waited >= _WAITS:
                of_step[link].append(took)
        for link, times in of_step.items():
            late[link].append(mean(times))
    found = []
    for ends in links(place.num_ranks):
        ways = [way for way in (ends, ends[::-1]) if way in least]
        # The difference of two hosts' clocks is in both ways, with opposite signs.
        both = [median(late.get(way) or [least[way]]) for way in ways]
        found.append(max(0.0, mean(both or [0.0])))
    return tuple(found) or 0.0
