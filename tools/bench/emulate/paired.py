"""`tools/bench/schedules.py --pairs`: steps with passes run together and without, on devices whose passes have
communication, and how much of that is exposed.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import replace

from megapipe.errors import ScheduleError
from megapipe.schedule import Costs, Schedule, simulate, unpaired
from megapipe.schedule.passes import overlaps
from megapipe.schedule.transforms.pairs import pairs
from tools.bench.emulate.late import Measured


def with_link(costs: Costs, share: float, pieces: int) -> Costs:
    """The costs with a part of all time as communication of F and B, as of experts: so many pieces of a device share's
    F."""
    assert isinstance(costs.f, float)
    assert isinstance(costs.b, float)
    assert isinstance(costs.w, float)
    part = share * (costs.f + costs.b + costs.w) / (costs.f + costs.b)
    return replace(costs, piece=costs.f * part / pieces, link_f=part, link_b=part)


def both(schedule: Schedule, costs: Costs, memory: float | None) -> list[Schedule]:
    """The table without pairs, and with them where any make it shorter within the memory."""
    try:
        return [unpaired(schedule), pairs(schedule, costs, memory=memory, split=True)]
    except ScheduleError as refused:
        print(refused)
        return []


def table(tables: Sequence[Schedule], measured: Sequence[Measured], costs: Costs) -> str:
    """A line for each of `both`; times are medians over the repeats, of the slowest rank, parts of all ranks."""
    lines = [
        f"communication is {costs.link_f:.0%} of F and of B; exposed: what of it ranks only waited for",
        "",
        "| schedule | alone ms: predicted | measured | exposed | with pairs: predicted | measured | measured/predicted "
        "| exposed | of alone | in pairs of F with B | measured gain |",
        "|---|" + "---:|" * 10,
    ]
    for alone, together in zip(range(0, len(tables), 2), range(1, len(tables), 2), strict=True):
        told = [simulate(tables[i], costs).makespan * 1e3 for i in (alone, together)]
        seen = [
            statistics.median(max(rank[0] for rank in step) for step in measured[i]) * 1e3 for i in (alone, together)
        ]
        whole = [_link(tables[i], costs, of_pairs=False) for i in (alone, together)]
        shown = [statistics.median(sum(rank[5] for rank in step) for step in measured[i]) for i in (alone, together)]
        inside = statistics.median(sum(rank[6] for rank in step) for step in measured[together])
        lines.append(
            f"| {tables[alone].name} | {told[0]:.0f} | {seen[0]:.0f} | {shown[0] / whole[0]:.0%} | {told[1]:.0f} "
            f"| {seen[1]:.0f} | {seen[1] / told[1]:.3f} | {shown[1] / whole[1]:.0%} | {shown[1] / shown[0]:.2f} "
            f"| {inside / _link(tables[together], costs, of_pairs=True):.0%} | {seen[0] / seen[1]:.2f} |"
        )
    return "\n".join(lines)


def _link(schedule: Schedule, costs: Costs, *, of_pairs: bool) -> float:
    """Seconds of communication of all passes, or of the pairs of a forward and a backward."""
    place = schedule.placement
    steps = [step for row in schedule.ranks for step in row if overlaps(step) or not of_pairs]
    return sum(chain.link for step in steps for x in step for chain in costs.chains(x.kind, x.stage, place))
