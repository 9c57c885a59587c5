"""Say what gradients and moments in bf16 save a plan that does not fit."""

from __future__ import annotations

from contextlib import suppress

from megapipe.checks.run import flag_problems
from megapipe.commands.plan.search.final import leanest, of_run
from megapipe.commands.plan.search.listed.cells import short
from megapipe.commands.plan.verdict import Machine
from megapipe.config.notes import flag
from megapipe.errors import ConfigError, ScheduleError
from megapipe.plan.seconds.device import Device
from megapipe.plan.seconds.step import TimedPlan

_TYPES = ("main_grads_dtype", "exp_avg_dtype", "exp_avg_sq_dtype")


def with_narrow_state(x: TimedPlan, device: Device, machine: Machine) -> list[str]:
    """Return lines on a plan that does not fit, if its optimizer kept less of each number.

    No search tries these flags, as they change the results of training. The list is empty if a run
    refuses them, or has them already.

    Args:
        machine: the memory of a device and of a host.
    """
    config = x.config.with_fields(
        use_precision_aware_optimizer=True, **dict.fromkeys(_TYPES, "bf16")
    )
    with suppress(ConfigError, ScheduleError):
        if flag_problems(short(config, 1)):
            return []
        if config.parallel.use_megatron_fsdp:
            # The limit was the least that the plan could keep, which is less now.
            config = config.with_fields(memory_limit_gib=None)
            less = leanest(config, (), device, machine.limit / 2)
        else:
            less = of_run(config, device)
        if less.peak < x.peak:
            flags = [flag("use_precision_aware_optimizer")]
            flags += [f"{flag(name)} bf16" for name in _TYPES]
            if (limit := less.config.parallel.memory_limit_gib) is not None:
                flags.append(f"{flag('memory_limit_gib')} {limit:g}")
            return [
                "the same with gradients and moments in bf16, which is not searched as it changes "
                "results (docs/optimizers.md):",
                f"      {machine.fits(less.plan, less.config)}",
                f"      {' '.join(flags)}",
            ]
    return []
