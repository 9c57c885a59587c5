"""Describe a step of a plan in seconds, for `megapipe plan` and `megapipe check`."""

from __future__ import annotations

from dataclasses import replace
from hashlib import sha256
from typing import Any

from megapipe.config import Config, ModelConfig
from megapipe.plan.families.offload import host_bytes
from megapipe.plan.plan import Plan
from megapipe.plan.seconds.device import Device
from megapipe.plan.seconds.flops import flops_per_token
from megapipe.plan.seconds.late import LATE, is_late
from megapipe.plan.seconds.step import TimedPlan, basis, bubble, timed
from megapipe.plan.shapes.slices import in_words
from megapipe.plan.state import GIB
from megapipe.plan.table import checkpoint_bytes
from megapipe.schedule import Kind
from megapipe.schedule.text import to_json

UNKNOWN = (
    "no seconds are predicted by --rates, as the times of --pipeline-costs have a unit of their own"
)
"""What stands in place of a prediction."""


WAITS = ("messages between stages", "unequal stages", "warm-up and drain")
"""What the bubble consists of. The last part is what the table costs with equal stages."""


def digest(plan: Plan, config: Config) -> str:
    """Return twelve hexadecimal digits that identify a plan.

    Two runs with the same digits have the same table, layers and layout, and on any device the same
    predicted seconds and memory.
    """
    model = config.model
    par = config.parallel
    layout = (
        par.tensor_model_parallel_size,
        par.context_parallel_size,
        config.data_parallel_size,
        par.expert_model_parallel_size,
        par.etp if model.has_experts else 1,
        config.batch.micro_batch,
        config.global_batch_size,
    )
    choices = (
        recomputes(model),
        # One rank splits nothing.
        model.sequence_parallel and par.tensor_model_parallel_size > 1,
        model.moe_token_dispatcher_type if model.has_experts else None,
        (par.splits_optimizer, par.shards_grads, par.shards_weights),
        # The order of ranks says which messages leave a node.
        par.use_tp_pp_dp_mapping and min(config.data_parallel_size, len(plan.schedule.ranks)) > 1,
    )
    # A checkpoint and copied activations take memory of the host.
    of_host = (*checkpoint_bytes(plan, config), host_bytes(plan))
    sizes = [round(size) for size in (*plan.peak_bytes, *of_host)]
    parts = (to_json(plan.schedule), plan.counts, layout, choices, sizes, basis(plan, config))
    text = repr(parts)
    return sha256(text.encode()).hexdigest()[:12]


def recomputes(model: ModelConfig) -> str | None:
    """Return full or selective, as --recompute-granularity names it; None for nothing."""
    if model.recompute_activations:
        return "selective"
    return model.recompute_granularity


def page(plan: Plan, config: Config, device: Device) -> str:
    """Return text on the seconds of a step, their causes, the assumed speeds, and the schedule."""
    size, _ = checkpoint_bytes(plan, config)
    name = f"plan {digest(plan, config)}, schedule {plan.schedule.name}{in_words(plan.schedule)}"
    name += f"; a checkpoint has {size / GIB:.3g} GiB"
    name += f"; seconds to save it: {save_seconds(size, device)}"
    found = predicted(plan, config, device)
    if found is None:
        return f"{UNKNOWN}\n{name}"
    shares = {part: f"{part} {share:.1%}" for part, share in found["shares"].items()}
    # The last ones add up to the bubble of the line above.
    waits = [shares.pop(name) for name in WAITS if name in shares]
    parts = "  ".join(shares.values())
    if waits:
        parts += f"  bubble: {' + '.join(waits)}"
    assumed = device.assumed
    if Kind.O in plan.schedule.kinds and config.parallel.offload_time is None:
        assumed += f", {device.to_host}"
    lines = [f"predicted step {in_short(found)}", f"  {parts}", f"  assumed: {assumed}", name]
    if is_late(config):
        lines.insert(1, f"  {LATE}")
    return "\n".join(lines)


def save_seconds(size: float, device: Device | None) -> str:
    """Return text on the seconds in which a checkpoint is written, or that they are not known.

    Args:
        size: bytes of a checkpoint.
        device: has the speed of the disk; None if no device is known.
    """
    if device is None or not device.disk:
        return "not known, as --rates has no disk"
    return f"{size / device.disk:.3g} to write, by the disk of --rates"


def predicted(plan: Plan, config: Config, device: Device) -> dict[str, Any] | None:
    """Return the predicted speed of a plan, as `numbers` does: {name: number}.

    Returns None if --pipeline-costs gave the times of the passes, because these have an unknown
    unit.
    """
    if plan.given is not None:
        return None
    return numbers(timed(plan, config, device), device)


def in_short(found: dict[str, Any]) -> str:
    """Return a line with seconds, tokens per second, MFU and bubble.

    Args:
        found: the result of `numbers`.
    """
    return (
        f"{found['seconds']:.4g} s, {found['tokens_per_second']:,.0f} tokens/s, "
        f"MFU {found['mfu']:.1%}, bubble {found['bubble']:z.1%} of the step"
    )


def numbers(one: TimedPlan, device: Device) -> dict[str, Any]:
    """Return the predicted speed of a plan: {name: number}.

    Args:
        one: a plan with the times of its step.
        device: the device, whose peak FLOP/s count for MFU.
    Returns: `seconds` of a step, `tokens_per_second` of all devices, `mfu` as a fraction of the
        device's peak, `bubble` as a fraction of the step, and `shares`: {cause: its fraction of the
        step}. Shares below 0.05% are left out. All shares add up to 1, and the shares of WAITS to
        the bubble. If stages of other sizes suit the schedule better than equal ones, the share of
        "unequal stages" is negative.
    """
    config = one.config
    tokens = config.global_batch_size * config.batch.sequence
    model = replace(config.model, recompute_granularity=None)
    flops = flops_per_token(model, config.batch.sequence) * tokens
    step = one.step or 1.0
    parts = {name: seconds for name, seconds in one.parts.items() if name != "bubble"}
    # The same table without messages, and then with equal stages, says what each of them adds.
    unsent = bubble(one.plan, config, device, equal=False)
    even = bubble(one.plan, config, device, equal=True)
    waits = (one.parts["bubble"] - unsent, unsent - even, even)
    parts |= dict(zip(WAITS, waits, strict=True))
    shares = {"model": 1 - sum(parts.values()) / step}
    shares |= {
        name: seconds / step for name, seconds in parts.items() if abs(seconds) > 5e-4 * step
    }
    return {
        "seconds": one.step,
        "tokens_per_second": tokens / step,
        "mfu": flops / (step * device.peak * config.world_size),
        "bubble": one.parts["bubble"] / step,
        "shares": shares,
    }
