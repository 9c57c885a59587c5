"""Forwards and backwards that run two at a time, so that one hides the other's collectives."""

from __future__ import annotations

from megapipe.config import Config
from megapipe.plan.part import NothingToDo, PlanFeature
from megapipe.plan.split import schedule_name
from megapipe.schedule.ingredients import Refused


def _refused(config: Config, _: Refused) -> NothingToDo:
    # A limit on memory rules pairs out that would be faster: both together may be the cause.
    within = ""
    if config.parallel.memory_limit_gib is not None:
        within = " within --memory-limit-gib, which may be raised"
    return NothingToDo(
        "pairs",
        f"--overlap-moe-expert-parallel-comm: no two passes run together make "
        f"{schedule_name(config)} with {config.num_microbatches} microbatches shorter{within}. "
        "Leave the flag out, or give a step more microbatches: a larger --global-batch-size or a "
        "smaller --micro-batch-size.",
    )


PAIRS = PlanFeature(
    "pairs",
    without=lambda config: config.with_fields(overlap_moe_expert_parallel_comm=False),
    refused=_refused,
)
