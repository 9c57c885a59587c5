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
    """Settings: which of the passes that run once per step and stage are added to a table.

    `whole` returns the settings of a complete step, and `around` adds the passes to a table.

    Attributes:
        reduce: add G, the reduction of gradients over data parallelism.
        gather: add A, the gather of updated weights.
        update: add U, the update of the weights.
        validate: add V, which checks the last step's update. Then no update waits for the gradients
            of all ranks.
    """

    reduce: bool = False
    gather: bool = False
    update: bool = False
    validate: bool = False

    @classmethod
    def whole(cls, costs: Costs, *, barrier: bool = True) -> Self:
        """Return the settings of a complete step: G and U, and A if gathering takes time.

        Args:
            costs: if the gather takes time in them (`Costs.a`), A is added.
            barrier: updates wait for the gradients of all ranks, and V is left out. Otherwise V
                checks each update in the next step.
        """
        gathers = bool(costs.a)
        if isinstance(costs.a, tuple):
            gathers = any(costs.a)
        return cls(reduce=True, gather=gathers, update=True, validate=not barrier)

    def around(self, table: Schedule, costs: Costs) -> Schedule:
        """Return the table with these passes added, except a G or A that it has already.

        With `validate`, updates do not wait for other ranks.

        Args:
            costs: costs that decide where reductions stand in the rows.
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
