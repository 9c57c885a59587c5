"""The table of a run whose data-parallel ranks share gradients and weights: --use-megatron-fsdp, --use-torch-fsdp2."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple, Self

from megapipe.config import Config
from megapipe.plan.work import Work
from megapipe.schedule import Costs, Schedule
from megapipe.schedule.families.sharding.runs import GATHERS, REDUCES, SHARDS
from megapipe.schedule.families.sharding.sharded import Living, whole_at_most
from megapipe.schedule.simulate import simulate


class Sharding(NamedTuple):
    """Weights and gradients as shares between the runs of a stage's passes.

    Attributes:
        weights: they too, not gradients alone.
        replicas: ranks that have the same dense weights; same: the same experts.
        element, gradient: bytes of a weight, and of its gradient.
        link: FLOPs of a device while a byte comes over data parallel, where --pipeline-costs do not say.
        tp: ranks that share FLOPs and not what is gathered.
    """

    weights: bool
    replicas: int
    same: int
    element: int
    gradient: int
    link: float
    tp: int = 1

    @classmethod
    def asked(cls, config: Config, gradient: int) -> Self | None:
        """Shares of a run; None if it has none but of optimizer state. gradient: bytes of one."""
        par = config.parallel
        if not par.shards_grads or config.weight_replicas == 1:
            return None
        ranks = par.expert_model_parallel_size * par.etp * par.pipeline_model_parallel_size
        same = max(config.world_size // ranks, 1)
        element = config.precision.element_bytes
        sizes = config.weight_replicas, same, element, gradient
        return cls(par.shards_weights, *sizes, par.data_parallel_flops_per_byte, par.tensor_model_parallel_size)

    def kept(self, *, experts: bool = False) -> tuple[float, float]:
        """Bytes of a weight and of its gradient that a rank has between steps."""
        n = self.same if experts else self.replicas
        return self.element / n if self.weights else self.element, self.gradient / n

    def priced(
        self,
        costs: Costs,
        dense: Sequence[float],
        experts: Sequence[float],
        work: float,
        *,
        lighter: Sequence[float],
        lends: int = 0,
    ) -> Costs:
        """The costs of stages with those of their collectives.

        Args:
            dense, experts: parameters that a rank has of each stage.
            work: FLOPs of a microbatch's forward; that times the costs say tells the unit of time.
            lighter: bytes by which those that are gathered in eight bits are fewer.
            lends: the stage that borrows its head's weights of the first, which are gathered with it; 0: none does.
        """
        shared = ((dense, self.replicas), (experts, self.same))
        sent = [sum(both) for both in zip(*([x / n * (n - 1) for x in own] for own, n in shared), strict=True)]
        whole = [sum(both) for both in zip(dense, experts, strict=True)]
        came = [x + sent[0] * (0 < lends == i) for i, x in enumerate(sent)]
        unit = self.link * self.tp * (sum(costs.f) / work if isinstance(costs.f, tuple) and work else 1.0)
        if not (costs.a or costs.g):
            sends = (self.replicas - 1) / self.replicas
            a = tuple(unit * (self.element * x - less * sends) for x, less in zip(came, lighter, strict=True))
            costs = replace(costs, a=a, g=tuple(unit * self.gradient * x for x in sent))
        mem_a = tuple((self.element * x - less) * self.weights for x, less in zip(whole, lighter, strict=True))
        lent = tuple(mem_a[0] * (0 < lends == i) for i in range(len(mem_a)))
        return replace(costs, mem_a=mem_a, mem_g=tuple(self.gradient * x for x in whole), mem_lent=lent)

    def least(self, schedule: Schedule, costs: Costs) -> list[float]:
        """Bytes that are whole on each rank however shortly they live."""
        return whole_at_most(schedule, costs, Living(int(self.weights), 1))


def own_of(works: Sequence[Work], *, tp: int, expert_ranks: int) -> tuple[list[float], list[float]]:
    """The dense parameters of each stage that a rank has, and those of experts."""
    dense = [(work.parameters - work.experts) / tp for work in works]
    return dense, [work.experts / expert_ranks for work in works]


def whole_line(schedule: Schedule, costs: Costs, sharding: Sharding | None, given: Costs | None) -> str:
    """A line on how long weights live; empty for a table whose weights live for ever. given: of --pipeline-costs."""
    if sharding is None or schedule.kinds.isdisjoint(SHARDS):
        return ""
    rows = [[x.kind for step in row for x in step] for row in schedule.ranks]
    gathers, sums = (max(sum(x in kinds for x in row) for row in rows) for kinds in (GATHERS, REDUCES))
    whole = simulate(schedule, replace(costs, mem_b=0.0, mem_w=0.0, mem_s=0.0, mem_o=0.0, mem_r=0.0, mem_k=0.0))
    longer = simulate(schedule, costs).makespan / simulate(schedule.without(SHARDS), costs).makespan - 1
    assumed = "" if given and (given.a or given.g) else f", where a byte takes as long as {sharding.link:g} FLOPs"
    gathered = f"{gathers} gathers of weights and " if gathers else ""
    return (
        f"sharded: a rank makes up to {gathered}{sums} reductions of gradients a step, and has up to "
        f"{max(whole.peak) / 2**30:.3g} GiB of them whole at a time; {longer:.1%} of the step shows{assumed}"
    )
