"""Gradients, or weights too, that data-parallel ranks shard (AF, AB, RS).

--use-megatron-fsdp or --use-torch-fsdp2 asks for them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from megapipe.config import Config
from megapipe.errors import ConfigError
from megapipe.plan.layers import Work
from megapipe.plan.part import PlanFeature
from megapipe.plan.plan import OfPlan, ParameterBytes, Plan
from megapipe.schedule import Costs, Kind, Schedule
from megapipe.schedule.families.sharding.runs import GATHERS, REDUCES, SHARDS
from megapipe.schedule.families.sharding.sharded import UnshardedStages, whole_at_most
from megapipe.schedule.simulate import simulate


@dataclass(frozen=True)
class Sharding(OfPlan):
    """The shards of gradients, or of weights too, as an optional part of a plan.

    Full tensors exist only while consecutive passes of a stage use them. `priced` adds the times of
    collectives and the bytes of gathered tensors to the costs. `stored` and `least` return bytes
    that a rank needs, and `summary` a line on all this.

    Attributes:
        weights: weights are sharded too, not only gradients.
        replicas: number of ranks among which dense weights are sharded.
        expert_replicas: number of ranks among which the weights of an expert are sharded.
        link: FLOPs that a device computes while it receives a byte from a data-parallel rank. This
            number gives the times of gathers, unless --pipeline-costs has them.
    """

    weights: bool
    replicas: int
    expert_replicas: int
    link: float

    holds = "gathered weights and gradients"

    def stored(self, whole: ParameterBytes, *, experts: bool) -> ParameterBytes:
        """Return the bytes of one parameter's weight and gradient that a rank keeps.

        Args:
            whole: the bytes without sharding.
            experts: the parameter is an expert's, which is sharded among fewer ranks.
        """
        ranks = self.expert_replicas if experts else self.replicas
        weight = whole.weight
        if self.weights:
            weight /= ranks
        return ParameterBytes(weight, whole.gradient / ranks)

    def priced(self, plan: Plan, costs: Costs, counted: Costs) -> Costs:
        """Return the costs with the times of gathers and reduce-scatters, and with gathered bytes.

        Args:
            costs: the costs of the plan's stages so far.
            counted: the costs by FLOPs, without --pipeline-costs.
        """
        own = _own_stages(plan)
        element, gradient = plan.whole
        size = [sum(both) for both in zip(own.dense, own.experts, strict=True)]
        # Elements that a rank sends of each stage, in a ring: all shards but one.
        sent = []
        for dense, experts in zip(own.dense, own.experts, strict=True):
            of_dense = dense / self.replicas * (self.replicas - 1)
            sent.append(of_dense + experts / self.expert_replicas * (self.expert_replicas - 1))
        # --pipeline-costs may say what collectives take.
        if not (costs.a or costs.g):
            unit = self._time_of_a_byte(plan, costs, counted)
            came = [*sent]
            # A head that reads the embedding's weight gathers it too, and reduces no gradient.
            if own.borrows:
                came[own.borrows] += sent[0]
            sends = (self.replicas - 1) / self.replicas
            bytes_in = [
                element * x - less * sends for x, less in zip(came, own.lighter, strict=True)
            ]
            gathers = tuple(unit * x for x in bytes_in)
            sums = tuple(unit * gradient * x for x in sent)
            costs = replace(costs, a=gathers, g=sums)
        gathered = [0.0] * len(size)
        if self.weights:
            gathered = [element * x - less for x, less in zip(size, own.lighter, strict=True)]
        tied = [0.0] * len(size)
        if own.borrows:
            tied[own.borrows] = gathered[0]
        whole = tuple(gradient * x for x in size)
        return replace(costs, mem_a=tuple(gathered), mem_g=whole, mem_lent=tuple(tied))

    def least(self, plan: Plan) -> Sequence[float]:
        """Return, for each rank, the most bytes of full tensors if passes free them early."""
        return whole_at_most(plan.schedule, plan.costs, UnshardedStages(int(self.weights), 1))

    def summary(self, plan: Plan) -> str:
        """Return a line on collectives: their number, their time, and GiB of full tensors.

        The line is "" for a table without such collectives.
        """
        table = plan.schedule
        if table.kinds.isdisjoint(SHARDS):
            return ""
        costs = plan.costs
        # The peak of gathered tensors without activations, and the step without collectives.
        alone = replace(costs, **{f"mem_{letter}": 0.0 for letter in "bwsorkp"})
        whole = max(simulate(table, alone).peak)
        plain = simulate(table.without(SHARDS), costs).makespan
        longer = simulate(table, costs).makespan / plain - 1
        assumed = f", where a byte takes as long as {self.link:g} FLOPs"
        if plan.given and (plan.given.a or plan.given.g):
            assumed = ""
        gathered = ""
        if gathers := _most_of_a_rank(table, GATHERS):
            gathered = f"{gathers} gathers of weights and "
        sums = _most_of_a_rank(table, REDUCES)
        text = (
            f"sharded: a rank makes up to {gathered}{sums} reductions of "
            f"gradients a step, and has up to {whole / 2**30:.3g} GiB of them whole at a time; "
            f"passes take {longer:.1%} longer by them{assumed}"
        )
        place = table.placement
        if place.num_stages == place.num_ranks and self.weights:
            text += _in_parts(sum(plan.counts), place.num_ranks)
        return text

    def _time_of_a_byte(self, plan: Plan, costs: Costs, counted: Costs) -> float:
        # Tensor-parallel ranks share FLOPs; each gathers its own part of a weight.
        unit = self.link * plan.tp
        # Given times have a unit of their own: the same forwards in both give the rate.
        if isinstance(costs.f, tuple) and isinstance(counted.f, tuple) and any(counted.f):
            unit *= sum(costs.f) / sum(counted.f)
        return unit


def _in_parts(layers: int, ranks: int) -> str:
    """Return a line on flags with which ranks gather their weights in parts; "" if they have none.

    Args:
        layers: layers of the model.
        ranks: pipeline ranks.
    """
    numbers = [n for n in range(2, layers // ranks + 1) if layers % (ranks * n) == 0]
    if not numbers:
        return ""
    name = "breadth-first"
    # Hanayo goes down and up, so that it has an even number of parts.
    if even := [n for n in numbers if n % 2 == 0]:
        name = "hanayo"
        numbers = even
    return (
        "\nall weights of a rank are whole at once, as it has one stage: "
        f"--pipeline-schedule {name} --num-virtual-stages-per-pipeline-rank N gathers them in N "
        f"parts (N may be {', '.join(map(str, numbers))}), and lets go of as many as "
        "--memory-limit-gib needs"
    )


class _Own(NamedTuple):
    """The number of parameters of each stage on one tensor-parallel rank.

    Lists are in the order of the stages.

    Attributes:
        dense: parameters outside experts.
        experts: parameters of experts.
        lighter: bytes that a gather of the stage saves because weights are sent in eight bits.
        borrows: index of the stage whose head reads a tied embedding on its own rank; 0 for none.
    """

    dense: list[float]
    experts: list[float]
    lighter: list[float]
    borrows: int = 0


def _own_stages(plan: Plan) -> _Own:
    """Return the number of parameters of each stage that are sharded and gathered.

    Rows of a vocabulary that is split over the pipeline are never sharded, so they do not count.
    The tied weight of a rank with both embedding and head counts once.
    """
    place = plan.schedule.placement
    works: list[Work] = list(plan.works[: place.chain])
    borrows = 0
    last = place.main - 1
    firsts = place.rank_of[: place.chain * place.num_chains : place.chain]
    if place.vocabulary:
        # A part of the embedding and one of the head.
        rows = 2 * plan.vocab_weights // plan.pieces.shares
        for at, span in enumerate(plan.spans[: place.chain]):
            if span.share is not None:
                works[at] = replace(works[at], parameters=works[at].parameters - rows)
    elif plan.tied and place.rank_of[last] in firsts:
        works[last] = replace(works[last], parameters=works[last].parameters - plan.vocab_weights)
        borrows = last
    return _Own(
        dense=[(work.parameters - work.experts) / plan.tp for work in works],
        experts=[work.experts / plan.expert_ranks for work in works],
        lighter=[work.lighter for work in works],
        borrows=borrows,
    )


def _most_of_a_rank(table: Schedule, kinds: frozenset[Kind]) -> int:
    most = 0
    for row in table.ranks:
        most = max(most, sum(x.kind in kinds for step in row for x in step))
    return most


def _of(config: Config, *_: Schedule | None) -> Sharding | None:
    par = config.parallel
    if not par.shards_grads or config.weight_replicas == 1:
        return None
    return Sharding(
        weights=par.shards_weights,
        replicas=config.weight_replicas,
        expert_replicas=config.expert_replicas,
        link=par.data_parallel_flops_per_byte,
    )


SHARDING = PlanFeature(
    "sharding",
    of=_of,
    refused=lambda _, error: ConfigError(f"--data-parallel-sharding-strategy: {error}"),
)
