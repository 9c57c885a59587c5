"""The most microbatches that a stage has in flight: from their forward to the last pass that needs what it left."""

from __future__ import annotations

from itertools import accumulate

from megapipe.schedule.kinds import Kind
from megapipe.schedule.passes import Schedule

_CHANGE = {Kind.F: 1, Kind.BW: -1, Kind.W: -1}


def in_flight(schedule: Schedule, stage: int) -> int:
    """The most at once, in the order of the stage's rank."""
    row = schedule.ranks[schedule.placement.rank_of[stage]]
    return max(accumulate(_CHANGE.get(x.kind, 0) for step in row for x in step if x.stage == stage), default=0)


def splits(schedule: Schedule, stage: int) -> bool:
    """Has the stage a W apart from its B?"""
    row = schedule.ranks[schedule.placement.rank_of[stage]]
    return any(x.kind is Kind.W for step in row for x in step if x.stage == stage)
