"""Sharded weights and gradients: gather weights for runs of passes (AF, AB), sum gradients (RS).

With AF, AB and RS it is ZeRO-3 inside the table, with RS only it is ZeRO-2.
"""

from __future__ import annotations

from dataclasses import dataclass

from megapipe.schedule.families.family import Family, PerStage
from megapipe.schedule.families.sharding.rules import weight_problems
from megapipe.schedule.families.sharding.runs import SHARDS, named_by_forwards, of_runs
from megapipe.schedule.families.sharding.whole import whole


@dataclass(frozen=True, kw_only=True)
class ShardingCosts:
    """Memory of gathered weights and of gradients before reduction, in the unit of the costs.

    One number is for a device share, 1/p of the model on p ranks; a tuple has the value of each
    stage. The shards that a rank always has are not counted. Times have no field here. A gather
    before F or B (AF, AB) takes as long as pass A, which gathers after an update. A reduction (RS)
    takes as long as pass G, which reduces once a step.

    Attributes:
        mem_a: weights of a stage, from the start of their gather to their last use.
        mem_g: gradients of a stage, from the first pass that adds to them to the end of their
            reduction.
        mem_lent: for a later stage that uses weights of the first stage, such as a tied head: the
            size of these weights. These weights are in memory while the first stage or the later
            one is gathered.
    """

    mem_a: PerStage = 0.0
    mem_g: PerStage = 0.0
    mem_lent: PerStage = 0.0


SHARDING = Family(
    "sharding",
    SHARDS,
    problems=weight_problems,
    needs=of_runs,
    whole=whole,
    evaluated=named_by_forwards,
)
