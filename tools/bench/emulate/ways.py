"""Ways of running one schedule that tools/bench/schedules.py compares: each is a table."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace

from megapipe.errors import ScheduleError
from megapipe.schedule import Costs, Kind, Pass, Schedule, build, simulate, unpaired
from megapipe.schedule.costs import UNIT
from megapipe.schedule.families.offload.copies import with_offload
from megapipe.schedule.families.replicas import with_replicas
from megapipe.schedule.families.step.asked import StepPasses
from megapipe.schedule.families.step.reduction import with_reduction
from megapipe.schedule.passes import overlaps, repeated
from megapipe.schedule.shapes.pairs.pairs import pairs
from megapipe.schedule.views.features.moved import price_copies
from tools.bench.emulate.pool import Job, Turns, run_pool


@dataclass(frozen=True)
class Way:
    """A table of a schedule.

    Attributes:
        costs: what its passes take on the devices.
        known: the costs by which its step is predicted.
    """

    name: str
    schedule: Schedule
    costs: Costs
    known: Costs


def with_link(costs: Costs, share: float, pieces: int) -> Costs:
    """Return costs with a part of all time as communication of F and B, in pieces, as experts cause
    it.
    """
    assert isinstance(costs.f, float)
    assert isinstance(costs.b, float)
    assert isinstance(costs.w, float)
    part = share * (costs.f + costs.b + costs.w) / (costs.f + costs.b)
    return replace(costs, piece=costs.f * part / pieces, link_f=part, link_b=part)


def of_pairs(
    schedule: Schedule, costs: Costs, known: Costs, memory: float | None
) -> list[list[Way]]:
    """Without pairs, and with them where any make the table shorter within the memory."""
    try:
        together = pairs(schedule, known, memory=memory, split=True)
    except ScheduleError as refused:
        print(refused)
        return []
    return [[Way("alone", unpaired(schedule), costs, known), Way("pairs", together, costs, known)]]


def of_copies(
    schedule: Schedule, costs: Costs, known: Costs, ratio: float, switch: int | None
) -> list[list[Way]]:
    """With the copies that are back in time, and with all; before each the same table with copies
    that are free.
    """
    ranks = range(len(schedule.ranks))
    groups = [ranks[r : r + switch] for r in ranks[::switch]] if switch else []
    costs, known, found = price_copies(costs, ratio), price_copies(known, ratio), []
    for name, chosen in {"in time": None, "all": {x[1:3] for x in schedule.passes()}}.items():
        try:
            moved = with_offload(schedule, known, chosen=chosen, switches=groups)
        except ScheduleError:
            break
        free = (replace(x, o=0.0, l=0.0) for x in (costs, known))
        found.append([Way(f"{name}, copies free", moved, *free), Way(name, moved, costs, known)])
    return found


def of_steps(schedule: Schedule, costs: Costs, known: Costs) -> list[list[Way]]:
    """The whole step with a barrier at the update, and without."""
    steps = {
        name: StepPasses.whole(UNIT, barrier=name == "barrier")
        for name in ("barrier", "no barrier")
    }
    tables = {name: step.around(unpaired(schedule), UNIT) for name, step in steps.items()}
    return [[Way(name, made, costs, known) for name, made in tables.items()]]


def of_reductions(schedule: Schedule, costs: Costs, known: Costs, link: float) -> list[list[Way]]:
    """Return a table's ways: without reductions, with all of them after a rank's last pass, and
    with G as soon as a stage is done.
    """
    costs, known, plain = replace(costs, g=link), replace(known, g=link), unpaired(schedule)
    tables = {
        "no reduction": plain,
        "at the end": at_end(plain),
        "beside the passes": with_reduction(plain),
    }
    return [[Way(name, made, costs, known) for name, made in tables.items()]]


def of_replicas(schedule: Schedule, costs: Costs, known: Costs, link: float) -> list[list[Way]]:
    """Without copies of states to a peer's memory, and with them: what one takes of a device share,
    on a link of each rank.
    """
    costs, known, plain = replace(costs, p=link), replace(known, p=link), unpaired(schedule)
    tables = {"no copies": plain, "copies": with_replicas(plain)}
    return [[Way(name, made, costs, known) for name, made in tables.items()]]


def at_end(plain: Schedule) -> Schedule:
    """Return the table with the reductions of all its stages after the last pass of a rank."""
    stages = (plain.placement.stages_on(rank) for rank in range(plain.placement.num_ranks))
    sums = [tuple((Pass(Kind.G, stage, 0),) for stage in own) for own in stages]
    return replace(
        plain, ranks=tuple(row + end for row, end in zip(plain.ranks, sums, strict=True))
    )


def link_of(turns: Turns) -> float:
    """Seconds in which gloo sums a device share's gradients here, all ranks at once."""
    (steps,) = run_pool(
        [Job("megapipe", at_end(build("1f1b", turns.pp, 1)))], Costs(0, 0, 0), turns
    )
    took: float = statistics.median(max(rank[0] for rank in step) for step in steps)
    print(f"gloo sums {turns.reduction_mib:g} MiB over dp {turns.dp} in {took * 1e3:.0f} ms here")
    return took


def compared(groups: Sequence[Sequence[Way]], turns: Turns) -> str:
    """Run all ways in turns, and return a line for each, next to the first of its group."""
    jobs = [Job("megapipe", way.schedule, way.costs) for group in groups for way in group]
    measured = iter(run_pool(jobs, Costs(), turns))
    lines = [
        f"ms a step, medians of {turns.repeats} turns of {turns.steps} steps in a row; more: than "
        "first of its group; "
        "exposed: part of the passes' communication that ranks only waited for, in pairs: of those "
        "of F with B",
        "",
        "| schedule | way | predicted | measured | of predicted | more: predicted | measured | "
        "exposed | in pairs |",
        "|---|---|" + "---:|" * 7,
    ]
    for group in groups:
        first: tuple[float, list[float]] | None = None
        for way, of_way in zip(group, measured, strict=False):
            predicted = (
                simulate(repeated(way.schedule, turns.steps), way.known).makespan
                / turns.steps
                * 1e3
            )
            steps = [max(rank[0] for rank in turn) / turns.steps * 1e3 for turn in of_way]
            first = first or (predicted, steps)
            more = statistics.median(x - y for x, y in zip(steps, first[1], strict=True))
            lines.append(
                f"| {way.schedule.name} | {way.name} | {predicted:.1f} | "
                f"{statistics.median(steps):.1f} "
                f"| {statistics.median(steps) / (predicted or 1.0):.3f} | "
                f"{predicted - first[0]:.1f} | {more:.1f} "
                f"| {_share(way, of_way, 5)} | {_share(way, of_way, 6)} |"
            )
    return "\n".join(lines)


def _share(way: Way, measured: Sequence[Sequence[Sequence[float]]], column: int) -> str:
    """The exposed part of the communication of a table's passes, or of its pairs; nothing where it
    has none.
    """
    if not way.known.communicates:
        return ""
    steps = [step for step in way.schedule.steps() if column == 5 or overlaps(step)]
    chains = (
        way.known.chains(x.kind, x.stage, way.schedule.placement) for step in steps for x in step
    )
    link = sum(chain.link for of_pass in chains for chain in of_pass)
    return (
        f"{statistics.median(sum(rank[column] for rank in turn) for turn in measured) / link:.0%}"
        if link
        else ""
    )
