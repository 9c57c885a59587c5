"""`tools/bench/schedules.py --copy-ratio`: copies to the host and back, beside what is predicted of them."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import replace

from megapipe.schedule import Costs, Schedule, ScheduleError, simulate
from megapipe.schedule.transforms.memory import with_offload
from megapipe.schedule.views.moved import price_copies
from tools.bench.emulate.pool import Job, Turns, run_pool


def table(own: Sequence[Schedule], costs: Costs, known: Costs, ratio: float, switch: int | None, turns: Turns) -> str:
    """Each schedule with the copies that are back in time, and with all: step, and what of the copies shows in it.

    known: costs with what a pass and a message take here.
    """
    ranks = range(turns.pp)
    groups = [ranks[r : r + switch] for r in ranks[::switch]] if switch else []
    moved: list[tuple[str, Schedule]] = []
    for plain in own:
        every = {x[1:3] for row in plain.ranks for step in row for x in step}
        priced = price_copies(known, ratio)
        ways = {"in time": None, "all": every}
        try:
            moved += [(way, with_offload(plain, priced, chosen=x, switches=groups)) for way, x in ways.items()]
        except ScheduleError:
            continue
    costly, free = price_copies(costs, ratio), replace(costs, o=0.0, l=0.0)
    jobs = [Job("megapipe", made, cost) for _, made in moved for cost in (costly, free)]
    steps = [statistics.median(max(r[0] for r in step) for step in of_job) for of_job in run_pool(jobs, costs, turns)]
    lines = [
        f"pp {turns.pp}, a copy takes {ratio:g} of F each way, median of {turns.repeats} steps; "
        f"{f'{switch} ranks share each way' if switch else 'each rank has its own ways'}",
        "",
        "| schedule | copied | predicted ms | step ms | step/predicted | copies show, predicted ms | measured ms |",
        "|---|---|" + "---:|" * 5,
    ]
    for (way, made), step, bare in zip(moved, steps[::2], steps[1::2], strict=True):
        predicted = simulate(made, price_copies(known, ratio)).makespan
        shows = predicted - simulate(made, replace(known, o=0.0, l=0.0)).makespan
        lines.append(
            f"| {made.name} | {way} | {1e3 * predicted:.0f} | {1e3 * step:.0f} | {step / predicted:.3f} "
            f"| {1e3 * shows:.0f} | {1e3 * (step - bare):.0f} |"
        )
    return "\n".join(lines)
