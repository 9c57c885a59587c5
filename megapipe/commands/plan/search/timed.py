"""Plans and their steps under the speeds of a device: seconds of each part, by the simulator."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from math import inf
from operator import add
from typing import Any, NamedTuple

from megapipe.commands.plan.links import Device, sums, with_messages
from megapipe.commands.plan.search.cells import Layout, layout_of
from megapipe.config import Config
from megapipe.errors import ScheduleError
from megapipe.plan import Plan, counts_of, pieces_of
from megapipe.plan.draft import Draft
from megapipe.plan.parts import own_parts
from megapipe.plan.split import ranks_of_depths
from megapipe.schedule import SCHEDULES, Costs, Schedule, unpaired
from megapipe.schedule.catalogue import PLAIN
from megapipe.schedule.families.offload.asked import Offload
from megapipe.schedule.families.offload.rules import MOVES
from megapipe.schedule.families.offload.weigh import HAIR
from megapipe.schedule.families.sharding.asked import Sharding
from megapipe.schedule.families.sharding.runs import SHARDS
from megapipe.schedule.families.sharding.sharded import Living, whole_at_most
from megapipe.schedule.ingredients import Fixed
from megapipe.schedule.recipe import Recipe
from megapipe.schedule.simulate import Clock, memory_steps, run_clock

SUMS, MOVED = "gradient sums", "activations out of the way"
AHEAD = Living(2, 1, ahead=True)
"""How long weights live in a search: the stage at work and the next one's; a run chooses by its own table."""


@dataclass(frozen=True)
class Timed:
    """A plan and its step. parts: seconds of it by what for; the rest is computed once on every plan."""

    config: Config
    plan: Plan
    schedule: str
    step: float
    peak: float
    parts: dict[str, float]

    @property
    def layout(self) -> Layout:
        return layout_of(self.config)

    @property
    def moves(self) -> bool:
        """Does its table copy activations to the host, or compute them again, one by one?"""
        return not self.plan.schedule.kinds.isdisjoint(MOVES)

    @property
    def passes(self) -> float:
        """The step without what shows of gradients and weights on their way over data parallel."""
        return self.step - self.parts[SUMS]


@lru_cache(maxsize=512)
def table(name: str, ranks: int, microbatches: int, chunks: int | None) -> Schedule:
    """A table of the catalogue, which needs no proof here."""
    return SCHEDULES[name].generate(ranks, microbatches, **({} if chunks is None else {"chunks": chunks}))


class Room(NamedTuple):
    """Memory of a device that a plan must fit by moving activations.

    Attributes:
        most: seconds of its passes that are too many.
        as_run: choose by what a run knows, which is no time of messages.
    """

    memory: float
    most: float = inf
    as_run: bool = False


def under(plan: Plan, config: Config, batch: Config, device: Device, room: Room | None = None) -> Timed:
    """A layout's plan under the schedule of a configuration and the batch of another.

    room: move what has none there. Raises: ConfigError, ScheduleError if there is no such plan.
    """
    par = config.parallel
    name, chunks = par.pipeline_schedule or PLAIN, par.num_virtual_stages_per_pipeline_rank
    schedule = table(name, par.pipeline_model_parallel_size, batch.num_microbatches, chunks)
    there = replace(plan, schedule=schedule, counts=counts_of(config, schedule.placement))
    if depths := plan.pieces.depths:
        draft = Draft(config, replace(there, pieces=plan.pieces.without_depths), depths, there.counts)
        recipe = Recipe(name, depths=ranks_of_depths(config, schedule.placement)[0], vocabulary=plan.pieces.shares > 1)
        there = draft.plan(recipe.with_ends(schedule, draft))
    if room is not None:
        there = _within(replace(there, own=own_parts(config, schedule)), batch, device, room)
    return replace(timed(there, batch, device), config=config)


def _within(plan: Plan, config: Config, device: Device, room: Room) -> Plan:
    """The plan with the activations moved that have no room; errors as above."""
    schedule, costs = plan.schedule, plan.costs
    if not room.as_run:
        costs = with_messages(in_seconds(plan, config, device), plan, config, device)
    living = whole_at_most(schedule, costs, AHEAD) if "sharding" in plan.own else [0.0] * len(schedule.ranks)
    rooms = tuple(room.memory / HAIR - state - whole for state, whole in zip(plan.state_bytes, living, strict=True))
    held, place = costs.memory(schedule.placement).b, schedule.placement
    if any(max(held[s] for s in place.stages_on(rank)) > most for rank, most in enumerate(rooms)):
        raise ScheduleError("a rank has no room for one microbatch of a stage")
    recipe = Recipe(schedule.name, offload=Offload("fits", tries=0, most=room.most))
    return replace(plan, schedule=recipe.finish(schedule, Fixed(costs, rooms)).table)


def timed(plan: Plan, config: Config, device: Device) -> Timed:
    """A plan's step under its own batch."""
    whole, alone = unpaired(plan.schedule), in_seconds(plan, config, device)
    costs = with_messages(alone, plan, config, device)
    schedule = whole.without(SHARDS) if "sharding" in plan.own else whole
    held = schedule.without(MOVES) if schedule.kinds & MOVES else schedule
    clock = run_clock(schedule, costs)
    ranks, makespan, shows = len(schedule.ranks), _end(clock), sums(plan, config, device)
    moves = 0.0 if held is schedule else makespan - _end(run_clock(held, costs))
    if "sharding" in plan.own:
        if schedule.kinds == whole.kinds:
            schedule = Recipe(schedule.name, sharding=Sharding(living=AHEAD)).finish(schedule, Fixed(costs)).table
        else:
            schedule = whole
        clock = run_clock(schedule, costs)
        shows += _end(clock) - makespan
    most = [max(x for _, x, _ in curve) for curve in memory_steps(schedule, costs, clock)]
    share = config.num_microbatches / ranks  # on a rank of each chain, in the mean
    passes = sum(map(len, held.ranks)) / ranks * costs.overhead
    parts = {
        "recomputation": share * (work_of(alone) - _least(config, plan, device)),
        "tp and cp messages": share * (work_of(costs) - work_of(alone)),
        "small passes": passes,
        "bubble": makespan - moves - share * work_of(costs) - passes,
        MOVED: moves,
        SUMS: shows,
    }
    return Timed(config, plan, schedule.name, makespan + shows, max(map(add, most, plan.state_bytes)), parts)


def _end(clock: Clock) -> float:
    return max(map(max, clock.end))


def _least(config: Config, plan: Plan, device: Device) -> float:
    """The work of a microbatch without recomputation."""
    model = replace(config.model, recompute_granularity=None)
    pieces = plan.pieces if model == config.model else pieces_of(config, model)
    return work_of(in_seconds(replace(plan, pieces=pieces), config, device))


def in_seconds(plan: Plan, config: Config, device: Device) -> Costs:
    """The seconds that the stages compute."""
    costs, rate = plan.costs, 1 / (config.parallel.tensor_model_parallel_size * device.flops)
    named = {name: getattr(costs, name) for name in "fbwol"}
    scaled: dict[str, Any] = {
        name: tuple(x * rate for x in column) for name, column in named.items() if isinstance(column, tuple)
    }
    return replace(costs, **scaled, overhead=device.overhead)


def work_of(costs: Costs) -> float:
    """The work of a microbatch through the whole model."""
    return sum(sum(x) for x in (costs.f, costs.b, costs.w) if isinstance(x, tuple))
