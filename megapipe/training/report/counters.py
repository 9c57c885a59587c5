"""Compare the passes of steps with the plan's prediction, and find slow stages and links.

Each rank times its own passes (pipeline_parallel.stopwatch). Every few steps the ranks of a
pipeline exchange their times, and then one rank of each replica of the pipeline.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache, lru_cache, partial
from statistics import mean, median

from megapipe.config import Config
from megapipe.distributed.device import memory_bytes
from megapipe.distributed.mesh import ProcessMesh
from megapipe.pipeline_parallel.stopwatch import (
    Stopwatch,
    copied_by_all,
    exposed_by_all,
    ran_by_all,
)
from megapipe.plan import GIB, Plan
from megapipe.schedule import Costs, Kind, Placement, Schedule, Timeline, simulate
from megapipe.schedule.kinds import COPIES, Lane
from megapipe.schedule.measured.costs import Ran, Spent, StepsRan, measured_costs, spent
from megapipe.schedule.measured.slow import History, Sample, Slow, extremes
from megapipe.schedule.views.lanes import Copied, communicates, communication, copied

WINDOW = 5
"""Most steps between two exchanges of times."""
READ = 2
"""Number of latest steps that an exchange reads. Each pass costs microseconds per rank."""
SAMPLE = 4
"""Least number of steps between two samples that find slow stages."""
THIRD = 3
"""The step after which times are first compared. The first step is slower than all others."""

# Every report needs the plan's timeline. A run has a table for each batch size, so a few are kept.
_simulated = lru_cache(maxsize=4)(simulate)


@dataclass(frozen=True)
class Measured:
    """The times of a pipeline in its last steps: medians over the steps, in seconds.

    The bubble is the largest idle share of a rank between its first and last pass. Its parts are
    `of_table`, `of_stages`, `of_host` and `of_messages`. Predictions are the plan's, scaled to the
    measured speed of all ranks.

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
        predicted_exposed: its prediction; None if the plan's costs have no communication.
        copies: times of each rank's copies to and from the host, if the table has O and L.
        predicted_copies: their prediction.
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

    @property
    def of_messages(self) -> float:
        """Return the bubble without its other three parts: the waits for messages."""
        return self.bubble - self.of_table - self.of_stages - self.of_host


