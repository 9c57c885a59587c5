"""Predict the seconds of a plan's step on a device, part by part, with the simulator."""

from __future__ import annotations

from dataclasses import dataclass, replace
from operator import add
from typing import Any

from megapipe.config import Config
from megapipe.plan.make import pieces_of
from megapipe.plan.plan import Plan
from megapipe.plan.seconds.device import Device
from megapipe.plan.seconds.late import is_late, late_parts, took
from megapipe.plan.seconds.messages import causes_of_layer, with_messages
from megapipe.plan.seconds.replicas import exposed, reductions
from megapipe.plan.seconds.update import update
from megapipe.schedule import Costs
from megapipe.schedule.costs import HEAD
from megapipe.schedule.families.family import mean, times
from megapipe.schedule.families.offload.rules import MOVES
from megapipe.schedule.families.sharding.asked import Sharding
from megapipe.schedule.families.sharding.runs import SHARDS
from megapipe.schedule.families.sharding.sharded import UnshardedStages
from megapipe.schedule.ingredients import FixedCosts
from megapipe.schedule.recipe import Recipe
from megapipe.schedule.simulate import SimulatedTimes, memory_steps, run_clock

Layout = tuple[int, ...]
SUMS = "gradient sums"
UPDATE = "update"
MOVED = "activations out of the way"
_ANY = Device(memory=1e12)
"""The device of `basis`. Any other would do, if no work on it takes no time."""
AHEAD = UnshardedStages(2, 1, ahead=True)
"""How long a search keeps gathered weights: for the present stage and the next one.

A run chooses by its own table.
"""


@dataclass(frozen=True)
class TimedPlan:
    """A plan with the predicted seconds of its step.

    `layout` returns the sizes of the plan's parallelism, `moves` whether its table offloads or
    recomputes activations, and `passes` the seconds before the reduction of gradients.

    Attributes:
        config: the configuration.
        plan: the plan.
        schedule: the name of the plan's schedule.
        step: seconds of a step.
        peak: bytes of memory on the rank that needs most.
        parts: {cause, such as "bubble": its seconds of a step}. The rest of the step is the work of
            F, B and W, which every plan has.
    """

    config: Config
    plan: Plan
    schedule: str
    step: float
    peak: float
    parts: dict[str, float]

    @property
    def layout(self) -> Layout:
        """Return (tp, cp, pp, micro batch size, ep, etp)."""
        return layout_of(self.config)

    @property
    def moves(self) -> bool:
        """Return whether the plan's table has passes that offload or recompute activations."""
        return not self.plan.schedule.kinds.isdisjoint(MOVES)

    @property
    def passes(self) -> float:
        """Return the seconds of the step before gradients are reduced and weights updated."""
        return self.step - self.parts[SUMS] - self.parts[UPDATE]


def layout_of(config: Config) -> Layout:
    """Return (tp, cp, pp, micro batch size, ep, etp) of a configuration.

    etp is the number of ranks that split each expert.
    """
    par = config.parallel
    sizes = (
        par.tensor_model_parallel_size,
        par.context_parallel_size,
        par.pipeline_model_parallel_size,
    )
    return (*sizes, config.batch.micro_batch, par.expert_model_parallel_size, par.etp)


def timed(plan: Plan, config: Config, device: Device) -> TimedPlan:
    """Return a plan with the predicted seconds of its step.

    Args:
        config: the configuration from which the plan was made.
    """
    whole = plan.schedule
    alone = in_seconds(plan, config, device)
    costs = with_messages(alone, plan, config, device)
    sharded = "sharding" in plan.own
    # The same table without sharding, and without offloading too: what each of them costs is the
    # difference of two simulations.
    schedule = whole.without(SHARDS) if sharded else whole
    plain = schedule.without(MOVES) if schedule.kinds & MOVES else schedule
    clock = run_clock(schedule, costs)
    makespan = took(schedule, config, costs, clock)
    # Before the gathers of sharded weights, whose passes are no work.
    plain_clock = clock
    of_passes = makespan
    if plain is not schedule:
        plain_clock = run_clock(plain, costs)
        of_passes = took(plain, config, costs, plain_clock)
    moves = makespan - of_passes
    if is_late(config):
        at_end, updated = late_parts(plan, config, device, schedule, clock, costs, makespan)
    else:
        at_end = exposed(plan, config, device, schedule, clock)
        updated = update(plan, config, device)
    if sharded:
        if schedule.kinds == whole.kinds:
            recipe = Recipe(schedule.name, sharding=Sharding(living=AHEAD))
            schedule = recipe.finish(schedule, FixedCosts(costs)).table
        else:
            schedule = whole
        clock = run_clock(schedule, costs)
        at_end += took(schedule, config, costs, clock) - makespan
    ranks = len(schedule.ranks)
    held = [max(x for _, x, _ in curve) for curve in memory_steps(schedule, costs, clock)]
    # The mean number of microbatches of a rank: with two copies of the model each has half of them.
    share = config.num_microbatches / ranks
    # Only passes of layers have the overhead. A pair has it once.
    small = [x for row in plain.ranks for x in row if x[0].kind.traits.costs[0] in "fbw"]
    passes = len(small) / ranks * costs.overhead
    work = share * work_of(alone)
    if plain.placement.vocabulary:
        # Each rank has a share of every microbatch's head and embedding: S, T, and E, C, EW.
        work += config.num_microbatches * (mean(alone.s) + mean(alone.t) + 3 * mean(alone.e))
    # Passes that run together take less than their sum: what a pair hides of its communication.
    busy = _busy(plain_clock) / ranks
    waits = causes_of_layer(alone, plan, config, device)
    # Pairs hide some of the communication, in equal shares of all its causes.
    visible = (busy - passes - work) / (sum(waits.values()) or 1.0)
    parts = {
        "recomputation": share * (work_of(alone) - _least(config, plan, device)),
        **{name: visible * seconds for name, seconds in waits.items()},
        "small passes": passes,
        "bubble": of_passes - busy,
        MOVED: moves,
        SUMS: at_end,
        UPDATE: updated,
    }
    peak = max(map(add, held, plan.state_bytes))
    return TimedPlan(config, plan, schedule.name, makespan + at_end + updated, peak, parts)


