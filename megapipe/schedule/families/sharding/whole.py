"""The memory of weights that are gathered for a run of passes, and of gradients that are not reduced yet."""

from __future__ import annotations

from collections.abc import Collection, Iterator

from megapipe.schedule.families.family import Prices, Times
from megapipe.schedule.families.sharding.runs import lives
from megapipe.schedule.kinds import Kind, Lane
from megapipe.schedule.passes import Placement, Schedule


def borrowers(costs: Prices, place: Placement, stages: Collection[int]) -> set[int]:
    """Return those of some stages that use weights of the first."""
    lent = costs.by_stage("mem_lent", place)
    return {stage for stage in stages if lent[stage]}


def whole(
    schedule: Schedule, costs: Prices, clock: Times, rank: int
) -> Iterator[tuple[float, float, int]]:
    """Yield (time, size, step of the row) for each change in gathered weights and unreduced gradients of a rank."""
    place = schedule.placement
    weights = costs.by_stage("mem_a", place)
    gradients = costs.by_stage("mem_g", place)
    end, begun, free = clock.end[rank], list[float](), 0.0
    for step, starts, ends in zip(schedule.ranks[rank], clock.start[rank], end, strict=True):
        computes = step[0].kind.traits.lane is Lane.COMPUTE
        # A step of another lane takes its memory where it stands in the row, though its lane may be busy until later.
        begun.append(starts if computes else free)
        free = ends if computes else free
    own = place.stages_on(rank)
    borrow = borrowers(costs, place, own)
    lender = next((stage for stage in own if place.is_first(stage)), -1) if borrow else -1
    of_first = list[tuple[_Moment, _Moment]]()
    for kind, stage, first, last, waits in lives(schedule, rank):
        takes = begun[first], first
        gives = max(end[last], begun[waits] if waits >= 0 else 0.0), max(last, waits)
        first_too = kind is Kind.AF and bool(borrow) and stage in {lender, *borrow}
        if first_too:
            of_first.append((takes, gives))
        if stage != lender or not first_too:
            size = (weights if kind is Kind.AF else gradients)[stage]
            yield takes[0], size, takes[1]
            yield gives[0], -size, gives[1]
    for (taken, first), (given, last) in _united(of_first):
        yield taken, weights[lender], first
        yield given, -weights[lender], last


_Moment = tuple[float, int]
"""A time, and the step of a row."""


def _united(whiles: list[tuple[_Moment, _Moment]]) -> list[tuple[_Moment, _Moment]]:
    """Return the union of overlapping intervals."""
    found: list[tuple[_Moment, _Moment]] = []
    for takes, gives in sorted(whiles):
        if found and takes < found[-1][1]:
            found[-1] = found[-1][0], max(found[-1][1], gives)
        else:
            found.append((takes, gives))
    return found