def measured(
    steps: StepsRan,
    costs: Costs,
    schedule: Schedule,
    of_plan: Plan,
    peak_bytes: tuple[float, ...] = (),
    exposed: float | None = None,
    copies: StepsRan = (),
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
    """
    counted = of_plan.costs
    by_step = [[spent(row) for row in step] for step in steps]
    ranks = tuple(Spent(*_medians(of_rank)) for of_rank in zip(*by_step, strict=True))
    passes = max(r.makespan for r in ranks)
    worst = max(ranks, key=lambda r: r.idle)
    # The table alone: equal stages, no messages, no host. Unequal stages add the second part.
    stages = replace(costs, comm=0.0, overhead=0.0)
    f, b, w = ((mean(x),) * len(x) for x in _stages(stages, schedule))
    even = replace(stages, f=f, b=b, w=w)
    of_table = _bubble(simulate(schedule, even))
    of_stages = _bubble(simulate(schedule, stages)) - of_table
    plan = _simulated(schedule, counted)
    # The plan counts FLOPs or another machine's seconds. One factor scales its passes to ours.
    speed = sum(r.busy for r in ranks) / (sum(plan.busy) or 1.0)
    f, b, w = (tuple(x * speed for x in row) for row in _stages(counted, schedule))
    predicted_exposed = None
    if communicates(counted):
        predicted_exposed = communication(schedule, counted).exposed * speed / len(ranks)
    predicted_copies = []
    if copies:
        for of_rank in copied(schedule, counted, plan):
            predicted_copies.append(Copied(*(speed * x for x in of_rank)))
    copies_by_rank = zip(*map(_summed, copies), strict=True)
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
        plan.makespan * speed,
        _bubble(plan),
        replace(counted, f=f, b=b, w=w),
        peak_bytes,
        of_plan.peak_bytes,
        exposed,
        predicted_exposed,
        tuple(Copied(*_medians(of_rank)) for of_rank in copies_by_rank),
        tuple(predicted_copies),
    )


def _medians(rows: Sequence[Sequence[float]]) -> list[float]:
    """Return the median of each column of a table."""
    return [median(column) for column in zip(*rows, strict=True)]


def _summed(ranks: Sequence[Sequence[Ran]]) -> list[Copied]:
    """Return each rank's total times of copies in one step: out, back, and waits for them.

    ranks: [pipeline rank] -> its measured copies.
    """

    def total(row: Sequence[Ran], lane: Lane) -> float:
        return sum(x.end - x.begin for x in row if x.item.kind.traits.lane is lane)

    found = []
    for row in ranks:
        waited = sum(x.waited for x in row)
        found.append(Copied(total(row, Lane.D2H), total(row, Lane.H2D), waited))
    return found


def _bubble(timeline: Timeline) -> float:
    return timeline.bubble / timeline.makespan


class Counters:
    """The times of one rank's steps, exchanged with other ranks every few steps.

    Every rank calls `add` after each step, outside its passes. On the rank that writes the log,
    `now` returns the last comparison with the plan, and `straggler` a line on the slowest stage. On
    all other ranks they return None and an empty text.

    A sample is a replica's measured costs of stages and links, taken every SAMPLE steps.

    Args:
        config: the run's configuration.
        mesh: this rank's mesh.
        plan: the plan of the run.
        speaker: the pipeline rank that collects the times of its replica.
        speaks: whether this rank writes the log; it is the speaker of one replica.

    Attributes:
        steps: number of steps so far.
        slow: stages and links that the last samples show to be slow, also those already reported.
        samples: the last sample of each replica; empty on a rank that does not write the log.
    """

    def __init__(
        self, config: Config, mesh: ProcessMesh, plan: Plan, speaker: int, *, speaks: bool
    ) -> None:
        self.mesh = mesh
        self.plan = plan
        self.speaks = speaks
        # Ranks in the place of the one that writes the log, one in each replica.
        self._collects = mesh.pp.rank == speaker
        # --metrics-file has numbers of every step, and of this step alone.
        log = config.log
        every_step = log.metrics_file is not None
        self._every = 1 if every_step else min(WINDOW, log.log_interval)
        kept = 1 if every_step else READ
        self._recent: deque[list[list[Ran]]] = deque(maxlen=kept)
        self._copies: deque[list[list[Ran]]] = deque(maxlen=kept)
        self.steps = 0
        self._sampled_at = 0
        self._watches: list[Stopwatch] = []
        self._schedule: Schedule | None = None
        self._history = History({})
        self._now: Callable[[], Measured] | None = None
        self.slow: list[Slow] = []
        self.samples: list[Sample] = []

    @property
    def now(self) -> Measured | None:
        """Return the comparison of the last steps with the plan.

        Returns None on a rank that does not write the log, before the third step, and in a run that
        trains nothing.
        """
        return None if self._now is None else self._now()

    def add(self, watch: Stopwatch, *, over: bool) -> list[Slow]:
        """Count a step whose passes this rank has timed. Every few steps this is collective.

        Args:
            watch: the times.
            over: whether the device has finished the step too. If not, its times are read later.
        Returns: stages and links that are newly slow, or no longer. The list is empty on a rank
            that does not write the log.
        """
        self.steps += 1
        # The first step warms caches and communicators up, and would spoil every mean.
        if self.steps == 1 or not watch.passes:
            return []
        self._watches.append(watch)
        # The same steps on all ranks: the exchange is collective.
        if self.steps != THIRD and self.steps % self._every:
            return []
        ready = self._watches
        self._watches = []
        # The times of a GPU are read after it has passed their events; to read them sooner would
        # stop the host.
        if not over:
            self._watches = ready[-1:]
            ready = ready[:-1]
        new: list[Slow] = []
        while ready:
            schedule = ready[0].schedule
            # A growing batch or a new table may lie between the steps. Steps of one table are read
            # together.
            same = [x for x in ready if x.schedule is schedule]
            ready = [x for x in ready if x.schedule is not schedule]
            new += self._read(same[-READ:], schedule)
        return new

    def _read(self, watches: list[Stopwatch], schedule: Schedule) -> list[Slow]:
        """Exchange the times of steps under one table over the pipeline. Collective.

        Args:
            watches: the times of each step.
            schedule: the table.
        Returns: stages and links that are newly slow, or no longer, as `add`.
        """
        steps = ran_by_all(watches, self.mesh.pp)
        if schedule is not self._schedule:
            # Times under another table say nothing about this one.
            self._schedule = schedule
            self._history = History({})
            self._recent.clear()
            self._copies.clear()
        self._recent.extend(steps)
        if any(kind.traits.lane in COPIES for kind in schedule.kinds):
            self._copies.extend(copied_by_all(watches, self.mesh.pp))
        # Collective over the pipeline, so before ranks that do not collect return.
        peaks = self._peaks()
        # Passes wait for collectives only where tensor, context or expert parallelism has any.
        exposed = exposed_by_all(watches, self.mesh.pp) if self.mesh.hides else None
        if not self._collects:
            return []
        recent = tuple(self._recent)
        copies = tuple(self._copies)
        costs = measured_costs(recent, schedule.placement, self.plan.costs, schedule.cuts, copies)
        if self.speaks:
            # The comparison simulates the table, so it is made only if a report asks for it.
            compare = partial(measured, recent, costs, schedule, self.plan, peaks, exposed, copies)
            self._now = cache(compare)
        if self.steps - self._sampled_at < SAMPLE:
            return []
        self._sampled_at = self.steps
        return self._sample(costs, schedule)

    def _sample(self, costs: Costs, schedule: Schedule) -> list[Slow]:
        """Compare the replicas of the pipeline, stage by stage.

        Collective over data parallelism, among each replica's rank that collects times.

        Args:
            costs: measured costs of this replica.
            schedule: the table.
        Returns: stages and links that are newly slow, or no longer, as `add`.
        """
        comm = costs.comm if isinstance(costs.comm, tuple) else ()
        # A GPU may be slow in one replica only, so replicas are compared stage by stage.
        rows = self.mesh.dp_cp.gather_json([*_stages(costs, schedule), comm, self.mesh.pp.ranks])
        if not self.speaks:
            return []
        self.samples = []
        for f, b, w, links, ranks in rows:
            own = replace(costs, f=tuple(f), b=tuple(b), w=tuple(w), comm=tuple(links) or 0.0)
            self.samples.append(Sample(own, tuple(ranks)))
        self._history, new, self.slow = self._history.after(self.samples, schedule, self.plan.costs)
        return new

    def straggler(self) -> str:
        """Return a line on the slowest and the fastest stage of all replicas at the last sample.

        The text is empty before the first sample, and on a rank that does not write the log.
        """
        if not self.samples or self._schedule is None:
            return ""
        return extremes(self.samples, self._schedule, self.plan.costs)

    def _peaks(self) -> tuple[float, ...]:
        """Return the most bytes allocated so far on each rank of the pipeline; empty on CPUs."""
        mine = memory_bytes(self.mesh.device).get("mem-max-allocated-bytes")
        if mine is None:
            return ()
        return tuple(map(float, self.mesh.pp.gather_json(mine)))


def _stages(costs: Costs, schedule: Schedule) -> list[tuple[float, ...]]:
    """Return [F, B, W], each a tuple of seconds with one item per stage of one whole model."""
    place = schedule.placement
    time = replace(costs, overhead=0.0).durations(place)
    return [tuple(time[kind][: place.chain]) for kind in (Kind.F, Kind.B, Kind.W)]


def table(now: Measured, place: Placement) -> str:
    """Return a table in ms: each stage's passes with their prediction, then each rank's time.

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
