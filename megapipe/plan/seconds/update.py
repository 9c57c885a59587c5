"""Predict the seconds in which a rank updates its weights, from the speed of its memory."""

from __future__ import annotations

from collections.abc import Iterable

from megapipe.config import Config
from megapipe.plan.plan import Plan
from megapipe.plan.seconds.device import Device
from megapipe.plan.state import bytes_of_state


def update(plan: Plan, config: Config, device: Device) -> float:
    """Return the seconds of the slowest rank's update; 0 if its memory's speed is unknown."""
    place = plan.schedule.placement
    ranks = range(place.num_ranks)
    return max(update_of(plan, config, device, place.stages_on(rank)) for rank in ranks)


def update_of(plan: Plan, config: Config, device: Device, stages: Iterable[int]) -> float:
    """Return the seconds in which a rank updates some stages; 0 if its memory's speed is unknown.

    An update is limited by memory bandwidth, not by arithmetic. An update zeroes the gradients,
    reads them for their norm and for the update, and reads and writes the optimizer's state and the
    parameter.
    """
    if not device.memory:
        return 0.0
    gradient, state, master = bytes_of_state(config.optimizer, config.precision.half)
    weight = config.precision.element_bytes
    whole = 2 * gradient
    # What ZeRO splits over the ranks with the same parameters.
    split = gradient + 2 * state
    if master:
        split += 2 * master + weight
    else:
        split += 2 * weight
    par = config.parallel
    dense_ranks = 1
    expert_ranks = 1
    if par.splits_optimizer:
        dense_ranks = config.weight_replicas
        expert_ranks = config.expert_replicas
    works = [plan.works[stage] for stage in stages]
    dense = sum(work.parameters - work.experts for work in works) / plan.tp
    experts = sum(work.experts for work in works) / plan.expert_ranks
    moved = dense * (whole + split / dense_ranks) + experts * (whole + split / expert_ranks)
    return moved / device.memory
