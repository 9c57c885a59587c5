"""Counters of every step: its passes on every rank, beside what the plan predicts, and who is slow.

Each rank times its own passes (pipeline_parallel.stopwatch). Every few steps the ranks of a pipeline tell each other,
and one rank of each replica what they took.
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
from megapipe.pipeline_parallel.stopwatch import Stopwatch, copied_by_all, exposed_by_all, ran_by_all
from megapipe.plan import GIB, Plan
from megapipe.schedule import Costs, Kind, Placement, Schedule, Timeline, simulate
from megapipe.schedule.kinds import COPIES
from megapipe.schedule.measured.costs import Ran, Spent, StepsRan, measured_costs, spent
from megapipe.schedule.measured.slow import History, Sample, Slow, extremes
from megapipe.schedule.views.lanes import Copied, communicates, communication, copied

WINDOW = 5
"""Steps at most between two gathers."""
READ = 2
"""The last of them that are read: a pass that is told to all costs microseconds for every rank."""
SAMPLE = 4
"""Steps at least between two samples that say who is slow."""
THIRD = 3
"""The first step is slower than all others; after this one there are two to compare with."""

_simulated = lru_cache(maxsize=4)(simulate)


@dataclass(frozen=True)
class Measured:
    """A pipeline's last steps, medians over them, in seconds.

    Attributes:
        steps: how many.
        costs: of passes and messages.
        ranks: what each pipeline rank has spent.
        passes: from the first pass's first question to the last pass's end, on the rank where that is most.
        bubble: the most that a rank is idle between its first and its last pass, as a share of `passes`; what it would
            be if all stages were alike and nothing else took time, what unequal stages add, the host's part, and the
            rest, for which messages are left.
        predicted_passes, predicted_bubble: of the plan, at the speed that was measured over all ranks.
        predicted: F, B and W at each position of the chain, likewise.
        peak_bytes: of each rank; none on CPUs. predicted_peaks: of each rank.
        exposed_communication: a mean rank's waits for collectives within its passes; None where these have none.
        predicted_exposed: of the plan, likewise; None where its costs say nothing of them.
        copies: of each rank, where the table has O and L. predicted_copies: of the plan, likewise.
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
    """The measure of passes, and copies, under a table. costs: measured of them."""
    counted = of_plan.costs
    by_rank = list(zip(*[[spent(row) for row in step] for step in steps], strict=True))
    ranks = tuple(Spent(*map(median, zip(*of_steps, strict=True))) for of_steps in by_rank)
    passes, worst = max(r.makespan for r in ranks), max(ranks, key=lambda r: r.idle)
    stages = replace(costs, comm=0.0, overhead=0.0)
    # The bubble in parts: with equal stages it is the table's, what unequal ones add is theirs, the rest is messages
    # and host.
    f, b, w = ((mean(x),) * len(x) for x in _stages(stages, schedule))
    even = replace(stages, f=f, b=b, w=w)
    plan = _simulated(schedule, counted)
    # The plan counts in FLOPs or in another machine's seconds: one factor brings its passes to the length of those
    # here.
    speed = sum(r.busy for r in ranks) / (sum(plan.busy) or 1.0)
    of_table, of_stages = (_bubble(simulate(schedule, x)) for x in (even, stages))
    f, b, w = (tuple(x * speed for x in row) for row in _stages(counted, schedule))
    return Measured(
        len(steps),
        costs,
        ranks,
        passes,
        worst.idle / passes,
        of_table,
        of_stages - of_table,
        (worst.idle - worst.waited) / passes,
        plan.makespan * speed,
        _bubble(plan),
        replace(counted, f=f, b=b, w=w),
        peak_bytes,
        of_plan.peak_bytes,
        exposed,
        communication(schedule, counted).exposed * speed / len(ranks) if communicates(counted) else None,
        tuple(Copied(*map(median, zip(*of_rank, strict=True))) for of_rank in zip(*map(_summed, copies), strict=True)),
        tuple(Copied(*(speed * x for x in of_rank)) for of_rank in copied(schedule, counted, plan)) if copies else (),
    )


def _summed(ranks: Sequence[Sequence[Ran]]) -> list[Copied]:
    """The copies of a step by rank."""

    def part(row: Sequence[Ran], kind: Kind) -> float:
        return sum(x.end - x.begin for x in row if x.item.kind is kind)

    return [Copied(part(row, Kind.O), part(row, Kind.L), sum(x.waited for x in row)) for row in ranks]


def _bubble(timeline: Timeline) -> float:
    return timeline.bubble / timeline.makespan


