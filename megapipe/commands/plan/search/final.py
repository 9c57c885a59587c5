"""Make a plan that was found as a run with its flags makes it, so that both are the same plan."""

from __future__ import annotations

from collections.abc import Collection
from contextlib import suppress
from dataclasses import replace
from math import sqrt

from megapipe.commands.plan.search.listed.cells import under
from megapipe.config import Config
from megapipe.errors import ConfigError, ScheduleError
from megapipe.partition.layout import AUTO
from megapipe.plan import GIB, pieces_of, plan_of
from megapipe.plan.seconds.device import Device
from megapipe.plan.seconds.links import knows_links
from megapipe.plan.seconds.step import TimedPlan, timed
from megapipe.schedule import SCHEDULES

SEARCHES = next(name for name, entry in SCHEDULES.items() if entry.searched)
"""The schedule that is searched for."""
Units = Collection[tuple[str, int | None]]
"""Schedules, each with its number of stages on a rank."""
_TRIES = 12
"""Limits that are tried until a plan fits."""
_HALVES = 6
"""Bisections for the least limit that a plan keeps."""


def as_run(config: Config, device: Device, memory: float, *, moves: bool) -> TimedPlan:
    """Return the plan that a run with these flags makes, with the times of its step.

    Args:
        memory: bytes of a device.
        moves: whether single activations are offloaded or recomputed until the plan fits.
    Raises: ConfigError, ScheduleError if the plan does not fit.
    """
    limit = memory
    for _ in range(_TRIES):
        one = config
        if moves:
            one = limited(config, limit)
        if config.parallel.use_megatron_fsdp:
            one = knows_links(limited(config, limit), device)
        made = of_run(one, device)
        # Without a limit a run moves nothing, so another try would give the same.
        if made.peak <= memory or one is config:
            return made
        # A limit is of what a run counts. Where its plan has more, the limit is lowered.
        limit -= max(1.1 * (made.peak - memory), 1e-3 * memory)
        if limit <= 0:
            break
    raise ScheduleError(f"no limit makes this plan fit in {memory / GIB:g} GiB")


def of_run(config: Config, device: Device) -> TimedPlan:
    """Return the plan that a run with this configuration makes, with the times of its step."""
    config = launched(config)
    plan = plan_of(config, pieces_of(config, config.model), recomputes=True)
    return replace(timed(plan, config, device), peak=max(plan.peak_bytes))


def leanest(config: Config, names: Units, device: Device, memory: float) -> TimedPlan:
    """Return the plan of a run with these flags that needs least memory, if none fits.

    Of sharded weights the finest stages are tried too: a search judges no stages where the state
    alone needs more than a device has.

    Args:
        names: (schedule, stages on each rank) that the user's restrictions leave.
        memory: bytes of a device, too few for the plan.
    Raises: ConfigError, ScheduleError if there is no plan.
    """
    best = of_run(config, device)
    if not config.parallel.use_megatron_fsdp:
        return best
    # The last of each schedule has most stages.
    finest = [under(config, *unit) for unit in dict(names).items()]
    for one in dict.fromkeys([config, *finest]):
        with suppress(ConfigError, ScheduleError):
            best = min(best, _limited_most(one, device, memory), key=lambda x: x.peak)
    return best


def _limited_most(config: Config, device: Device, memory: float) -> TimedPlan:
    """Return the plan under the least limit that a run with sharded weights keeps, by bisection.

    Without a limit a run lets go of no weights that it has gathered.

    Args:
        memory: bytes of a device, too few for the plan.
    Raises: ConfigError, ScheduleError if there is no plan.
    """
    best = of_run(config, device)
    low = memory
    for _ in range(_HALVES):
        limit = round(sqrt(low * best.peak) / GIB, 3) * GIB
        try:
            made = of_run(knows_links(limited(config, limit), device), device)
        except (ConfigError, ScheduleError):
            made = best
        if made.peak < best.peak:
            best = made
        else:
            low = limit
    return best


def launched(config: Config) -> Config:
    """Return the configuration without a number of stages that its layout lists already.

    A run refuses two flags that say how many stages a rank has.
    """
    if config.parallel.pipeline_model_parallel_layout in (None, AUTO):
        return config
    return config.with_fields(num_virtual_stages_per_pipeline_rank=None)


def any_order(config: Config, device: Device, memory: float) -> TimedPlan:
    """Return the plan of these flags under a schedule that zb-auto searches, with its step time.

    If the plan does not fit, single activations are offloaded or recomputed.

    Args:
        memory: bytes of a device.
    Raises: ConfigError, ScheduleError if the plan does not fit even then.
    """
    return as_run(under(config, SEARCHES, None), device, memory, moves=True)


def limited(config: Config, memory: float) -> Config:
    """Return the configuration with --memory-limit-gib set to a limit in bytes.

    Args:
        memory: the limit in bytes.
    """
    return config.with_fields(memory_limit_gib=memory / GIB)
