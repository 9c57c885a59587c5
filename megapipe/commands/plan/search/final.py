"""Make a plan that was found as a run with its flags makes it, so that both are the same plan."""

from __future__ import annotations

from dataclasses import replace

from megapipe.commands.plan.search.cells import under
from megapipe.config import Config
from megapipe.errors import ScheduleError
from megapipe.plan import GIB, pieces_of, plan_of
from megapipe.plan.seconds.device import Device
from megapipe.plan.seconds.messages import replicas, ring
from megapipe.plan.seconds.step import Timed, timed
from megapipe.schedule import SCHEDULES

SEARCHES = next(name for name, entry in SCHEDULES.items() if entry.searched)
"""The schedule that is searched for."""
_TRIES = 12
"""Limits that are tried until a plan fits."""


def as_run(config: Config, device: Device, memory: float, *, moves: bool) -> Timed:
    """Return a plan with the table, the split and the peak that a run with these flags has.

    Args:
        memory: bytes of a device.
        moves: offload or recompute single activations until it fits.
    Raises: ConfigError, ScheduleError if it does not fit.
    """
    limit = memory
    for _ in range(_TRIES):
        one = config
        if moves:
            one = limited(config, limit)
        if config.parallel.use_megatron_fsdp:
            one = _knows_links(limited(config, limit), device)
        made = of_run(one, device)
        # Without a limit a run moves nothing, so another try would give the same.
        if made.peak <= memory or one is config:
            return made
        # A limit is of what a run counts. Where its plan has more, the limit is lowered.
        limit -= max(1.1 * (made.peak - memory), 1e-3 * memory)
        if limit <= 0:
            break
    raise ScheduleError(f"no limit makes this plan fit in {memory / GIB:g} GiB")


def of_run(config: Config, device: Device) -> Timed:
    """Return the plan that a run with this configuration makes, with the times of its step."""
    plan = plan_of(config, pieces_of(config, config.model), recomputes=True)
    return replace(timed(plan, config, device), peak=max(plan.peak_bytes))


def any_order(config: Config, device: Device, memory: float) -> Timed:
    """Return the plan of these flags with the schedule that zb-auto finds, and its step time.

    Single activations are offloaded or recomputed if it does not fit.

    Args:
        memory: bytes of a device.
    Raises: ConfigError, ScheduleError if it does not fit in any way.
    """
    return as_run(under(config, SEARCHES, None), device, memory, moves=True)


def limited(config: Config, memory: float) -> Config:
    """Return the configuration with --memory-limit-gib set to a limit in bytes.

    Args:
        memory: the limit in bytes.
    """
    return config.with_fields(memory_limit_gib=memory / GIB)


def _knows_links(config: Config, device: Device) -> Config:
    """Return the configuration with the device's time of a gather, in FLOPs for each byte.

    How long gathered weights live depends on memory and on this time, so a run must know both.
    """
    gathered = 1e12
    seconds = ring(device, gathered, config.weight_replicas, replicas(config))
    link = device.flops * seconds / gathered
    return config.with_fields(data_parallel_flops_per_byte=round(link))
