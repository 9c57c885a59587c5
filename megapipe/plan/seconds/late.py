"""Predict the seconds of a step that no barrier ends: --enable-optimizer-post-validation.

A rank then updates after its own gradients, and begins the next step while others still end this
one (Qi et al. 2023, "Zero Bubble Pipeline Parallelism", sec. 4). So a step takes the time from its
end to the end of the next one, after some steps. Under 1F1B that is no gain, as rank 0 begins first
and ends last. Under schedules whose ranks all work for as long, such as zb-h2, it is.
"""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from typing import Any, NamedTuple

from megapipe.config import Config
from megapipe.plan.plan import Plan
from megapipe.plan.recipes import whole_step
from megapipe.plan.seconds.device import Device
from megapipe.plan.seconds.replicas import after_passes
from megapipe.plan.seconds.update import update_of
from megapipe.schedule import Costs, Schedule
from megapipe.schedule.passes import repeated
from megapipe.schedule.simulate import SimulatedTimes, run_clock, uncollected

_STEPS = 4
"""Steps that are simulated one after another. The first two fill the pipeline."""
LATE = (
    "without a barrier: the seconds from the end of a step to the end of the next, assumed that no "
    "update is undone, and that nothing else, such as a save, comes between steps"
)
"""What the seconds of such a step mean."""


class LateParts(NamedTuple):
    """Seconds by which the end of a step makes each of many steps longer.

    Attributes:
        sums: of gradients, with gathers of updated weights.
        updated: of updates.
    """

    sums: float
    updated: float


def is_late(config: Config) -> bool:
    """Return whether no barrier ends a step of the run."""
    return config.parallel.enable_optimizer_post_validation


def took(table: Schedule, config: Config, costs: Costs, clock: SimulatedTimes) -> float:
    """Return the seconds that the passes of one of many steps take.

    Args:
        table: the passes of a step, without its end.
        clock: their times in a step that begins on all ranks at once.
    """
    if is_late(config):
        return _each(_several(table, config, costs), costs)
    return max(map(max, clock.end))


def late_parts(
    plan: Plan,
    config: Config,
    device: Device,
    table: Schedule,
    clock: SimulatedTimes,
    costs: Costs,
    makespan: float,
) -> LateParts:
    """Return the seconds by which sums, gathers and updates make one of many steps longer.

    Args:
        table: the passes of a step, without its end.
        clock: their times, without its end.
        costs: the times of the passes.
        makespan: the seconds of the passes, as `took` returns them.
    """
    steps = _several(table, config, costs)
    sent = after_passes(plan, config, device, table, clock)
    updates = [update_of(plan, config, device, [stage]) for stage in range(len(sent))]
    gathers = tuple(x.gather for x in sent)
    at_end: dict[str, Any] = {"g": tuple(x.reduce for x in sent)}
    # Gathers have passes of their own, A, or come with the update.
    if config.gathers_later:
        at_end |= {"a": gathers, "u": (0.0,) * len(sent)}
    else:
        at_end |= {"a": 0.0, "u": gathers}
    summed = replace(costs, **at_end)
    both = tuple(map(sum, zip(at_end["u"], updates, strict=True)))
    with_sums = _each(steps, summed)
    return LateParts(with_sums - makespan, _each(steps, replace(summed, u=both)) - with_sums)


@lru_cache(maxsize=1)  # the times of one plan need it several times
def _several(table: Schedule, config: Config, costs: Costs) -> Schedule:
    """Return a table of _STEPS steps that follow each other, with all their passes.

    Args:
        table: the passes of a step, without its end.
    """
    return repeated(whole_step(table, config, costs), _STEPS)


@uncollected()
def _each(table: Schedule, costs: Costs) -> float:
    """Return the seconds from the end of a step to the end of the next, after some steps.

    Args:
        table: all passes of _STEPS steps.
    """
    clock = run_clock(table, costs)
    ends = []
    for steps in (_STEPS // 2, _STEPS):
        counts = [steps * len(row) // _STEPS for row in table.ranks]
        ends.append(max(max(row[:n]) for row, n in zip(clock.end, counts, strict=True) if n))
    return (ends[1] - ends[0]) / (_STEPS - _STEPS // 2)
