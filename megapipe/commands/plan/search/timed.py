"""Plans and their steps under the speeds of a device: seconds of each part, by the simulator."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from operator import add
from typing import Any

from megapipe.commands.plan.links import Device, sums, with_messages
from megapipe.commands.plan.search.cells import Layout, layout_of
from megapipe.config import Config
from megapipe.plan import Plan, counts_of, pieces_of
from megapipe.schedule import SCHEDULES, Costs, Schedule, unpaired
from megapipe.schedule.catalogue import PLAIN
from megapipe.schedule.simulate import memory_steps, run_clock
from megapipe.schedule.weights.sharded import Living, with_sharded_weights

SUMS = "gradient sums"
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
    def passes(self) -> float:
        """The step without what shows of gradients and weights on their way over data parallel."""
        return self.step - self.parts[SUMS]


@lru_cache(maxsize=512)
def table(name: str, ranks: int, microbatches: int, chunks: int | None) -> Schedule:
    """A table of the catalogue, which needs no proof here."""
    return SCHEDULES[name].generate(ranks, microbatches, **({} if chunks is None else {"chunks": chunks}))


def under(plan: Plan, config: Config, batch: Config, device: Device) -> Timed:
    """A layout's plan under the schedule of a configuration and the batch of another; errors as above."""
    par = config.parallel
    name, chunks = par.pipeline_schedule or PLAIN, par.num_virtual_stages_per_pipeline_rank
    schedule = table(name, par.pipeline_model_parallel_size, batch.num_microbatches, chunks)
    there = replace(plan, schedule=schedule, counts=counts_of(config, schedule.placement))
    return replace(timed(there, batch, device), config=config)


def timed(plan: Plan, config: Config, device: Device) -> Timed:
    """A plan's step under its own batch."""
    schedule, alone = unpaired(plan.schedule), in_seconds(plan, config, device)
    costs = with_messages(alone, plan, config, device)
    clock = run_clock(schedule, costs)
    ranks, makespan, shows = len(schedule.ranks), max(ends[-1] for ends in clock.end), sums(plan, config, device)
    if plan.sharding:
        table = with_sharded_weights(schedule, costs, AHEAD)
        clock, schedule = run_clock(table, costs), table
        shows += max(map(max, clock.end)) - makespan
    held = [max(x for _, x, _ in curve) for curve in memory_steps(schedule, costs, clock)]
    share = config.num_microbatches / ranks  # on a rank of each chain, in the mean
    passes = sum(map(len, plan.schedule.ranks)) / ranks * costs.overhead
    parts = {
        "recomputation": share * (work_of(alone) - _least(config, plan, device)),
        "tp and cp messages": share * (work_of(costs) - work_of(alone)),
        "small passes": passes,
        "bubble": makespan - share * work_of(costs) - passes,
        SUMS: shows,
    }
    return Timed(config, plan, schedule.name, makespan + shows, max(map(add, held, plan.state_bytes)), parts)


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
