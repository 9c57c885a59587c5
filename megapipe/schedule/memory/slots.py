"""The most microbatches that a stage has in flight at any time.

A microbatch is in flight from its forward to the last pass that reads what the forward left.
"""

from __future__ import annotations

from itertools import accumulate

from megapipe.schedule.kinds import Kind
from megapipe.schedule.passes import Schedule

# B changes nothing: W still reads the inputs of the stage's linear layers.
_CHANGE = {Kind.F: 1, Kind.BW: -1, Kind.W: -1}


def in_flight(schedule: Schedule, stage: int) -> int:
    """Return the largest number of microbatches that a stage has in flight at once.

    A microbatch is in flight from its forward to its BW, or to its W if the backward is split.
    """
    row = schedule.ranks[schedule.placement.rank_of[stage]]
    changes = (_CHANGE.get(x.kind, 0) for step in row for x in step if x.stage == stage)
    return max(accumulate(changes), default=0)


def splits(schedule: Schedule, stage: int) -> bool:
    """Return whether a stage has W passes, so that its backward is split into B and W."""
    row = schedule.ranks[schedule.placement.rank_of[stage]]
    return any(x.kind is Kind.W for step in row for x in step if x.stage == stage)
