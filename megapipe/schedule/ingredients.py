"""What a recipe is made of: its parts, and the terms by which a table is judged while it is made."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from math import inf
from typing import Protocol, Self

from megapipe.errors import ScheduleError
from megapipe.schedule.costs import SHARES, UNIT, Costs
from megapipe.schedule.families.offload.solve import FEW_TRIES
from megapipe.schedule.families.sharding.runs import GATHERS, REDUCES
from megapipe.schedule.families.sharding.sharded import Living
from megapipe.schedule.families.step.optimizer import with_gather, with_optimizer
from megapipe.schedule.families.step.reduction import with_reduction
from megapipe.schedule.kinds import Kind
from megapipe.schedule.passes import Placement, Schedule

MOVES = frozenset({Kind.O, Kind.L, Kind.R})
"""Passes that move activations out of the way: copies to the host and back, and second forwards."""
SHARDS = frozenset(GATHERS | REDUCES)
"""Passes that gather weights and reduce gradients for runs of a stage's passes."""


class Refused(ScheduleError):
    """A part of a recipe that cannot be made.

    Attributes:
        part: the field of the recipe.
    """

    def __init__(self, part: str, error: ScheduleError) -> None:
        super().__init__(error.problems)
        self.part = part


class Terms(Protocol):
    """What a table is judged by while it is made: times and memory of its stages, and the room of its ranks.

    A plan answers by the layers that it puts on the table's stages, `Fixed` always the same.
    """

    def costs(self, table: Schedule) -> Costs:
        """Return the costs of the table's stages."""
        ...

    def room(self, table: Schedule) -> tuple[float, ...] | None:
        """Return the most activation that each rank may hold, in the unit of the costs; None for no limit."""
        ...


@dataclass(frozen=True)
class Fixed:
    """Terms of a table whose stages are known, or all of one kind.

    Attributes:
        price: the costs of any table; memory: the room of each rank, or of all of them; None for no limit.
        depths: of multi-token prediction, which lists of costs name last and a table may not have yet.
    """

    price: Costs = UNIT
    memory: float | tuple[float, ...] | None = None
    depths: int = 0

    def costs(self, table: Schedule) -> Costs:
        if table.placement.depths == self.depths:
            return self.price
        return self.price.of_positions(table.placement.chain)

    def room(self, table: Schedule) -> tuple[float, ...] | None:
        if self.memory is None or isinstance(self.memory, tuple):
            return self.memory
        return (self.memory,) * table.placement.num_ranks


@dataclass(frozen=True)
class Search:
    """How the order is searched.

    Attributes:
        placements: the stages to choose from.
        objective, effort, seconds, portable: as `search` takes them.
        progress: called with the share of the effort spent.
    """

    placements: tuple[Placement, ...]
    objective: str = "makespan"
    effort: float = 4.0
    seconds: float = inf
    portable: bool = False
    progress: Callable[[float], None] | None = field(default=None, compare=False, repr=False)


@dataclass(frozen=True)
class Pairing:
    """Two passes run together, so that the communication of one hides behind the arithmetic of the other.

    Attributes:
        split: backwards without a partner are split where the table has them whole too.
        share: part of F and of B that counts as communication where the costs name none; 0 leaves the costs alone.
    """

    split: bool = False
    share: float = 0.0

    def linked(self, costs: Costs) -> Costs:
        """Return the costs with the share of communication, unless they name one."""
        named = costs.fb is not None or any(getattr(costs, name) for name in SHARES)
        return costs if named or not self.share else replace(costs, link_f=self.share, link_b=self.share)


@dataclass(frozen=True)
class Offload:
    """Activations that leave the device, to the host (O, L) or to be computed again (R).

    Attributes:
        when: "all" copies whatever is back in time. "fits" holds, copies or recomputes, whichever is fastest in the
            room. "needed" does so only where the table does not fit, or any order is allowed and it is faster.
        any_order: with "needed": search other orders of the same stages too.
        chunks: with "all": copy for the first stages of each rank alone, this many.
        switch: with "all": this many neighbouring ranks share the way to the host.
        tries: changes of single choices that "fits" tries; most: a makespan that is too long to be of interest.
        other: tables that "fits" may choose in place of the one that was made.
    """

    when: str = "all"
    any_order: bool = False
    chunks: int | None = None
    switch: int | None = None
    tries: int | None = FEW_TRIES
    most: float = inf
    other: tuple[Schedule, ...] = ()


@dataclass(frozen=True)
class Sharding:
    """Gradients, or weights too, that are gathered over data parallel for runs of a stage's passes.

    Attributes:
        weights: weights too, not gradients alone.
        living: how many stages live at a time; None: whatever is fastest in the room.
    """

    weights: bool = True
    living: Living | None = None

    @property
    def shortest(self) -> Living:
        """How few stages may live at a time."""
        return Living(int(self.weights), 1)


@dataclass(frozen=True)
class StepPasses:
    """The passes of a stage as a whole: reduce gradients (G), gather (A), update (U) and validate (V)."""

    reduce: bool = False
    gather: bool = False
    update: bool = False
    validate: bool = False

    @classmethod
    def whole(cls, costs: Costs, *, barrier: bool = True) -> Self:
        """Return everything that belongs to a step: reduction, update and, if it takes time, gathering."""
        gathers = costs.a if isinstance(costs.a, tuple) else (costs.a,)
        return cls(reduce=True, gather=any(gathers), update=True, validate=not barrier)

    def around(self, table: Schedule, costs: Costs) -> Schedule:
        """Return the table with those passes that it lacks. An update that is validated waits for no other rank."""
        if self.reduce and Kind.G not in table.kinds:
            table = with_reduction(table, costs)
        gather = self.gather and Kind.A not in table.kinds
        if self.update or self.validate:
            return with_optimizer(table, barrier=not self.validate, gather="ahead" if gather else "none")
        return with_gather(table) if gather else table


NO_STEP = StepPasses()
"""F, B, W and BW alone: a step ends with its last gradient."""
