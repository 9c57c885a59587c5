"""Predict the seconds of a plan's step on a device, part by part, with the simulator."""

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

# Names of two parts of a step.
SUMS = "gradient sums"
MOVED = "activations out of the way"
AHEAD = Living(2, 1, ahead=True)
"""How long a search keeps gathered weights: for the present stage and the next one.

A run chooses by its own table.
"""


@dataclass(frozen=True)
class Timed:
    """A plan and the times of its step.

    Attributes:
        schedule: the name of its schedule.
        step: seconds of a step.
        peak: bytes of the rank that needs most.
        parts: seconds of a step by cause. The rest of the step is the same for every plan.
    """

    config: Config
    plan: Plan
    schedule: str
    step: float
    peak: float
    parts: dict[str, float]

    @property
    def layout(self) -> Layout:
        """Return tp, cp, pp, micro batch, ep and etp."""
        return layout_of(self.config)

    @property
    def moves(self) -> bool:
        """Return whether its table offloads or recomputes single activations."""
        return not self.plan.schedule.kinds.isdisjoint(MOVES)

    @property
    def passes(self) -> float:
        """Return the seconds of the step without the visible part of gradient sums and gathers."""
        return self.step - self.parts[SUMS]


@lru_cache(maxsize=512)
def table(name: str, ranks: int, microbatches: int, chunks: int | None) -> Schedule:
    """Return a table of the catalogue. Tests verify these tables, so the search does not."""
    given = {}
    # A generator with one number of chunks does not take the argument.
    if chunks is not None:
        given["chunks"] = chunks
    return SCHEDULES[name].generate(ranks, microbatches, **given)


class Room(NamedTuple):
    """The memory that a plan must fit by offloading or recomputing activations.

    Attributes:
        memory: bytes of a device.
        most: give up if the passes take this many seconds.
        as_run: choose activations by what a run knows; it does not know the times of messages.
    """

    memory: float
    most: float = inf
    as_run: bool = False


def under(
    plan: Plan, config: Config, batch: Config, device: Device, room: Room | None = None
) -> Timed:
    """Return a layout's plan with another schedule and batch, and the times of its step.

    Args:
        plan: the plan of the layout under 1F1B.
        config: has the schedule.
        batch: has the number of microbatches.
        room: offload or recompute activations that do not fit; None to leave them.
    Raises: ConfigError, ScheduleError if there is no such plan.
    """
    par = config.parallel
    name = par.pipeline_schedule or PLAIN
    chunks = par.num_virtual_stages_per_pipeline_rank
    schedule = table(name, par.pipeline_model_parallel_size, batch.num_microbatches, chunks)
    # The layout's plan has 1F1B's table. Stages and their layers follow from the schedule.
    there = replace(plan, schedule=schedule, counts=counts_of(config, schedule.placement))
    # Depths of multi-token prediction get stages of their own at the end of the table.
    if depths := plan.pieces.depths:
        bare = replace(there, pieces=plan.pieces.without_depths)
        draft = Draft(config, bare, depths, there.counts)
        recipe = Recipe(
            name,
            depths=ranks_of_depths(config, schedule.placement)[0],
            vocabulary=plan.pieces.shares > 1,
        )
        there = draft.plan(recipe.with_ends(schedule, draft))
    if room is not None:
        there = _within(replace(there, own=own_parts(config, schedule)), batch, device, room)
    return replace(timed(there, batch, device), config=config)


def _within(plan: Plan, config: Config, device: Device, room: Room) -> Plan:
    """Return the plan with activations offloaded or recomputed until it fits `room`.

    Raises: ScheduleError if it cannot fit.
    """
    schedule = plan.schedule
    costs = plan.costs
    # A run knows the plan's FLOPs, and no times of messages.
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
    for rank, most in enumerate(rooms):
        largest = max(held[stage] for stage in place.stages_on(rank))
        # A pass needs the activations of its own microbatch, wherever the others are.
        if largest > most:
            raise ScheduleError("a rank has no room for one microbatch of a stage")
    recipe = Recipe(schedule.name, offload=Offload("fits", tries=0, most=room.most))
    return replace(plan, schedule=recipe.finish(schedule, Fixed(costs, rooms)).table)


def timed(plan: Plan, config: Config, device: Device) -> Timed:
    """Return a plan with the times of its step under its own batch."""
    whole = unpaired(plan.schedule)
    alone = in_seconds(plan, config, device)
    costs = with_messages(alone, plan, config, device)
    sharded = "sharding" in plan.own
    # The same table without sharding, and without offloading too: what each of them costs is the
    # difference of two simulations.
    schedule = whole
    if sharded:
        schedule = whole.without(SHARDS)
    plain = schedule
    if schedule.kinds & MOVES:
        plain = schedule.without(MOVES)
    clock = run_clock(schedule, costs)
    makespan = _end(clock)
    moves = 0.0
    if plain is not schedule:
        moves = makespan - _end(run_clock(plain, costs))
    at_end = sums(plan, config, device)
    if sharded:
        # A table without gathers gets them here, as a run would add them.
        if schedule.kinds == whole.kinds:
            recipe = Recipe(schedule.name, sharding=Sharding(living=AHEAD))
            schedule = recipe.finish(schedule, Fixed(costs)).table
        else:
            schedule = whole
        clock = run_clock(schedule, costs)
        at_end += _end(clock) - makespan
    ranks = len(schedule.ranks)
    held = [max(x for _, x, _ in curve) for curve in memory_steps(schedule, costs, clock)]
    # Microbatches of a rank, in the mean: with two copies of the model each has half of them.
    share = config.num_microbatches / ranks
    passes = sum(map(len, plain.ranks)) / ranks * costs.overhead
    parts = {
        "recomputation": share * (work_of(alone) - _least(config, plan, device)),
        "tp and cp messages": share * (work_of(costs) - work_of(alone)),
        "small passes": passes,
        "bubble": makespan - moves - share * work_of(costs) - passes,
        MOVED: moves,
        SUMS: at_end,
    }
    # Weights, gradients and optimizer are there all the time.
    peak = max(map(add, held, plan.state_bytes))
    return Timed(config, plan, schedule.name, makespan + at_end, peak, parts)


def _end(clock: Clock) -> float:
    """Return the time at which the last pass of any rank ends."""
    return max(map(max, clock.end))


def _least(config: Config, plan: Plan, device: Device) -> float:
    """Return the seconds of a microbatch's work without recomputation."""
    model = replace(config.model, recompute_granularity=None)
    pieces = plan.pieces
    # Counting the work of a model takes time, which a plan without recomputation saves.
    if model != config.model:
        pieces = pieces_of(config, model)
    return work_of(in_seconds(replace(plan, pieces=pieces), config, device))


def in_seconds(plan: Plan, config: Config, device: Device) -> Costs:
    """Return the costs of a plan in seconds, without communication."""
    costs = plan.costs
    # Tensor-parallel ranks divide the work of a stage.
    rate = 1 / (config.parallel.tensor_model_parallel_size * device.flops)
    named = {name: getattr(costs, name) for name in "fbwol"}
    scaled: dict[str, Any] = {}
    for name, column in named.items():
        if isinstance(column, tuple):
            scaled[name] = tuple(x * rate for x in column)
    return replace(costs, **scaled, overhead=device.overhead)


def work_of(costs: Costs) -> float:
    """Return the seconds of a microbatch's passes on all stages together."""
    return sum(sum(x) for x in (costs.f, costs.b, costs.w) if isinstance(x, tuple))
