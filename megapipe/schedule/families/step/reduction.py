"""The reduction of gradients as passes: G of a stage follows the stage's last weight gradient.

G runs on a stream of its own, so it overlaps with later compute passes of the rank.
"""

from __future__ import annotations

from collections.abc import Set
from dataclasses import replace

from megapipe.errors import ScheduleError
from megapipe.schedule.costs import UNIT, Costs
from megapipe.schedule.kinds import Kind, Lane
from megapipe.schedule.passes import Pass, Schedule, Step, with_steps
from megapipe.schedule.simulate import simulate


def with_reduction(schedule: Schedule, costs: Costs = UNIT) -> Schedule:
    """Return the table of one step with a G, the reduction of gradients, for each stage.

    A rank reduces its stages in the order in which their gradients are complete in simulated time.
    Replicas of a stage are complete together. Two ranks that hold replicas of the same stages
    therefore reduce these stages in one order. A rank runs G only when the stage's gradients are
    complete on all ranks with a replica. Passes that start earlier stand before G, because another
    replica may wait for their results.

    Raises: ScheduleError if the schedule cannot proceed, or has G.
    """
    refuse_twice(schedule, {Kind.G})
    place = schedule.placement
    time = simulate(schedule, costs)

    # When the last weight gradient of each stage is there. A stage of a chain without microbatches
    # has none, and its replicas decide.
    done = [0.0] * place.num_stages
    for item, end in time.end.items():
        if item.kind.is_gradient_of_weights:
            done[item.stage] = max(done[item.stage], end)
    # One collective sums all replicas, so it starts when the last of them is done.
    ready = []
    for stage in range(place.num_stages):
        ready.append(max(done[twin] for twin in place.replicas(stage)))
    # One order on all ranks: with different orders two ranks that share several stages deadlock.
    order = sorted(range(place.num_stages), key=lambda s: (ready[s], place.position(s)))
    rows = []
    for rank, row in enumerate(schedule.ranks):
        last = {
            x.stage: i for i, step in enumerate(row) for x in step if x.kind.is_gradient_of_weights
        }
        after: dict[int, list[Step]] = {}
        at = -1  # a chain may have no microbatch
        for stage in order:
            if place.rank_of[stage] == rank:
                # No earlier than the G before it, to keep the order, nor than the stage's last W.
                until = ready[stage]
                before = [i for i, (x, *_) in enumerate(row) if time.start[x] < until]
                at = max(at, last.get(stage, at), *before)
                after.setdefault(at, []).append((Pass(Kind.G, stage, 0),))
        rows.append(with_steps(row, after))
    return replace(schedule, ranks=tuple(rows))


def refuse_twice(schedule: Schedule, added: Set[Kind]) -> None:
    """Refuse to add kinds of pass to a table that has one of them already.

    Args:
        added: the kinds.
    Raises: ScheduleError if the table has one of `added`, or RS, which reduces gradients several
        times a step.
    """
    if Kind.RS in schedule.kinds:
        raise ScheduleError(
            f"{schedule.name} sums gradients after runs of passes (RS), not once a step."
        )
    twice = sorted(added & schedule.kinds)
    if twice:
        raise ScheduleError(
            f"{schedule.name} has {', '.join(twice)} already, and each stage has one a step. "
            "Leave them out of the table, or do not add them."
        )


def exposed(schedule: Schedule, costs: Costs) -> float:
    """Return how much longer data-parallel communication makes the step.

    This is the makespan with these collectives minus the makespan without them, in the time unit of
    the costs.
    """
    # The difference of two simulations, because a collective may delay passes of other ranks.
    without = schedule.without({kind for kind in schedule.kinds if kind.traits.lane is Lane.DP})
    return simulate(schedule, costs).makespan - simulate(without, costs).makespan
