"""`tools/bench/schedules.py --post-validation`: consecutive steps with a barrier at the update and without."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from megapipe.schedule import Costs, Schedule, simulate, unpaired
from megapipe.schedule.costs import UNIT
from megapipe.schedule.ingredients import StepPasses
from megapipe.schedule.passes import repeated

Measured = Sequence[Sequence[Sequence[float]]]
"""[repeat][rank] -> (seconds of all steps, ...)."""


def both(schedule: Schedule) -> list[Schedule]:
    """The whole step with a barrier, and without."""
    return [StepPasses.whole(UNIT, barrier=barrier).around(unpaired(schedule), UNIT) for barrier in (True, False)]


def table(tables: Sequence[Schedule], measured: Sequence[Measured], costs: Costs, steps: int) -> str:
    """A line for each pair of `both`; `measured` of each table. Times are those of all steps over their number."""
    lines = [
        f"{steps} consecutive steps; the period is that of the schedule alone, the gain that of the step without a "
        "barrier over the one with it",
        "",
        "| schedule | period ms | barrier: predicted | measured | without: predicted | measured | measured/period "
        "| gain predicted | measured | share |",
        "|---|" + "---:|" * 9,
    ]
    for i in range(0, len(tables), 2):
        predicted = [simulate(repeated(x, steps), costs).makespan / steps * 1e3 for x in tables[i : i + 2]]
        seen = [
            statistics.median(max(rank[0] for rank in step) for step in of_table) / steps * 1e3
            for of_table in measured[i : i + 2]
        ]
        period = simulate(_passes(tables[i]), costs).period * 1e3
        told, found = predicted[0] - predicted[1], seen[0] - seen[1]
        lines.append(
            f"| {tables[i].name} | {period:.0f} | {predicted[0]:.0f} | {seen[0]:.0f} | {predicted[1]:.0f} "
            f"| {seen[1]:.0f} | {seen[1] / period:.3f} | {told:.0f} | {found:.0f} "
            f"| {f'{found / told:.0%}' if told > 1e-9 else ''} |"
        )
    return "\n".join(lines)


def _passes(schedule: Schedule) -> Schedule:
    """The table without what belongs to a stage as a whole."""
    rows = (tuple(step for step in row if not step[0].kind.traits.per_stage) for row in schedule.ranks)
    return Schedule(schedule.name, schedule.placement, schedule.num_microbatches, tuple(rows))