def basis(plan: Plan, config: Config) -> tuple[object, ...]:
    """Return the numbers from which `timed` computes a step, on one device for all plans.

    A flag that changes the step of a plan changes some of these numbers.
    """
    if plan.given is not None:
        return (_rounded(plan.costs),)
    costs = with_messages(in_seconds(plan, config, _ANY), plan, config, _ANY)
    return (
        _rounded(costs),
        f"{update(plan, config, _ANY):.6g}",
        [f"{seconds:.6g}" for seconds in reductions(plan, config, _ANY)],
        *["no barrier"] * is_late(config),
    )


def _rounded(costs: Costs) -> list[str]:
    """Return the times as text, with six digits, which do not depend on the machine."""
    found = []
    for name, value in vars(costs).items():
        # Of sizes only the peak counts, and the head is a part of the last stage.
        if name.startswith("mem_") or name in HEAD:
            continue
        values = value if isinstance(value, tuple) else (value,)
        found += [name, *(f"{x:.6g}" for x in values if x is not None)]
    return found


def bubble(plan: Plan, config: Config, device: Device, *, equal: bool) -> float:
    """Return the mean seconds in which a rank waits, if messages between stages take no time.

    Args:
        equal: whether all stages get the mean work of a stage.
    """
    costs = with_messages(in_seconds(plan, config, device), plan, config, device)
    costs = replace(costs, comm=0.0)
    if equal:
        means: dict[str, Any] = {}
        for name in "fbw":
            column = getattr(costs, name)
            if isinstance(column, tuple):
                means[name] = (sum(column) / len(column),) * len(column)
        costs = replace(costs, **means)
    table = plan.schedule.without(SHARDS | MOVES)
    clock = run_clock(table, costs)
    return took(table, config, costs, clock) - _busy(clock) / len(table.ranks)


def _busy(clock: SimulatedTimes) -> float:
    """Return the seconds in which ranks run passes, summed over the ranks.

    Args:
        clock: start and end of each entry of each rank's row: a pass, or an overlapped pair.
    """
    return sum(sum(ends) - sum(starts) for starts, ends in zip(clock.start, clock.end, strict=True))


def _least(config: Config, plan: Plan, device: Device) -> float:
    """Return the seconds of F, B and W of one microbatch on all stages, without recomputation."""
    model = replace(config.model, recompute_granularity=None, recompute_activations=False)
    pieces = plan.pieces
    if model != config.model:
        # Ranks that share the vocabulary have its work in other passes than F, B and W.
        pieces = replace(pieces_of(config, model), shares=pieces.shares)
    return work_of(in_seconds(replace(plan, pieces=pieces), config, device))


def in_seconds(plan: Plan, config: Config, device: Device) -> Costs:
    """Return the costs of a plan in seconds, without communication."""
    costs = plan.costs
    rate = of_a_flop(plan, config, device)
    # s, t and e of a shared vocabulary are one number for all ranks.
    scaled: dict[str, Any] = {name: times(rate, getattr(costs, name)) for name in "fbwolste"}
    return replace(costs, **scaled, overhead=device.overhead)


def of_a_flop(plan: Plan, config: Config, device: Device) -> float:
    """Return the seconds that a FLOP of a plan's passes takes, which tensor ranks share."""
    tp = config.parallel.tensor_model_parallel_size
    return 1 / (tp * device.rate(mean_product(plan) / tp))


def mean_product(plan: Plan) -> float:
    """Return the mean FLOP of one matrix product in a layer's forward.

    The product is counted before tensor parallelism splits it.
    """
    layers = plan.pieces.layers
    # Four products of a layer stand for all: of queries, keys and values; of their output; and the
    # two of an MLP. A slice has its part of the rows.
    forward = sum(layer.f for layer in layers) / max(1, len(layers))
    return forward / 4 / (len(plan.schedule.cuts) or 1)


def work_of(costs: Costs) -> float:
    """Return the seconds of F, B and W of one microbatch, summed over the stages."""
    return sum(sum(x) for x in (costs.f, costs.b, costs.w) if isinstance(x, tuple))
