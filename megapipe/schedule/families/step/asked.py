"""The settings of the rest of a step, and the table with it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

from megapipe.schedule.costs import Costs
from megapipe.schedule.families.step.optimizer import Gather, with_gather, with_optimizer
from megapipe.schedule.families.step.reduction import with_reduction
from megapipe.schedule.kinds import Kind
from megapipe.schedule.passes import Schedule


@dataclass(frozen=True)
class StepPasses:
    """The passes to add that run once per step and stage.

    `whole` returns the settings of a complete step, and `around` adds the passes to a table.

    Attributes:
        reduce, gather, update, validate: add G, A, U and V.
    """

    reduce: bool = False
    gather: bool = False
    update: bool = False
    validate: bool = False

    @classmethod
    def whole(cls, costs: Costs, *, barrier: bool = True) -> Self:
        """Return the settings of a complete step; it gathers weights if that takes time.

        Args:
            barrier: updates wait for the gradients of all ranks, so that none is validated later.
        """
        gathers = bool(costs.a)
        if isinstance(costs.a, tuple):
            gathers = any(costs.a)
        return cls(reduce=True, gather=gathers, update=True, validate=not barrier)

    def around(self, table: Schedule, costs: Costs) -> Schedule:
        """Return the table with these passes, as far as it lacks them.

        An update that is validated does not wait for other ranks.
        """
        # Reductions first: updates run in the order in which gradients are reduced.
        if self.reduce and Kind.G not in table.kinds:
            table = with_reduction(table, costs)
        gather = self.gather and Kind.A not in table.kinds
        if self.update or self.validate:
            when: Gather = "none"
            if gather:
                when = "ahead"
            return with_optimizer(table, barrier=not self.validate, gather=when)
        if gather:
            return with_gather(table)
        return table


NO_STEP = StepPasses()
"""No such passes: a step ends with its last gradient."""
