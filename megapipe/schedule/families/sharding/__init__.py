"""Weights that are gathered for runs of a stage's passes (AF, AB), gradients that are reduced after them (RS)."""

from __future__ import annotations

from dataclasses import dataclass

from megapipe.schedule.families.family import Family, PerStage
from megapipe.schedule.families.sharding.rules import weight_problems
from megapipe.schedule.families.sharding.runs import SHARDS, named_by_forwards, of_runs
from megapipe.schedule.families.sharding.whole import whole


@dataclass(frozen=True, kw_only=True)
class ShardingCosts:
    """What gathered weights and unreduced gradients hold. Their collectives take as long as A and G.

    Attributes:
        mem_a, mem_g: the weights of a run from the start of their gather to their last use, its gradients from the
            first to the end of their reduction. The shards that a rank always has are not counted.
        mem_lent: those weights of the first stage that a stage uses too; they are gathered while either's are.
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
