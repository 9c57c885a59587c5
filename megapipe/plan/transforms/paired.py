"""The table of a run whose communication hides: --overlap-moe-expert-parallel-comm makes pairs in any schedule."""

from __future__ import annotations

from dataclasses import replace

from megapipe.config import Config
from megapipe.errors import ConfigError, ScheduleError
from megapipe.schedule import Costs, Schedule, unpaired
from megapipe.schedule.costs import SHARES
from megapipe.schedule.transforms.pairs import pairs

SHARE = 0.2
"""Part of a forward and of an input gradient that is counted as communication where --pipeline-costs does not say."""


def linked(config: Config, costs: Costs) -> Costs:
    """The costs with communication that pairs hide, if flags ask for these."""
    says = costs.fb is not None or any(getattr(costs, name) for name in SHARES)
    asked = config.parallel.overlap_moe_expert_parallel_comm and config.parallel.hides
    return replace(costs, link_f=SHARE, link_b=SHARE) if asked and not says else costs


def with_pairs(config: Config, schedule: Schedule, costs: Costs, room: float | None) -> Schedule:
    """The table with passes run together, if flags ask for them; with none if there is nothing to hide.

    Args:
        costs: of its stages, memory in bytes.
        room: most bytes of activation that each rank may hold.
    Raises: ConfigError where no pair makes the step shorter within --memory-limit-gib.
    """
    par = config.parallel
    if not par.hides:
        return unpaired(schedule)
    if not par.overlap_moe_expert_parallel_comm:
        return schedule
    try:
        return pairs(schedule, linked(config, costs), memory=room, split=par.delay_wgrad_compute)
    except ScheduleError:
        within = "" if room is None else " within --memory-limit-gib, which may be raised"
        raise ConfigError(
            f"--overlap-moe-expert-parallel-comm: no two passes run together make {schedule.name} with "
            f"{schedule.num_microbatches} microbatches shorter{within}. Leave the flag out, or give a step more "
            "microbatches: a larger --global-batch-size or a smaller --micro-batch-size."
        ) from None