class Counters:
    """The counters of one rank. Every rank is to call `add` after each step, when none is within its passes.

    Attributes:
        steps: so far.
        slow: what the last sample shows, whether it was to be named or not.
        samples: the last, of every replica.
    """

    def __init__(self, config: Config, mesh: ProcessMesh, plan: Plan, speaker: int, *, speaks: bool) -> None:
        self.mesh, self.plan, self.speaks, self._tells = mesh, plan, speaks, mesh.pp.rank == speaker
        log = config.log
        self._every = 1 if log.metrics_file is not None else min(WINDOW, log.log_interval)
        self.steps = self._sampled_at = 0
        self._watches: list[Stopwatch] = []
        self._recent: deque[list[list[Ran]]] = deque(maxlen=1 if log.metrics_file is not None else READ)
        self._copies: deque[list[list[Ran]]] = deque(maxlen=self._recent.maxlen)
        self._schedule: Schedule | None = None
        self._history = History({})
        self._now: Callable[[], Measured] | None = None
        self.slow: list[Slow] = []
        self.samples: list[Sample] = []

    @property
    def now(self) -> Measured | None:
        """The last steps, on the rank that speaks; None before the third step, and where nothing is trained."""
        return None if self._now is None else self._now()

    def add(self, watch: Stopwatch, *, over: bool) -> list[Slow]:
        """The step whose passes this rank has timed is at its end; a collective every few of them.

        over: the device is through with it too; else it is read later.
        Returns: what is to be named, on the rank that speaks.
        """
        self.steps += 1
        # The first step warms caches and communicators up, and would spoil every mean.
        if self.steps == 1 or not watch.passes:
            return []
        self._watches.append(watch)
        if self.steps != THIRD and self.steps % self._every:
            return []
        ready, self._watches = (self._watches, []) if over else (self._watches[:-1], self._watches[-1:])
        new: list[Slow] = []
        while ready:
            schedule = ready[0].schedule
            # A growing batch or a new table may lie between them: times of one table are read together.
            same = [x for x in ready if x.schedule is schedule]
            ready = [x for x in ready if x.schedule is not schedule]
            new += self._read(same[-READ:], schedule)
        return new

    def _read(self, watches: list[Stopwatch], schedule: Schedule) -> list[Slow]:
        """Steps under one table."""
        steps = ran_by_all(watches, self.mesh.pp)
        if schedule is not self._schedule:
            self._schedule, self._history = schedule, History({})
            self._recent.clear()
            self._copies.clear()
        self._recent.extend(steps)
        if any(kind.traits.lane in COPIES for kind in schedule.kinds):
            self._copies.extend(copied_by_all(watches, self.mesh.pp))
        peaks = self._peaks()
        exposed = exposed_by_all(watches, self.mesh.pp) if self.mesh.hides else None
        if not self._tells:
            return []
        recent, copies = tuple(self._recent), tuple(self._copies)
        costs = measured_costs(recent, schedule.placement, self.plan.costs, schedule.cuts, copies)
        if self.speaks:  # simulated when somebody asks, which is not in every step
            self._now = cache(partial(measured, recent, costs, schedule, self.plan, peaks, exposed, copies))
        if self.steps - self._sampled_at < SAMPLE:
            return []
        self._sampled_at = self.steps
        return self._sample(costs, schedule)

    def _sample(self, costs: Costs, schedule: Schedule) -> list[Slow]:
        """Among the ranks that hold what the speaking rank holds, one of each replica of the pipeline."""
        comm = costs.comm if isinstance(costs.comm, tuple) else ()
        rows = self.mesh.dp_cp.gather_json([*_stages(costs, schedule), comm, self.mesh.pp.ranks])
        if not self.speaks:
            return []
        self.samples = [
            Sample(replace(costs, f=tuple(f), b=tuple(b), w=tuple(w), comm=tuple(links) or 0.0), tuple(ranks))
            for f, b, w, links, ranks in rows
        ]
        self._history, new, self.slow = self._history.after(self.samples, schedule, self.plan.costs)
        return new

    def straggler(self) -> str:
        """The slowest and the fastest stage of the last sample; empty before the first."""
        return extremes(self.samples, self._schedule, self.plan.costs) if self.samples and self._schedule else ""

    def _peaks(self) -> tuple[float, ...]:
        """Most bytes allocated so far on each rank of the pipeline."""
        mine = memory_bytes(self.mesh.device).get("mem-max-allocated-bytes")
        return () if mine is None else tuple(map(float, self.mesh.pp.gather_json(mine)))


def _stages(costs: Costs, schedule: Schedule) -> list[tuple[float, ...]]:
    """F, B and W at each position of the chain."""
    place = schedule.placement
    time = replace(costs, overhead=0.0).durations(place)
    return [tuple(time[kind][: place.chain]) for kind in (Kind.F, Kind.B, Kind.W)]


def table(now: Measured, place: Placement) -> str:
    """Every stage's passes beside their prediction, then every rank's time, in ms."""
    lines = [f"{'stage':>5}  {'rank':>4}" + "".join(f"  {f'{kind} ms':>8}  {'predicted':>9}" for kind in "FBW")]
    for stage, rank in enumerate(place.rank_of):
        cells = [(getattr(x, name)[place.position(stage)] * 1e3) for name in "fbw" for x in (now.costs, now.predicted)]
        pairs = "".join(f"  {a:8.2f}  {b:9.2f}" for a, b in zip(cells[::2], cells[1::2], strict=True))
        lines.append(f"{stage:5}  {rank:4}{pairs}")
    memory = "  peak GiB  predicted" if now.peak_bytes else ""
    lines.append(f"{'rank':>5}  passes ms   waits ms    host ms{memory}")
    for rank, r in enumerate(now.ranks):
        held = (now.peak_bytes[rank] / GIB, now.predicted_peaks[rank] / GIB) if now.peak_bytes else ()
        parts = (r.busy * 1e3, r.waited * 1e3, (r.idle - r.waited) * 1e3)
        lines.append(f"{rank:5}" + "".join(f"  {x:9.1f}" for x in parts) + "".join(f"  {x:9.3g}" for x in held))
    return "\n".join(lines)
