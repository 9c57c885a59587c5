"""What is asked of the rest of a step, and the table with it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

from megapipe.schedule.costs import Costs
from megapipe.schedule.families.step.optimizer import with_gather, with_optimizer
from megapipe.schedule.families.step.reduction import with_reduction
from megapipe.schedule.kinds import Kind
from megapipe.schedule.passes import Schedule


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
            return with_optimizer(
                table, barrier=not self.validate, gather="ahead" if gather else "none"
            )
        return with_gather(table) if gather else table


NO_STEP = StepPasses()
"""F, B, W and BW alone: a step ends with its last gradient."""
