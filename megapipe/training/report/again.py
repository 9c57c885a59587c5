"""Predict a step again from the measured passes of the first steps, in place of their FLOPs.

The simulator replays each of these steps with the passes' own times. So a stage that takes longer
than its FLOPs say, a late message, the host between two passes, and passes that vary are counted.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import chain
from statistics import mean

from megapipe.schedule import Costs, Pass, Schedule, simulate
from megapipe.schedule.measured.costs import StepsRan, arrivals, measured_costs, spent

DIFFERS = 0.02
"""Least difference of two predicted bubbles, as shares of the passes' time, that is told."""
_WAITS = 1e-4
"""Seconds from which a pass that asks for a message is said to wait for it."""


@dataclass(frozen=True)
class Again:
    """A prediction of a step from measured passes.

    Attributes:
        costs: the medians of the measured passes, and the mean time of a message, in seconds.
        schedule: the table of the measured steps.
        passes: seconds from the first pass to the last, as the mean of the replayed steps.
        bubble: the largest idle share of a rank in that time, with the host's time.
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
        """Return (passes, bubble) of a table of the same stages, such as for another batch size."""
        if schedule is self.schedule:
            return self.passes, self.bubble
        return _played(schedule, self.costs, {})


def predict_again(
    steps: StepsRan,
    counted: Costs,
    schedule: Schedule,
    seconds: Sequence[float],
    copies: StepsRan = (),
) -> Again:
    """Return the prediction of a step from measured ones under the same table.

    Args:
        steps: [step][pipeline rank] -> the measured passes.
        counted: the plan's costs, which divide a fused backward into B and W.
        seconds: the duration of each step so far but the first, from its samples to its update.
        copies: [step][pipeline rank] -> the measured copies O and L; empty without any.
    """
    costs = measured_costs(steps, schedule.placement, counted, schedule.cuts, copies)
    costs = replace(costs, comm=_with_late(costs.comm, steps, schedule))
    played = []
    for step in steps:
        took = {}
        for x in chain.from_iterable(step):
            # V computes next to nothing: its time is a wait for other ranks.
            if not x.item.kind.traits.border:
                took[x.item] = x.end - x.begin + costs.overhead
        played.append(_played(schedule, costs, took))
    passes, bubbles = zip(*played, strict=True)
    measured = mean(max(spent(row).makespan for row in step) for step in steps)
    outside = max(0.0, mean(seconds) - measured)
    return Again(costs, schedule, mean(passes), mean(bubbles), outside)


def _played(schedule: Schedule, costs: Costs, took: dict[Pass, float]) -> tuple[float, float]:
    """Return (seconds of the passes, bubble) of a simulated step.

    Args:
        took: seconds of single passes, with the host's time before each.
    """
    timeline = simulate(schedule, costs, took)
    # The host's time between two passes is no work: a measured bubble has it too.
    idle = []
    for row, span, busy in zip(schedule.ranks, timeline.span, timeline.busy, strict=True):
        idle.append(span - busy + max(0, len(row) - 1) * costs.overhead)
    return timeline.makespan, max(idle) / (timeline.makespan or 1.0)


def _with_late(
    comm: float | tuple[float, ...], steps: StepsRan, schedule: Schedule
) -> float | tuple[float, ...]:
    """Return the times of messages with the mean delay of those that a pass waited for.

    `measured_costs` has the least time of a message on each link. A step ends later by the others.

    Args:
        comm: the least time on each link, in seconds.
    """
    if not isinstance(comm, tuple):
        return comm
    lags: dict[tuple[int, int], list[float]] = defaultdict(list)
    least: dict[tuple[int, int], float] = {}
    for step in steps:
        for link, lag, waited in arrivals(step, schedule.placement):
            least[link] = min(lag, least.get(link, lag))
            if waited >= _WAITS:
                lags[link].append(lag)
    # Only differences on one link count, in which the clocks of two hosts cancel.
    late: dict[tuple[int, int], list[float]] = defaultdict(list)
    for (one, two), row in lags.items():
        late[min(one, two), max(one, two)] += [lag - least[one, two] for lag in row]
    ranks = len(schedule.ranks)
    found = []
    for rank, seconds in enumerate(comm):
        after = (rank + 1) % ranks
        found.append(seconds + mean(late[min(rank, after), max(rank, after)] or [0.0]))
    return tuple(found)
