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
        reduce: add G, the reduction of gradients over data parallelism.
        gather: add A, the gather of updated weights.
        update: add U, the update of the weights.
        validate: add V, which checks the last step's update. No update waits for all ranks then.
    """

    reduce: bool = False
    gather: bool = False
    update: bool = False
    validate: bool = False

    @classmethod
    def whole(cls, costs: Costs, *, barrier: bool = True) -> Self:
        """Return the settings of a complete step: G and U, and A if gathering takes time.

        Args:
            barrier: updates wait for the gradients of all ranks, and V is left out. Otherwise V
                checks each update in the next step.
        """
        gathers = bool(costs.a)
        if isinstance(costs.a, tuple):
            gathers = any(costs.a)
        return cls(reduce=True, gather=gathers, update=True, validate=not barrier)

    def around(self, table: Schedule, costs: Costs) -> Schedule:
        """Return the table with these passes. A G or A that the table has is not added again.

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
