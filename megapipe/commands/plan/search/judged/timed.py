"""Make the plans that a search compares: a layout's plan under a schedule, within a memory."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from math import inf
from typing import NamedTuple

from megapipe.config import Config
from megapipe.errors import ScheduleError
from megapipe.plan import Plan, counts_of
from megapipe.plan.parts import own_parts
from megapipe.plan.seconds.device import Device
from megapipe.plan.seconds.messages import with_messages
from megapipe.plan.seconds.step import AHEAD, TimedPlan, in_seconds, timed
from megapipe.schedule import SCHEDULES, Schedule, unpaired
from megapipe.schedule.catalogue import PLAIN
from megapipe.schedule.families.offload.asked import Offload
from megapipe.schedule.families.offload.weigh import HAIR
from megapipe.schedule.families.sharding.sharded import whole_at_most
from megapipe.schedule.ingredients import FixedCosts
from megapipe.schedule.recipe import Recipe


@lru_cache(maxsize=512)
def table(name: str, ranks: int, microbatches: int, chunks: int | None) -> Schedule:
    """Return the table of a built-in schedule, unverified: tests verify all of them.

    Args:
        name: the schedule's name.
        ranks: the number of pipeline ranks.
        microbatches: the number of microbatches.
        chunks: stages on each rank; None for the schedule's own number.
    """
    given = {} if chunks is None else {"chunks": chunks}
    # A run pairs passes only with --overlap-moe-expert-parallel-comm, which no plan here has.
    return unpaired(SCHEDULES[name].generate(ranks, microbatches, **given))


class Room(NamedTuple):
    """Limits for a plan that offloads or recomputes single activations until it fits.

    Attributes:
        memory: bytes of a device.
        most: give up if the passes of a step take this many seconds.
        as_run: whether activations are chosen without the times of messages, which a run does not
            know.
    """

    memory: float
    most: float = inf
    as_run: bool = False


def with_schedule(
    plan: Plan, config: Config, batch: Config, device: Device, room: Room | None
) -> TimedPlan:
    """Return a plan with another schedule and number of microbatches, and the times of its step.

    Args:
        plan: a plan with the same parallel sizes under 1F1B.
        config: the configuration with the new schedule, which becomes `config` of the result.
        batch: the configuration with the number of microbatches to plan for. A first estimate plans
            for fewer microbatches than `config` has.
        room: offload or recompute single activations until the plan fits; None for neither.
    Raises: ConfigError, ScheduleError if there is no such plan.
    """
    par = config.parallel
    name = par.pipeline_schedule or PLAIN
    chunks = par.num_virtual_stages_per_pipeline_rank
    schedule = table(name, par.pipeline_model_parallel_size, batch.num_microbatches, chunks)
    there = replace(plan, schedule=schedule, counts=counts_of(config, schedule.placement))
    if depths := plan.pieces.depths:
        # Depths follow the loss, and count with its passes here. Passes of their own, as a run has
        # them, are a search among tables for every plan.
        bare = replace(plan.pieces, depths=())
        there = replace(there, pieces=replace(bare, head=sum(depths, bare.head)))
    if room is not None:
        there = _within(replace(there, own=own_parts(config, schedule)), batch, device, room)
    return replace(timed(there, batch, device), config=config)


def _within(plan: Plan, config: Config, device: Device, room: Room) -> Plan:
    """Return the plan with single activations offloaded or recomputed until it fits `room`.

    Raises: ScheduleError if it cannot fit.
    """
    schedule = plan.schedule
    costs = plan.costs
    if not room.as_run:
        costs = with_messages(in_seconds(plan, config, device), plan, config, device)
    living = [0.0] * len(schedule.ranks)
    if "sharding" in plan.own:
        living = whole_at_most(schedule, costs, AHEAD)
    # A hair less than the memory, as sums of floats differ by their order.
    rooms = tuple(
        room.memory / HAIR - state - whole
        for state, whole in zip(plan.state_bytes, living, strict=True)
    )
    place = schedule.placement
    held = costs.memory(place).b
    if any(max(held[s] for s in place.stages_on(rank)) > most for rank, most in enumerate(rooms)):
        raise ScheduleError("a rank has no room for one microbatch of a stage")
    recipe = Recipe(schedule.name, offload=Offload("fits", tries=0, most=room.most))
    return replace(plan, schedule=recipe.finish(schedule, FixedCosts(costs, rooms)).table)
