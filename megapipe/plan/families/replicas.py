"""Copies of each rank's state in memory (P), which --non-persistent-ckpt-type local asks for."""

from __future__ import annotations

from dataclasses import dataclass, replace

from megapipe.config import Config
from megapipe.errors import ConfigError, ScheduleError
from megapipe.plan.part import PlanFeature
from megapipe.plan.plan import OfPlan, Plan
from megapipe.plan.state import bytes_of_state
from megapipe.schedule import Costs, Schedule
from megapipe.schedule.core.joint import refuse_others
from megapipe.schedule.recipe import Recipe
from megapipe.schedule.simulate import simulate


@dataclass(frozen=True)
class Replicas(OfPlan):
    """The copies of each rank's state on peers, as an optional part of a plan.

    `priced` adds the time of the copies to the costs. `peak` adds what a peer of a missing rank
    holds. `summary` returns a line on what the copies cost and which failures they survive.

    Attributes:
        config: the configuration of the run.
        holds: what peers of a missing rank hold in addition, in words for errors; "" if no rank is
            missing.
    """

    config: Config
    holds: str = ""

    def priced(self, plan: Plan, costs: Costs, counted: Costs) -> Costs:
        """Return the costs with the time of copying a rank's state to its peers.

        Data-parallel replicas with equal states send nothing, so the costs stay as they are. A time
        that --pipeline-costs gives stays too.

        Args:
            costs: the costs of the plan's stages so far.
            counted: the costs by FLOPs, without --pipeline-costs.
        """
        sends = self.config.checkpoint.replication and self.config.equal_states == 1
        if costs.p or not sends:
            return costs
        # As sharding counts it: FLOPs of a device while it receives a byte.
        unit = self.config.parallel.data_parallel_flops_per_byte * plan.tp
        if isinstance(costs.f, tuple) and isinstance(counted.f, tuple) and any(counted.f):
            unit *= sum(costs.f) / sum(counted.f)
        sets = self.config.checkpoint.replicas_of(self.config.world_size)
        others = max(map(len, sets)) - 1
        return replace(costs, p=tuple(unit * others * x for x in stage_bytes(plan, self.config)))

    def peak(self, plan: Plan, usual: tuple[float, ...]) -> tuple[float, ...]:
        """Return, for each pipeline rank, the most bytes that it holds in a step beyond its state.

        A missing rank is a replica of the last pipeline rank. The other replicas then hold a second
        set of gradients, and at most the fullest rank's activations, see `Rerouted.follow`.

        Args:
            usual: these bytes if no rank is missing.
        """
        if not self.config.lacks_a_rank:
            return usual
        without = replace(
            plan,
            state=plan.state - plan.stored.gradient,
            whole=plan.whole._replace(gradient=0),
            stored=plan.stored._replace(gradient=0),
        )
        gradients = plan.state_bytes[-1] - without.state_bytes[-1]
        return (*usual[:-1], max(usual) + gradients)

    def summary(self, plan: Plan) -> str:
        """Return a line on the copies that ranks keep, what they protect from, and their cost."""
        config = self.config
        flags = config.checkpoint
        sizes = stage_bytes(plan, config)
        place = plan.schedule.placement
        most = max(
            sum(sizes[place.position(stage)] for stage in place.stages_on(rank))
            for rank in range(place.num_ranks)
        )
        every = flags.non_persistent_save_interval
        text = (
            f"in memory after every {every} step(s), twice: up to {round(most):,} bytes of a rank"
        )
        if config.equal_states > 1:
            states = f"{config.equal_states} equal states"
            if config.lacks_a_rank:
                states += f" ({config.equal_states - 1} of the missing rank's stages)"
            return (
                f"{text}. Nothing is sent: data parallelism keeps {states}, and a run goes on in "
                "memory while one of each is left"
            )
        if not flags.replication:
            return f"{text}, which is lost with its machine"
        world = config.world_size
        factor = flags.replication_factor
        ranks = max(map(len, flags.replicas_of(world)))
        jump = flags.replication_jump or world // factor
        survived = f"any machine of up to {jump} rank(s)"
        if factor == ranks == 2 and world > 2:
            survived += f", and {1 - 1 / (world - 1):.1%} of all pairs of ranks"
        return (
            f"{text}, which {ranks - 1} other(s) at a distance of {jump} keep too: they survive "
            f"the loss of {survived}; it makes a step {_slowdown(plan):.1%} longer"
        )


def stage_bytes(plan: Plan, config: Config) -> list[float]:
    """Return, for each stage, the bytes of its state on one rank.

    The state is main parameters and moments, without padding. Where the optimizer has no main
    parameters, the weights count.
    """
    _, moments, master = bytes_of_state(config.optimizer, config.precision.half)
    each = moments + (master or config.precision.element_bytes)
    sharded = config.parallel.splits_optimizer
    place = plan.schedule.placement
    firsts = place.rank_of[: place.chain * place.num_chains : place.chain]
    last = place.main - 1
    found = []
    for stage, work in enumerate(plan.works):
        dense = (work.parameters - work.experts) / plan.tp
        # A tied head on the embedding's rank has no state of its own.
        if plan.tied and stage == last and place.rank_of[last] in firsts:
            dense -= plan.vocab_weights / plan.tp
        experts = work.experts / plan.expert_ranks
        if sharded:
            dense /= config.weight_replicas
            experts /= config.expert_replicas
        found.append(each * (dense + experts))
    return found


def _slowdown(plan: Plan) -> float:
    """Return the fraction by which the copies make the simulated step longer."""
    table = Recipe(plan.schedule.name, replicas=True).around(plan.schedule)
    return simulate(table, plan.costs).makespan / plan.timeline.makespan - 1


def _of(config: Config, *_: Schedule | None) -> Replicas | None:
    if not config.copies_state:
        return None
    holds = ""
    if config.lacks_a_rank:
        holds = "gradients of a missing rank's microbatches"
    return Replicas(config, holds)


def _check_made(config: Config, table: Schedule, recipe: Recipe) -> None:
    """Refuse a table if a rank is missing and its peers cannot run its passes.

    Raises: ConfigError with the reason.
    """
    if not config.lacks_a_rank:
        return
    why = ""
    if table.placement.num_chains > 1:
        why = f"Each stage of {table.name} is on two ranks already."
    try:
        refuse_others(table)
    except ScheduleError as error:
        why = str(error)
    if why:
        raise ConfigError(
            f"--elastic: a rank is missing, and its passes cannot be rerouted. {why} Start all "
            "ranks."
        )


REPLICAS = PlanFeature("replicas", of=_of, check_made=_check_made)
