"""Try plans with communication hidden: over data parallelism, by pairs, or by --tp-comm-overlap.

Data-parallel communication overlaps in every plan of a search, and flags without gain go at its
end. A pair is a forward and a backward that run together, so that one computes while the other
communicates. A table with pairs takes too long for every plan of a search. So they are tried for
the layouts that would be the best if all of their communication were hidden.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import replace

from megapipe.checks.run import flag_problems
from megapipe.commands.plan.search.final import as_run
from megapipe.commands.plan.search.judged.screen import ExtrapolatedPlan
from megapipe.commands.plan.search.listed.asked import SearchRestrictions
from megapipe.commands.plan.search.listed.cells import short
from megapipe.config import Config, ParallelConfig
from megapipe.errors import ConfigError, ScheduleError
from megapipe.plan.seconds.device import Device
from megapipe.plan.seconds.messages import CONTEXT, EXPERTS, TENSOR
from megapipe.plan.seconds.step import TimedPlan, timed
from megapipe.schedule import SCHEDULES
from megapipe.schedule.catalogue import PLAIN

TRIED = 4
"""Layouts that are tried with pairs, and with --tp-comm-overlap."""
HIDING = "hiding"
"""The word of --without for all of this."""


BUCKET = 40_000_000
"""Elements of a bucket of gradients, as in Megatron-LM on up to 40 data-parallel ranks."""
OVERLAP = ("overlap_grad_reduce", "overlap_param_gather", "ddp_bucket_size", "ddp_num_buckets")
"""Fields that overlap data-parallel communication with passes."""
_LEAST_GAIN = 1e-4
"""The fraction of a step by which flags of OVERLAP must shorten it."""
_GAIN_OF_PAIRS = 0.01
"""The same for the flag of pairs under a schedule with pairs of its own, such as DualPipe's.

The flag then adds a few pairs. Two plans that differ by so little are one plan for a reader.
"""


def overlapped(config: Config) -> Config:
    """Return the configuration with all data-parallel communication overlapped.

    The user's own buckets stay.
    """
    par = config.parallel
    size = par.ddp_bucket_size
    if par.ddp_num_buckets is None:
        size = size or BUCKET
    return config.with_fields(
        overlap_grad_reduce=True, overlap_param_gather=True, ddp_bucket_size=size
    )


def pairs_passes(x: TimedPlan) -> bool:
    """Return whether passes of the plan run in pairs."""
    return any(len(step) > 1 for row in x.plan.schedule.ranks for step in row)


def hides_unmeasured(x: TimedPlan) -> bool:
    """Return whether the plan hides messages within passes. No GPU has measured how far it does.

    It hides them by pairs of passes, or by --tp-comm-overlap.
    """
    return x.config.overlaps_tp or pairs_passes(x)


def with_fewest_flags(made: TimedPlan, own: ParallelConfig, device: Device) -> TimedPlan:
    """Return the plan without those flags of OVERLAP that do not shorten its step.

    Args:
        own: has the user's own flags, which stay.
    """
    if not made.config.parallel.overlap_grad_reduce:
        return made
    for names in (("overlap_param_gather",), ("ddp_bucket_size",), OVERLAP):
        fields = {name: getattr(own, name) for name in names}
        other = timed(made.plan, made.config.with_fields(**fields), device)
        if other.step <= (1 + _LEAST_GAIN) * made.step:
            made = replace(made, config=other.config, step=other.step, parts=other.parts)
    return made


def without_more_pairs(made: TimedPlan, device: Device, limit: float) -> TimedPlan:
    """Return the plan without --overlap-moe-expert-parallel-comm if its schedule has pairs anyway.

    The plan is returned unchanged if it becomes slower by more than a percent.

    Args:
        limit: bytes of a device.
    """
    par = made.config.parallel
    name = par.pipeline_schedule or PLAIN
    if not par.overlap_moe_expert_parallel_comm or not SCHEDULES[name].pairs:
        return made
    config = made.config.with_fields(overlap_moe_expert_parallel_comm=False)
    with suppress(ConfigError, ScheduleError):
        other = as_run(config, device, limit, moves=made.moves)
        if other.peak <= limit and other.step <= (1 + _GAIN_OF_PAIRS) * made.step:
            return other
    return made


def hiding(
    ranked: Iterable[ExtrapolatedPlan], asked: SearchRestrictions
) -> Iterator[ExtrapolatedPlan]:
    """Yield plans of a search again, with flags that overlap their communication with passes.

    A run may refuse some of these plans. The step time stays unchanged.

    Args:
        ranked: plans of the search, fastest first.
        asked: the user's restrictions of the search.
    """
    if HIDING in asked.without:
        return
    plans = [x for x in ranked if not x.moves]
    piped = [x for x in plans if x.config.parallel.pipeline_model_parallel_size > 1]
    for x in promising(piped, (TENSOR, CONTEXT, EXPERTS)):
        yield from with_switch(x, "overlap_moe_expert_parallel_comm")
    for x in promising(plans, (TENSOR,)):
        yield from with_switch(x, "tp_comm_overlap")


def promising(plans: Iterable[ExtrapolatedPlan], causes: tuple[str, ...]) -> list[ExtrapolatedPlan]:
    """Return the plans that would have the shortest steps without the time of these causes."""
    lost = [(x, sum(x.parts[cause] for cause in causes)) for x in plans]
    ordered = sorted((x.step - seconds, n) for n, (x, seconds) in enumerate(lost) if seconds > 0)
    return [lost[n][0] for _, n in ordered[:TRIED]]


def with_switch(x: ExtrapolatedPlan, field: str) -> Iterator[ExtrapolatedPlan]:
    """Yield the plan with a switch turned on, unless a run refuses it.

    Args:
        field: the switch's field of the configuration.
    """
    config = x.config.with_fields(**{field: True})
    # A short batch has the same problems, and a small table is checked sooner.
    if not flag_problems(short(config, 1)):
        yield replace(x, config=config)
