"""The memory of gathered weights and of gradients before reduction."""

from __future__ import annotations

from collections.abc import Collection, Iterator

from megapipe.schedule.families.family import Prices, Times
from megapipe.schedule.families.sharding.runs import lives
from megapipe.schedule.kinds import Kind, Lane
from megapipe.schedule.passes import Placement, Schedule


def borrowers(costs: Prices, place: Placement, stages: Collection[int]) -> set[int]:
    """Return the stages, among `stages`, that use the first stage's weights as a tied head does."""
    tied = costs.by_stage("mem_lent", place)
    return {stage for stage in stages if tied[stage]}


def whole(
    schedule: Schedule, costs: Prices, clock: Times, rank: int
) -> Iterator[tuple[float, float, int]]:
    """Yield (time, size, index of the step) for each change in a rank's full weights and gradients.

    The size is in the unit of the costs, and negative where memory is freed. The first stage and a
    stage tied to its weights may be on one rank. The tied weights are then counted once, while
    either stage's weights are gathered.

    Args:
        costs: the sizes of each stage's weights and gradients.
        clock: start and end of each step of the table.
        rank: the number of the rank.
    """
    place = schedule.placement
    weights = costs.by_stage("mem_a", place)
    gradients = costs.by_stage("mem_g", place)
    end = clock.end[rank]
    begun = _begun(schedule, clock, rank)
    own = place.stages_on(rank)
    tied = borrowers(costs, place, own)
    owner = -1
    if tied:
        owner = next((stage for stage in own if place.is_first(stage)), -1)
    # Collected here and joined at the end. When each of the two stages counted these weights, ZB-V
    # on 2 ranks was predicted to hold 16% more gathered weights than it did.
    of_first: list[tuple[_Moment, _Moment]] = []
    for kind, stage, first, last, waits in lives(schedule, rank):
        takes = begun[first], first
        gives = end[last], last
        if waits >= 0:
            gives = max(end[last], begun[waits]), max(last, waits)
        uses_first = kind is Kind.AF and bool(tied) and stage in {owner, *tied}
        if uses_first:
            of_first.append((takes, gives))
        # A tied stage's own weights count here, the first stage's weights below.
        if stage != owner or not uses_first:
            size = gradients[stage]
            if kind is Kind.AF:
                size = weights[stage]
            yield takes[0], size, takes[1]
            yield gives[0], -size, gives[1]
    for (taken, first), (given, last) in _united(of_first):
        yield taken, weights[owner], first
        yield given, -weights[owner], last


def _begun(schedule: Schedule, clock: Times, rank: int) -> list[float]:
    """Return the time at which each step of a rank's row allocates its memory.

    A compute pass does at its start. A collective does when the compute pass before it in the row
    ends, even if the collective's stream is busy until later.

    Args:
        clock: start and end of each step of the table.
    """
    begun: list[float] = []
    free = 0.0
    for step, starts, ends in zip(
        schedule.ranks[rank], clock.start[rank], clock.end[rank], strict=True
    ):
        # The buffer is allocated when the collective is posted, not when its stream gets to it.
        if step[0].kind.traits.lane is Lane.COMPUTE:
            begun.append(starts)
            free = ends
        else:
            begun.append(free)
    return begun


_Moment = tuple[float, int]
"""(time, step of a row)."""


def _united(intervals: list[tuple[_Moment, _Moment]]) -> list[tuple[_Moment, _Moment]]:
    """Return the union of intervals as disjoint intervals, in order.

    Args:
        intervals: (start, end), both as (time, index of the step in the row).
    """
    # In order of their starts, so only the last interval can overlap the next one.
    found: list[tuple[_Moment, _Moment]] = []
    for takes, gives in sorted(intervals):
        if found and takes < found[-1][1]:
            found[-1] = found[-1][0], max(found[-1][1], gives)
        else:
            found.append((takes, gives))
    return found
