"""Run the passes of sharded weights and gradients.

AF and AB gather a stage's weights for a run of passes. RS reduces the gradients that a run of
passes has left, so that each rank keeps its shard.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from megapipe.pipeline_parallel.families.family import Around, Family
from megapipe.pipeline_parallel.passes.begin import Begun, weights_of
from megapipe.schedule import Kind, Pass, Schedule
from megapipe.schedule.families.sharding.runs import runs, sums


# AF and AB differ in their place in the table alone: before a run of forwards, or of backwards.
def _gather(stage: Any, *_: Any) -> Begun:
    return Begun(weights_of(stage).gather())


def _take_memory(stage: Any) -> None:
    weights_of(stage).begin()


def _drop(stage: Any) -> None:
    weights_of(stage).drop()


def _around(table: Schedule) -> Around:
    # Row 0 of the table that the executor looks up is this rank's.
    before: dict[Pass, Callable[[Any], None]] = {one.begin: _take_memory for one in sums(table, 0)}
    return Around(before, {run.dropped: _drop for run in runs(table, 0)})


SHARDING = Family(
    "sharding",
    {
        Kind.AF: _gather,
        Kind.AB: _gather,
        Kind.RS: lambda stage, _, __: Begun(weights_of(stage).reduce()),
    },
    around=_around,
)
