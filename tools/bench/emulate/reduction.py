"""`tools/bench/schedules.py --reduction X`: how much longer a step takes by the sum of its gradients over data
parallel, once at the end and stage by stage beside the passes (--overlap-grad-reduce).

With --dp 2 --reduction-mib N the link is real: gloo sums N MiB for each device share while passes sleep.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import replace

from megapipe.schedule import Costs, Kind, Pass, Schedule, build, simulate, unpaired
from megapipe.schedule.transforms.reduction import exposed, with_reduction
from tools.bench.emulate.late import Measured
from tools.bench.emulate.pool import Job, Turns, run_pool


def three(schedule: Schedule) -> list[Schedule]:
    """Tables without a reduction, with all of it behind a rank's last pass, and with G where each stage is done."""
    plain = unpaired(schedule)
    stages = [plain.placement.stages_on(rank) for rank in range(plain.placement.num_ranks)]
    back = [tuple((Pass(Kind.G, stage, 0),) for stage in own) for own in stages]
    at_end = replace(plain, ranks=tuple(row + end for row, end in zip(plain.ranks, back, strict=True)))
    return [plain, at_end, with_reduction(plain)]


def link_of(turns: Turns) -> float:
    """Seconds in which gloo sums a device share's gradients here, all ranks at once."""
    bare = Job("megapipe", three(build("1f1b", turns.pp, 1))[1])
    (steps,) = run_pool([bare], Costs(0, 0, 0), turns)
    took: float = statistics.median(max(rank[0] for rank in step) for step in steps)
    print(f"gloo sums {turns.reduction_mib:g} MiB over dp {turns.dp} in {took * 1e3:.0f} ms here")
    return took


def table(tables: Sequence[Schedule], measured: Sequence[Measured], costs: Costs) -> str:
    """A line for each of `three`; `measured` of each table."""
    lines = [
        "exposed: ms that a step takes longer than without a reduction; share: of what is exposed at the end",
        "",
        "| schedule | step ms without | at the end: predicted | measured | beside: predicted | measured "
        "| share predicted | measured |",
        "|---|" + "---:|" * 7,
    ]
    for i in range(0, len(tables), 3):
        plain, _, beside = tables[i : i + 3]
        told = [_exposed_at_the_end(plain, costs) * 1e3, exposed(beside, costs) * 1e3]
        steps = [[max(rank[0] for rank in ranks) * 1e3 for ranks in of_table] for of_table in measured[i : i + 3]]
        seen = [statistics.median(x - y for x, y in zip(one, steps[0], strict=True)) for one in steps[1:]]
        lines.append(
            f"| {plain.name} | {statistics.median(steps[0]):.0f} | {told[0]:.1f} | {seen[0]:.1f} | {told[1]:.1f} "
            f"| {seen[1]:.1f} | {told[1] / told[0]:.2f} | {seen[1] / seen[0]:.2f} |"
        )
    return "\n".join(lines)


def _exposed_at_the_end(plain: Schedule, costs: Costs) -> float:
    """Every rank reduces its stages behind its last pass, side by side with other ranks."""
    time, place = simulate(plain, costs), plain.placement
    link = costs.durations(place)[Kind.G]
    ends = [
        max(time.end[item] for step in row for item in step) + sum(link[stage] for stage in place.stages_on(rank))
        for rank, row in enumerate(plain.ranks)
    ]
    return max(ends) - time.makespan
