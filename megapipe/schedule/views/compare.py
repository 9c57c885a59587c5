"""Compare all schedules for given ranks, microbatches, costs and memory, and advise one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from megapipe.errors import ScheduleError
from megapipe.notebook import aligned
from megapipe.schedule.catalogue import PLAIN, SCHEDULES, build
from megapipe.schedule.core.cuts import Cutting
from megapipe.schedule.costs import UNIT, Costs
from megapipe.schedule.passes import Schedule
from megapipe.schedule.recipe import Recipe
from megapipe.schedule.simulate import simulate
from megapipe.schedule.views.divided import over_stages
from megapipe.schedule.views.makers import cut_makers, makers_of
from megapipe.schedule.views.scene import short

_SEARCH = 50
"""Time of a search in times of a fixed schedule, for the progress bar."""
_TIE = 0.005
_WORTH = 0.02
"""Makespans this close count as equal; a saving below this is not worth another schedule."""
_HEAD = (
    "schedule",
    "makespan",
    "vs 1f1b",
    "period",
    "bubble",
    "bubble %",
    "peak",
    "parameters",
    "sent",
    "",
)


@dataclass(frozen=True)
class Row:
    """The numbers of one schedule in a comparison: times and memory, in the units of the costs.

    `bubble_share` returns the bubble as a fraction of the period.

    Attributes:
        label: the schedule's name, as in the table.
        makespan: time from the first start to the last end on any rank. This is the time of a step
            that ends with a barrier.
        period: longest time from a rank's first start to its last end. This is the time of a step
            without a barrier.
        bubble: most idle time of a rank between its first start and its last end, the papers'
            bubble.
        busiest: time that the rank with the most work computes. No other order of the passes can
            make a step shorter than that.
        idle: fraction of the ranks' time until the makespan in which they do not compute.
        peak: most activation that any rank holds.
        parameters: most parameters of any rank, in units of 1/p of the model on p ranks.
        sent: largest number of tensors that a rank sends.
        fits: the peak is within the memory limit.
        divided: number of the schedule's stages, if the costs name another number and were divided
            or merged for it; else 0.
    """

    label: str
    makespan: float
    period: float
    bubble: float
    busiest: float
    idle: float
    peak: float
    parameters: float
    sent: int
    fits: bool = True
    divided: int = 0

    @property
    def bubble_share(self) -> float:
        """Return bubble / period, the fraction that papers give: (p-1)/(m+p-1) for 1F1B."""
        return self.bubble / self.period if self.period else 0.0


@dataclass(frozen=True)
class Refusal:
    """A schedule that does not exist for the ranks and microbatches of a comparison.

    Attributes:
        label: the schedule's name, as in the table.
        reason: a sentence that says why it does not exist.
    """

    label: str
    reason: str


def compare(
    ranks: int,
    microbatches: int,
    costs: Costs = UNIT,
    memory: float | None = None,
    *,
    names: Sequence[str | Schedule | Recipe] = tuple(SCHEDULES),
    effort: float = 4.0,
    progress: Callable[[float, str], None] = lambda share, doing: None,
    slices: Cutting | None = None,
    parts: Recipe | None = None,
) -> list[Row | Refusal]:
    """Return one or more `Row` of each schedule, such as one for each number of stages per rank.

    A schedule that does not exist for these numbers has a `Refusal` that says why.

    1f1b is always among them, because others are compared with it. A schedule above the memory
    limit has a row with `fits` False. zb-auto, a search, keeps to the limit, or without one to the
    memory of 1F1B.

    Args:
        memory: limit on a rank's activation, in the unit of the costs; None for no limit.
        names: the schedules: keys of SCHEDULES, files, functions FILE.py:NAME, tables, or
            `Recipe`s that make a table.
        effort: about the seconds to spend on each search. zb-auto makes two: for the shortest
            makespan, and for the shortest period, a step's time without a barrier.
        progress: called with the fraction of the work done, 0 to 1, and the name of the next
            schedule.
        slices: how to cut microbatches into slices. Adds a row with slices for every schedule in
            `names` that is a name or file, but not for zb-auto. None for no such rows.
        parts: a `Recipe` with the settings that every schedule gets, such as offload and sharding;
            None for none. The order of passes in it is ignored.
    Raises: ScheduleError for an unknown name.
    """
    chosen = dict.fromkeys([PLAIN, *names])
    makers, searches = makers_of(chosen, ranks, microbatches, costs, memory, effort)
    if slices:
        makers |= cut_makers(chosen, ranks, microbatches, costs, slices)
    # All makers are known before the first runs, so the progress bar never moves back.
    weight = dict.fromkeys(makers, 1) | dict.fromkeys(searches, _SEARCH)
    rows: list[Row | Refusal] = []
    done = 0
    for label, make in makers.items():
        # The defaults keep the values of this round; a search calls it while they are still these.
        def report(share: float, done: int = done, label: str = label) -> None:
            progress((done + share * weight[label]) / sum(weight.values()), label)

        report(0.0)
        try:
            table = make(report)
            if parts is not None:
                table = _with_parts(parts, table, costs, memory)
            fitted = over_stages(costs, table.placement.chain)
            row = measure(table, fitted, label, memory)
            if fitted != costs:
                row = replace(row, divided=table.placement.chain)
            rows.append(row)
        # The other schedules still have their rows, and a reader sees why this one has none.
        except ScheduleError as error:
            rows.append(Refusal(label, str(error)))
        done += weight[label]
    progress(1.0, "")
    return rows


def _with_parts(parts: Recipe, table: Schedule, costs: Costs, memory: float | None) -> Schedule:
    """Return `table` with the settings of a recipe, such as offload and sharding.

    If nothing fits the memory limit, the table that needs least memory is returned.

    Args:
        parts: the recipe; its own order of passes is ignored.
        memory: limit on a rank's activation, in the unit of the costs; None for no limit.
    """
    # Lenient: a table above the limit is a row that does not fit, and not a refusal.
    recipe = replace(parts, order=table.name, table=table, lenient=True)
    return recipe.whole(costs, memory)


def measure(
    schedule: Schedule, costs: Costs = UNIT, label: str | None = None, memory: float | None = None
) -> Row:
    """Return the numbers of a schedule under these costs as a `Row`.

    Args:
        label: name in the row; None for the schedule's own.
        memory: limit on a rank's activation, in the unit of the costs; None for no limit.
    """
    time = simulate(schedule, costs)
    total = time.makespan * len(schedule.ranks)
    idle = 0.0
    if total:
        idle = sum(time.idle) / total
    # Of memory, parameters and messages the worst rank counts: it is the one that runs out.
    return Row(
        label or schedule.name,
        makespan=time.makespan,
        period=time.period,
        bubble=time.bubble,
        busiest=max(time.busy),
        idle=idle,
        peak=max(time.peak),
        parameters=max(time.parameters),
        sent=max(time.sent),
        fits=memory is None or max(time.peak) <= memory * (1 + 1e-9),
    )


def advise(rows: Sequence[Row], ranks: int, microbatches: int, costs: Costs = UNIT) -> list[str]:
    """Return sentences on which schedule to take and why, or that none helps.

    Args:
        rows: the rows of `compare`, without a `Refusal`. Schedules are compared with 1f1b. If there
            is no row of 1f1b, as with costs for two stages per rank, they are compared with the
            first schedule within the memory.
    """
    if not rows:
        return ["No schedule takes these numbers; the reasons are above."]
    fitting = [row for row in rows if row.fits]
    if not fitting:
        least = min(rows, key=lambda row: row.peak)
        return [
            f"No schedule fits: {least.label} needs least, {short(least.peak)}. "
            "Make a microbatch hold less: a "
            "smaller --micro-batch-size, recomputation, more tensor parallelism."
        ]
    best = _best(fitting, "makespan")
    # Costs of four stages on two ranks leave no 1f1b. Then the first that fits is the measure.
    plain = next((row for row in rows if row.label == PLAIN), fitting[0])
    # All ratios below divide by it.
    if not best.makespan:
        return ["Nothing takes time by these costs, so no schedule is shorter than another."]
    if plain.fits and best.makespan > plain.makespan * (1 - _WORTH):
        closest = ""
        if best.makespan < plain.makespan:
            closest = f"; {best.label} would take {short(best.makespan)}"
        advice = [
            f"Stay with {plain.label} (makespan {short(plain.makespan)}): "
            f"none that fits saves {_WORTH:.0%} of it{closest}."
        ]
        best = plain
    else:
        over = ""
        if not plain.fits:
            over = f", which needs {short(plain.peak)}"
        than = "against none"
        if plain.peak:
            than = f"{short(best.peak / plain.peak)} x that"
        more = ""
        if best.peak > plain.peak:
            more = f" ({than} of {plain.label})"
        advice = [
            f"Take {best.label}: makespan {short(best.makespan)}, "
            f"{_change(best.makespan, plain.makespan)} than "
            f"{plain.label} ({short(plain.makespan)}{over}); peak {short(best.peak)}{more}, "
            f"{short(best.parameters)} x the parameters, {best.sent} tensors sent per rank."
        ]
    advice += _uneven(best)
    # Without a barrier a rank begins the next step while others still end this one, so a step takes
    # the period.
    steady = _best(fitting, "period")
    if steady.period < best.period * (1 - _WORTH):
        advice.append(
            "Where iterations follow each other without a barrier (post-validation), "
            f"take {steady.label}: period "
            f"{short(steady.period)} against {short(best.period)} of {best.label}."
        )
    # Interleaving and waves send v times as many messages. With comm = 0 the rows do not show it.
    if not costs.comm and best.sent > plain.sent > 0:
        advice.append(
            f"Messages were free here. {best.label} sends {best.sent / plain.sent:.1f} x as many "
            f"as {plain.label}: "
            "compare again with your latency as the fourth number of --costs."
        )
    return advice + _pairs(rows, best, ranks, microbatches, costs)


def cells_of(rows: Sequence[Row | Refusal]) -> list[tuple[str, ...]]:
    """Return a comparison as rows of text cells. The first row has the column titles.

    Schedules that fit the memory come first, in the order of their makespan. Schedules that do not
    exist are left out.
    """
    measured = [row for row in rows if isinstance(row, Row)]
    measured.sort(key=lambda row: (not row.fits, row.makespan))
    reference = next((row.makespan for row in measured if row.label == PLAIN), 0.0)
    cells: list[tuple[str, ...]] = [_HEAD]
    for row in measured:
        change = ""
        if reference:
            change = f"{100 * (row.makespan / reference - 1):+.1f} %"
        over = ""
        if row.divided:
            over = f"in {row.divided} stages"
        if not row.fits:
            over = "over the limit"
        cells.append(
            (
                row.label,
                short(row.makespan),
                change,
                short(row.period),
                short(row.bubble),
                f"{100 * row.bubble_share:.1f}",
                short(row.peak),
                short(row.parameters),
                str(row.sent),
                over,
            )
        )
    return cells


def to_table(rows: Sequence[Row | Refusal]) -> str:
    """Return a comparison as aligned text, and a line for each schedule that does not exist."""
    cells = cells_of(rows)
    lines = aligned(cells, str.ljust)
    first = max(len(name) for name, *_ in cells)
    # Refusals come last. Their reasons may be long, so they do not widen the columns.
    lines += [f"{row.label:<{first}}  {row.reason}" for row in rows if isinstance(row, Refusal)]
    return "\n".join(line.rstrip() for line in lines)


def _best(rows: Sequence[Row], what: str) -> Row:
    """Return the row with the least value in the field named `what`, a time.

    Among rows with nearly equal times, the one with the fewest parameters is returned, then least
    memory, then fewest messages. A search for the shortest period, whose row is no name of
    --pipeline-schedule, comes after rows with as little memory.
    """
    least = min(getattr(row, what) for row in rows)
    close = [row for row in rows if getattr(row, what) <= least * (1 + _TIE)]
    # Parameters first: a second copy of the model also doubles gradients and optimizer states,
    # which the peak of activation does not show.

    def cost(row: Row) -> tuple[float, float, bool, int, float]:
        searched_twice = row.label.endswith(" period")
        return row.parameters, row.peak, searched_twice, row.sent, row.makespan

    return min(close, key=cost)


def _change(value: float, reference: float) -> str:
    direction = "more"
    if value <= reference:
        direction = "less"
    return f"{abs(1 - value / reference):.1%} {direction}"


def _uneven(best: Row) -> list[str]:
    """Return [a sentence] if one rank has too much work for any order of passes to help; else [].

    Args:
        best: the row of the schedule that is advised.
    """
    mean = best.makespan * (1 - best.idle)
    # A step ends after the busiest rank's own work, in whatever order it runs.
    if best.busiest <= 1.05 * mean:
        return []
    return [
        f"The stages are uneven: the busiest rank works {short(best.busiest)}, "
        f"the mean rank {short(mean)}. No "
        "schedule changes that; another split of the layers does."
    ]


def _pairs(
    rows: Sequence[Row], best: Row, ranks: int, microbatches: int, costs: Costs
) -> list[str]:
    """Return [a sentence] on how fast DualPipeV's pairs must be to equal the best schedule.

    An overlapped pair runs a forward and a backward together. The sentence gives the longest
    sufficient time of a pair, in percent of both passes in sequence. The list is empty if DualPipeV
    has no row or is the faster one, or if 60 % is still too long. It is empty, too, for costs by
    stage, and for costs that give communication or the time of a pair.

    Args:
        rows: the rows of the comparison.
        best: the row of the schedule that is advised.
    """
    paired = [name for name, entry in SCHEDULES.items() if entry.pairs and entry.copies == 1]
    row = next((row for row in rows if row.label in paired and row.fits), None)
    known = costs.fb is not None or costs.communicates
    if row is None or row.makespan <= best.makespan or known:
        return []
    if isinstance(costs.f, tuple) or isinstance(costs.b, tuple) or isinstance(costs.w, tuple):
        return []
    schedule = build(row.label, ranks, microbatches)
    # From above, so that the first pair that is short enough is the longest.
    for percent in range(99, 59, -1):
        cheaper = replace(costs, fb=(costs.f + costs.b + costs.w) * percent / 100)
        if simulate(schedule, cheaper).makespan <= best.makespan:
            return [
                f"{row.label} is as fast as {best.label} only if a forward and a backward "
                f"run together take at most {percent} % of their time in sequence, "
                "which depends on your kernels; "
                "the table counts 100 %."
            ]
    return []
