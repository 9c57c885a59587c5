"""Make a plan that was found as a run with its flags makes it, so that both are the same plan."""

from __future__ import annotations

from dataclasses import replace

from megapipe.commands.plan.search.cells import under
from megapipe.config import Config, ParallelConfig
from megapipe.config.notes import flag
from megapipe.errors import ScheduleError
from megapipe.partition.layout import AUTO
from megapipe.plan import GIB, pieces_of, plan_of
from megapipe.plan.seconds.device import Device
from megapipe.plan.seconds.messages import replicas, ring
from megapipe.plan.seconds.step import TimedPlan, timed
from megapipe.schedule import SCHEDULES

SEARCHES = next(name for name, entry in SCHEDULES.items() if entry.searched)
"""The schedule that is searched for."""
_TRIES = 12
"""Limits that are tried until a plan fits."""


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


def by_rates(config: Config, device: Device) -> tuple[Config, list[str]]:
    """Return a configuration whose sharded tensors take as long to gather as --rates says.

    A number that the user gave stays, and so do all configurations without --rates.

    Args:
        device: the device of --rates.
    Returns: (the configuration, lines on the flag with which a run makes the same plan).
    """
    name = "data_parallel_flops_per_byte"
    default = config.value(name) == getattr(ParallelConfig, name)
    sharded = config.parallel.shards_grads and config.weight_replicas > 1
    timed_by_costs = config.parallel.pipeline_costs is not None
    if config.check.rates is None or timed_by_costs or not (default and sharded):
        return config, []
    linked = knows_links(config, device)
    line = (
        f"a byte between data-parallel ranks takes as long as {linked.value(name):g} FLOPs, by "
        f"--rates. So that a run makes this plan, add {flag(name)} {linked.value(name):g}: its "
        f"default is {config.value(name):g}"
    )
    return linked, [line]


def knows_links(config: Config, device: Device) -> Config:
    """Return the configuration with data_parallel_flops_per_byte of this device.

    This is the number of FLOPs that the device computes while a gather brings one byte. A run with
    sharded weights decides by this number, and by the memory, how long gathered weights are kept.
    """
    gathered = 1e12
    seconds = ring(device, gathered, config.weight_replicas, replicas(config))
    link = device.flops * seconds / gathered
    return config.with_fields(data_parallel_flops_per_byte=round(link))
