"""Judge one plan of a search: its step and peak, extrapolated from two shorter batches.

What goes to another process and comes back is small: numbers and reasons, no table.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import cached_property
from math import inf
from typing import NamedTuple

from megapipe.commands.plan.search.judged.balanced import by_clock, by_work
from megapipe.commands.plan.search.judged.timed import Room, with_schedule
from megapipe.commands.plan.search.listed.bounds import Counted
from megapipe.commands.plan.search.listed.cells import is_movable, short, split_as, under
from megapipe.commands.plan.verdict import Machine
from megapipe.config import Config, ParallelConfig
from megapipe.errors import ConfigError, ScheduleError
from megapipe.plan import Plan, plan_of
from megapipe.plan.seconds.device import Device
from megapipe.plan.seconds.step import SUMS, UPDATE, Layout, layout_of
from megapipe.schedule.catalogue import PLAIN

OUT_OF_MEMORY = "out of memory"
SLOWER = "slower than others of their kind"
NO_TABLE = "without such stages or microbatches"
EVEN = "with ranks of equal work already"


Kind = tuple[bool, bool]
"""Whether weights are sharded, and whether there is a pipeline."""


class CandidatePlan(NamedTuple):
    """A plan to try: a cell and a schedule. A cell is a choice of parallel sizes and recomputation.

    Attributes:
        least: a lower bound of the step, in seconds.
        work: a lower bound without the time to fill the pipeline.
        cell: an index in the list of all cells.
        schedule: the schedule's name.
        chunks: stages on each rank; None for the schedule's own number.
        moves: whether single activations are offloaded or recomputed until the plan fits.
        balanced: whether stages have layers by their work, and not equally many.
    """

    least: float
    work: float
    cell: int
    schedule: str
    chunks: int | None
    moves: bool = False
    balanced: bool = False


class Rejection(NamedTuple):
    """The reason why a plan does not come into the report.

    Attributes:
        reason: why, in words of the report.
        step: seconds that a step of the plan takes at least; None if nothing was simulated.
        movable: whether the plan needs too much memory, but may fit if single activations are
            offloaded or recomputed.
        peak: bytes of the rank that needs most, if that is why.
    """

    reason: str
    step: float | None = None
    movable: bool = False
    peak: float = inf


@dataclass(frozen=True)
class ExtrapolatedPlan:
    """A plan that fits, with numbers that are extrapolated from shorter batches.

    Attributes:
        step: seconds of a step.
        peak: bytes of memory on the rank that needs most.
        parts: {cause: seconds of a step}, such as the bubble.
        moves: whether single activations are offloaded or recomputed.
        balanced: whether stages have layers by their work, and not equally many.
    """

    config: Config
    step: float
    peak: float
    parts: dict[str, float]
    moves: bool
    balanced: bool = False

    @cached_property
    def layout(self) -> Layout:
        """Return (tp, cp, pp, micro batch size, ep, etp)."""
        return layout_of(self.config)

    @property
    def schedule(self) -> str:
        """Return the name of the schedule."""
        return self.config.parallel.pipeline_schedule or PLAIN

    @property
    def kind(self) -> Kind:
        """Return (whether the plan shards weights, whether it has a pipeline)."""
        return kind_of(self.config)


def kind_of(config: Config) -> Kind:
    """Return (whether a configuration shards weights, whether it has a pipeline)."""
    par = config.parallel
    return par.use_megatron_fsdp, par.pipeline_model_parallel_size > 1


@dataclass
class Screen:
    """Tries candidates one at a time. Each process of a search has a Screen of its own.

    `judge` returns a plan that fits, or why a candidate is rejected.

    Attributes:
        cells: all choices of parallel sizes and recomputation.
        machine: the memory of a device and of a host.
        counted: the work of the layers of each cell.
        own: has the user's own overlap of data-parallel communication.
        last: (index of the last candidate's cell, plan of this cell or why there is none). The next
            candidate often has the same cell, and needs no new plan.
    """

    cells: list[Config]
    device: Device
    machine: Machine
    counted: Counted
    own: ParallelConfig = field(default_factory=ParallelConfig)
    last: tuple[int, Plan | Rejection] = field(default=(-1, Rejection(NO_TABLE)))

    def judge(self, candidate: CandidatePlan, limit: float) -> ExtrapolatedPlan | Rejection:
        """Return the candidate with its step if it fits, or why it is rejected.

        Args:
            candidate: the plan to try.
            limit: a plan whose step takes more seconds is rejected.
        """
        cell = self.cells[candidate.cell]
        plan = self._plan(candidate.cell)
        if isinstance(plan, Rejection):
            # A cell's plan has 1F1B, so its peak says nothing of other schedules.
            sharded = cell.parallel.use_megatron_fsdp
            return plan if sharded or candidate.schedule == PLAIN else plan._replace(peak=inf)
        try:
            config = self.config_of(candidate)
            if config is None:
                return Rejection(EVEN)
            judged = self._extrapolated(plan, config, candidate, limit)
        except (ConfigError, ScheduleError):
            return Rejection(OUT_OF_MEMORY if candidate.moves else NO_TABLE)
        if isinstance(judged, ExtrapolatedPlan):
            return replace(judged, balanced=candidate.balanced)
        return judged

    def config_of(self, candidate: CandidatePlan) -> Config | None:
        """Return the configuration of a candidate, with its schedule and the layers of its stages.

        Returns None for layers by their work if ranks have about equal work already.

        Args:
            candidate: a plan of the search.
        Raises: ConfigError, ScheduleError if there are no such stages or microbatches.
        """
        cell = self.cells[candidate.cell]
        config = under(cell, candidate.schedule, candidate.chunks)
        if not candidate.balanced:
            return config
        counts = by_work(self.counted.pieces(cell), short(config, 1), self.device)
        if counts is None:
            return None
        return split_as(config, counts)

    def is_uneven(self, candidate: CandidatePlan) -> bool | None:
        """Return whether ranks of a candidate have unequal work, if its layers are divided evenly.

        Returns None if there are no such stages or microbatches.

        Args:
            candidate: a plan of the search.
        """
        try:
            return self.config_of(candidate._replace(balanced=True)) is not None
        except (ConfigError, ScheduleError):
            return None

    def split_by_clock(self, x: ExtrapolatedPlan) -> Config:
        """Return a plan's configuration, with layers split so that a simulated step is shortest.

        Args:
            x: a plan that fits.
        Raises: ConfigError, ScheduleError if there is no such plan.
        """
        few = short(x.config, 2)
        plan = plan_of(few, self.counted.pieces(few))
        return split_as(x.config, by_clock(plan, few, self.machine.limit))

    def _plan(self, number: int) -> Plan | Rejection:
        """Return the plan of a cell for few microbatches, or why there is none.

        A cell is a layout that the search tries. There is no plan if weights and optimizer state
        alone need more memory than a device has. The same holds if a run could not start or save.

        Args:
            number: the index of the cell.
        """
        if self.last[0] != number:
            cell = self.cells[number]
            plan: Plan | Rejection
            try:
                plan = plan_of(short(cell, 1), self.counted.pieces(cell))
            except (ConfigError, ScheduleError):
                plan = Rejection(NO_TABLE)
            if isinstance(plan, Plan):
                mean = sum(plan.state_bytes) / cell.parallel.pipeline_model_parallel_size
                if mean > self.machine.limit:
                    plan = Rejection(OUT_OF_MEMORY, peak=max(plan.peak_bytes))
                elif reason := self.machine.refuses(plan, cell):
                    plan = Rejection(reason)
            self.last = (number, plan)
        return self.last[1]

    def _extrapolated(
        self, plan: Plan, config: Config, candidate: CandidatePlan, limit: float
    ) -> ExtrapolatedPlan | Rejection:
        moves = candidate.moves
        memory = self.machine.limit
        m = config.num_microbatches
        near = short(config, 1)
        far = short(config, 2)
        left = m - near.num_microbatches
        rest = candidate.least * left / m
        room = Room(memory, limit - rest) if moves else None
        one = with_schedule(plan, config, near, self.device, room)
        if one.peak > memory:
            movable = not moves and is_movable(config)
            return Rejection(OUT_OF_MEMORY, one.step + rest, movable, one.peak)
        if left == 0:
            return ExtrapolatedPlan(config, one.step, one.peak, one.parts, one.moves)
        if one.passes + rest > limit:
            return Rejection(SLOWER, one.passes + rest)
        room = Room(memory, inf) if moves else None
        other = with_schedule(plan, config, far, self.device, room)
        turns = left / (far.num_microbatches - near.num_microbatches)
        parts = {name: x + turns * (other.parts[name] - x) for name, x in one.parts.items()}
        # Gradient sums, gathers that are visible, and the update do not grow with the batch.
        step = one.passes + turns * (other.passes - one.passes)
        for name in (SUMS, UPDATE):
            parts[name] = other.parts[name]
            step += parts[name]
        peak = one.peak
        # A chunk that gathers its weights once for all microbatches holds the activations of all.
        if "sharding" in plan.own and not moves:
            peak += turns * (other.peak - one.peak)
        if peak > memory:
            return Rejection(OUT_OF_MEMORY, step, peak=peak)
        return ExtrapolatedPlan(config, step, peak, parts, one.moves)
