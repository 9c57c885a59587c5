"""Compare the measured passes of steps with a prediction, as one value."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from statistics import mean, median

from megapipe.plan import GIB, Plan
from megapipe.schedule import Costs, Kind, Placement, Schedule, Timeline, simulate
from megapipe.schedule.kinds import Lane
from megapipe.schedule.measured.costs import MeasuredPass, Spent, StepsRan, spent
from megapipe.schedule.views.lanes import Copied, communication, copied
from megapipe.training.report.again import Again

# Every report needs the plan's timeline. A run has a table for each batch size, so a few are kept.
simulated = lru_cache(maxsize=4)(simulate)


@dataclass(frozen=True)
class Measured:
    """The times of a pipeline in its last steps: medians over the steps, in seconds.

    The bubble is the largest idle share of a rank between its first and last pass. The parts of the
    bubble are `of_table`, `of_stages`, `of_host` and `of_messages`. Predictions are the plan's,
    scaled to the measured speed of all ranks.

    Attributes:
        steps: number of steps.
        costs: measured costs of passes and messages.
        ranks: for each pipeline rank, its time in passes, in waits for inputs, and in all.
        passes: time from a rank's first request for an input to the end of its last pass; the
            largest of all ranks.
        bubble: the bubble as a share of `passes`, as are its parts.
        of_table: the bubble if all stages were equal and nothing else took time.
        of_stages: the part that unequal stages add.
        of_host: the part in which the host prepares the next pass.
        predicted_passes: predicted `passes`.
        predicted_bubble: predicted bubble.
        predicted: predicted F, B and W of each stage of the model, in order.
        peak_bytes: most bytes allocated on each rank; empty on CPUs.
        predicted_peaks: predicted peak of each rank, in bytes.
        exposed_communication: mean over ranks of the waits for collectives within passes; None if
            passes have no collectives.
        predicted_exposed: the prediction of that mean; None if the plan's costs have no
            communication.
        copies: times of each rank's copies to and from the host, if the table has O and L.
        predicted_copies: the prediction of these times.
        again: the prediction from the passes of the first steps; None before there is one.
        by: what passes and bubble are predicted by, in words.
    """

    steps: int
    costs: Costs
    ranks: tuple[Spent, ...]
    passes: float
    bubble: float
    of_table: float
    of_stages: float
    of_host: float
    predicted_passes: float
    predicted_bubble: float
    predicted: Costs
    peak_bytes: tuple[float, ...]
    predicted_peaks: tuple[float, ...]
    exposed_communication: float | None = None
    predicted_exposed: float | None = None
    copies: tuple[Copied, ...] = ()
    predicted_copies: tuple[Copied, ...] = ()
    again: Again | None = None
    by: str = "FLOPs"

    @property
    def of_messages(self) -> float:
        """Return the bubble's waits for messages: what its other three parts leave."""
        return self.bubble - self.of_table - self.of_stages - self.of_host


