"""The reduction of gradients as passes: a stage's G stands behind its last weight gradient, on a lane of its own."""

from __future__ import annotations

from collections.abc import Set
from dataclasses import replace

from megapipe.errors import ScheduleError
from megapipe.schedule.costs import UNIT, Costs
from megapipe.schedule.kinds import Kind, Lane
from megapipe.schedule.passes import Pass, Schedule, Step
from megapipe.schedule.simulate import simulate


def with_reduction(schedule: Schedule, costs: Costs = UNIT) -> Schedule:
    """The table of one step with a G for each stage.

    On each rank the reductions follow each other in the order in which their stages are done by the clock, replicas
    with their replicas, so that two ranks that share several reduce them in one order. What a rank runs before the
    replicas of a stage are done stands before its G: they may wait for it.

    Raises: ScheduleError if the schedule cannot proceed, or has G.
    """
    refuse_twice(schedule, {Kind.G})
    place, time = schedule.placement, simulate(schedule, costs)
    done = [0.0] * place.num_stages
    for item, end in time.end.items():
        if item.kind.is_gradient_of_weights:
            done[item.stage] = max(done[item.stage], end)
    # Replicas sum in one collective: the last of them says when.
    ready = [max(done[twin] for twin in place.replicas(s)) for s in range(place.num_stages)]
    # One order on all ranks: two that share several stages must not begin them crosswise.
    order = sorted(range(place.num_stages), key=lambda s: (ready[s], place.position(s)))
    rows = []
    for rank, row in enumerate(schedule.ranks):
        last = {
            x.stage: i for i, step in enumerate(row) for x in step if x.kind.is_gradient_of_weights
        }
        behind: dict[int, list[Step]] = {}
        at = -1  # a chain may have no microbatch
        for stage in order:
            if place.rank_of[stage] == rank:
                until = ready[stage]
                before = [i for i, (x, *_) in enumerate(row) if time.start[x] < until]
                at = max(at, last.get(stage, at), *before)
                behind.setdefault(at, []).append((Pass(Kind.G, stage, 0),))
        rows.append(
            (
                *behind.get(-1, ()),
                *(x for i, step in enumerate(row) for x in (step, *behind.get(i, ()))),
            )
        )
    return replace(schedule, ranks=tuple(rows))


def refuse_twice(schedule: Schedule, added: Set[Kind]) -> None:
    """Raises: ScheduleError for a table that has such passes of a stage as a whole already, or RS, run by run."""
    if Kind.RS in schedule.kinds:
        raise ScheduleError(
            f"{schedule.name} sums gradients behind runs of passes (RS), not once a step."
        )
    if twice := sorted(added & schedule.kinds):
        raise ScheduleError(
            f"{schedule.name} has {', '.join(twice)} already, and each stage has one a step. Leave them out of the "
            "table, or do not add them."
        )


def exposed(schedule: Schedule, costs: Costs) -> float:
    """The time by which what runs on the links of data parallel makes the step longer."""
    without = schedule.without({kind for kind in schedule.kinds if kind.traits.lane is Lane.DP})
    return simulate(schedule, costs).makespan - simulate(without, costs).makespan
