"""A draft of a plan: the costs of a run's layers on the stages of a table that is being made."""

from __future__ import annotations

from dataclasses import dataclass, replace

from megapipe.config import Config
from megapipe.partition.layout import AUTO
from megapipe.plan.auto import balanced
from megapipe.plan.layers import Work
from megapipe.plan.parts import own_parts
from megapipe.plan.plan import Plan
from megapipe.plan.split import counts_of, is_searched, schedule_name
from megapipe.plan.state import GIB
from megapipe.schedule import Costs, Placement, Schedule


@dataclass(frozen=True)
class PlanDraft:
    """A plan whose schedule is still being made. The draft returns the costs of any schedule.

    A `Recipe` makes the schedule (a table of passes) step by step, and calls `costs` and `room`
    (memory limits) on the way. `plan` then returns the plan with the finished table.

    Attributes:
        config: the configuration of the run.
        base: the plan with a table that has no passes, and without multi-token prediction.
        depths: the work of each module (depth) of multi-token prediction.
        counts: number of layers of each stage, in the model's order. None splits the layers as the
            flags say, for each placement of stages that is tried. Where the flags leave the split
            to a search, stages get nearly equal work.
    """

    config: Config
    base: Plan
    depths: tuple[Work, ...] = ()
    counts: tuple[int, ...] | None = None

    def plan(self, table: Schedule) -> Plan:
        """Return the plan with this table.

        If the table has multi-token prediction, the plan includes that work.
        """
        counts = self.counts or self._counts(table.placement)
        # The order of the own chain is found first, with pieces and stages that have no depths.
        pieces = self.base.pieces
        if table.placement.depths:
            pieces = replace(pieces, depths=self.depths)
        return replace(self.base, schedule=table, counts=counts, pieces=pieces)

    def _counts(self, place: Placement) -> tuple[int, ...]:
        # A search knows no table yet that could judge a split: stages of equal work are a start.
        layout = self.config.parallel.pipeline_model_parallel_layout
        if layout == AUTO and is_searched(schedule_name(self.config)):
            return balanced(self.base.pieces, place.main)
        return counts_of(self.config, place.own_chain)

    def costs(self, table: Schedule) -> Costs:
        """Return the times and bytes of the passes of a table's stages.

        The costs of features that need a finished table, such as CUDA graphs, are not included.
        Bytes that a pass needs only while it runs count as 0: `room` subtracts them.
        """
        costs = replace(self.plan(table), own=own_parts(self.config, table)).costs
        # Searches count what passes leave. `room` has room for what they need while they run.
        return replace(costs, mem_p=0.0)

    def room(self, table: Schedule) -> tuple[float, ...] | None:
        """Return, for each rank, the bytes that --memory-limit-gib leaves for activations.

        The rank's state, and the bytes that a pass needs only while it runs, are subtracted from
        the limit. Returns None without that flag.
        """
        limit = self.config.parallel.memory_limit_gib
        if limit is None:
            return None
        # Parameters and their state are there before any pass runs.
        plan = self.plan(table)
        place = table.placement
        passing = plan.costs.by_stage("mem_p", place)
        most = [max(passing[stage] for stage in place.stages_on(r)) for r in range(place.num_ranks)]
        return tuple(limit * GIB - x - y for x, y in zip(plan.state_bytes, most, strict=True))