def measured(
    steps: StepsRan,
    costs: Costs,
    schedule: Schedule,
    of_plan: Plan,
    peak_bytes: tuple[float, ...] = (),
    exposed: float | None = None,
    copies: StepsRan = (),
    *,
    again: Again | None = None,
    by_again: bool = False,
) -> Measured:
    """Return the times of steps under one table, next to the plan's prediction.

    Args:
        steps: [step][pipeline rank] -> the measured passes.
        costs: the costs measured from them.
        schedule: the table.
        of_plan: the plan.
        peak_bytes: most bytes allocated on each rank; empty on CPUs.
        exposed: mean seconds that a rank's passes wait for collectives in a step; None if there
            are no collectives.
        copies: [step][pipeline rank] -> the measured copies O and L; empty without any.
        again: the prediction from the passes of the first steps, if there is one.
        by_again: whether passes and bubble are predicted by `again`, not by the plan.
    """
    counted = of_plan.costs
    by_step = [[spent(row) for row in step] for step in steps]
    ranks = tuple(Spent(*_medians(of_rank)) for of_rank in zip(*by_step, strict=True))
    passes = max(r.makespan for r in ranks)
    worst = max(ranks, key=lambda r: r.idle)
    # The table alone: equal stages, no messages, no host. Unequal stages add the second part.
    stages = replace(costs, comm=0.0, overhead=0.0)
    f, b, w = ((mean(x),) * len(x) for x in times_of_stages(stages, schedule))
    even = replace(stages, f=f, b=b, w=w)
    of_table = bubble_of(simulate(schedule, even))
    of_stages = bubble_of(simulate(schedule, stages)) - of_table
    plan = simulated(schedule, counted)
    # The plan counts FLOPs or another machine's seconds. One factor scales its passes to ours.
    speed = sum(r.busy for r in ranks) / (sum(plan.busy) or 1.0)
    f, b, w = (tuple(x * speed for x in row) for row in times_of_stages(counted, schedule))
    predicted_exposed = None
    if counted.communicates:
        predicted_exposed = communication(schedule, counted).exposed * speed / len(ranks)
    predicted_copies = []
    if copies:
        for of_rank in copied(schedule, counted, plan):
            predicted_copies.append(Copied(*(speed * x for x in of_rank)))
    copies_by_rank = zip(*map(_summed, copies), strict=True)
    predicted = replace(counted, f=f, b=b, w=w)
    by = "FLOPs" if of_plan.given is None else "costs"
    of_passes = (plan.makespan * speed, bubble_of(plan))
    if again is not None and by_again:
        by = "measured times"
        of_passes = again.of_table(schedule)
        predicted = replace(counted, f=again.costs.f, b=again.costs.b, w=again.costs.w)
    return Measured(
        len(steps),
        costs,
        ranks,
        passes,
        worst.idle / passes,
        of_table,
        of_stages,
        # Idle and not waiting: the host prepares the next pass.
        (worst.idle - worst.waited) / passes,
        *of_passes,
        predicted,
        peak_bytes,
        of_plan.peak_bytes,
        exposed,
        predicted_exposed,
        tuple(Copied(*_medians(of_rank)) for of_rank in copies_by_rank),
        tuple(predicted_copies),
        again,
        by,
    )


def _medians(rows: Sequence[Sequence[float]]) -> list[float]:
    """Return the median of each column of a table.

    Args:
        rows: the rows of the table.
    """
    return [median(column) for column in zip(*rows, strict=True)]


def _summed(ranks: Sequence[Sequence[MeasuredPass]]) -> list[Copied]:
    """Return each rank's total times of copies in one step: out, back, and waits for them.

    ranks: [pipeline rank] -> measured copies of the rank.
    """

    def total(row: Sequence[MeasuredPass], lane: Lane) -> float:
        return sum(x.end - x.begin for x in row if x.item.kind.traits.lane is lane)

    found = []
    for row in ranks:
        waited = sum(x.waited for x in row)
        found.append(Copied(total(row, Lane.D2H), total(row, Lane.H2D), waited))
    return found


def bubble_of(timeline: Timeline) -> float:
    """Return the bubble as a share of the time from the first pass to the last.

    Args:
        timeline: a simulated step.
    """
    return timeline.bubble / timeline.makespan


def times_of_stages(costs: Costs, schedule: Schedule) -> list[tuple[float, ...]]:
    """Return [F, B, W], each a tuple of seconds with one item per stage of one whole model."""
    place = schedule.placement
    time = replace(costs, overhead=0.0).durations(place)
    return [tuple(time[kind][: place.chain]) for kind in (Kind.F, Kind.B, Kind.W)]


def table(now: Measured, place: Placement) -> str:
    """Return a table in ms: each stage's passes with their prediction, then each rank's time.

    Args:
        now: the times to show.
        place: the rank of each stage.
    """
    head = "".join(f"  {f'{kind} ms':>8}  {'predicted':>9}" for kind in "FBW")
    lines = [f"{'stage':>5}  {'rank':>4}{head}"]
    for stage, rank in enumerate(place.rank_of):
        at = place.position(stage)
        row = f"{stage:5}  {rank:4}"
        for name in "fbw":
            for costs, width in ((now.costs, 8), (now.predicted, 9)):
                row += f"  {getattr(costs, name)[at] * 1e3:{width}.2f}"
        lines.append(row)
    memory = "  peak GiB  predicted" if now.peak_bytes else ""
    lines.append(f"{'rank':>5}  passes ms   waits ms    host ms{memory}")
    for rank, r in enumerate(now.ranks):
        row = f"{rank:5}"
        for seconds in (r.busy, r.waited, r.idle - r.waited):
            row += f"  {seconds * 1e3:9.1f}"
        if now.peak_bytes:
            row += f"  {now.peak_bytes[rank] / GIB:9.3g}  {now.predicted_peaks[rank] / GIB:9.3g}"
        lines.append(row)
    return "\n".join(lines)
