"""The terms by which a table is judged while it is made, and how a searched order is searched."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from math import inf
from typing import Protocol

from megapipe.errors import ScheduleError
from megapipe.schedule.costs import UNIT, Costs
from megapipe.schedule.passes import Placement, Schedule


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
