"""Compare the passes of steps with the plan's prediction, and find slow stages and links.

Each rank times its own passes (pipeline_parallel.stopwatch). Every few steps the ranks of a
pipeline exchange their times, and then one rank of each replica of the pipeline.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache, partial

from megapipe.config import Config
from megapipe.distributed.device import memory_bytes
from megapipe.distributed.mesh import ProcessMesh
from megapipe.pipeline_parallel.stopwatch import (
    Stopwatch,
    copied_by_all,
    exposed_by_all,
    ran_by_all,
)
from megapipe.plan import Plan
from megapipe.schedule import Costs, Schedule
from megapipe.schedule.kinds import COPIES
from megapipe.schedule.measured.costs import MeasuredPass, measured_costs
from megapipe.schedule.measured.slow import History, Sample, Slow, extremes
from megapipe.training.report.again import DIFFERS, MEASURED, Again, predict_again
from megapipe.training.report.compared import (
    Measured,
    bubble_of,
    measured,
    simulated,
    times_of_stages,
)

WINDOW = 5
"""Most steps between two exchanges of times."""
READ = 2
"""Number of latest steps that an exchange reads. Each pass costs microseconds per rank."""
SAMPLE = 4
"""Least number of steps between two samples that find slow stages."""
THIRD = 3
"""The step after which times are first compared. The first step is slower than all others."""


class Counters:
    """The times of one rank's steps, exchanged with other ranks every few steps.

    Every rank calls `add` after each step. On the rank that writes the log, `now` returns the last
    comparison with the plan, and `straggler` a line on the slowest stage. On all other ranks they
    return None and an empty text.

    A sample is a replica's measured costs of stages and links, taken every SAMPLE steps.

    `predict_again` predicts the step from measured passes.

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
        predicts_again: whether `now` predicts by the passes of the first steps, not by the plan.
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
        self._recent: deque[list[list[MeasuredPass]]] = deque(maxlen=kept)
        self._copies: deque[list[list[MeasuredPass]]] = deque(maxlen=kept)
        self.steps = 0
        self._sampled_at = 0
        self._watches: list[Stopwatch] = []
        self._schedule: Schedule | None = None
        self._history = History({})
        self._now: Callable[[], Measured] | None = None
        self._compare: Callable[..., Measured] | None = None
        self._again: Again | None = None
        self.predicts_again = False
        # The measured steps so far, until the step is predicted again from them.
        self._first: list[list[list[MeasuredPass]]] = []
        self.slow: list[Slow] = []
        self.samples: list[Sample] = []

    @property
    def now(self) -> Measured | None:
        """Return the comparison of the last steps with the plan.

        Returns None on a rank that does not write the log, and in a run that trains nothing. Also
        before the first exchange of times, after the second or third step.
        """
        return None if self._now is None else self._now()

    @property
    def measures_enough(self) -> bool:
        """Return whether enough steps of one table are measured to predict the step from them.

        Returns False after that prediction, and on a rank that does not write the log.
        """
        return len(self._first) >= MEASURED

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
        """Exchange the measured times of steps over the pipeline. Collective.

        Args:
            watches: the times of each step.
            schedule: the table.
        Returns: stages and links that have become slow, or are slow no longer.
        """
        steps = ran_by_all(watches, self.mesh.pp)
        if schedule is not self._schedule:
            # Times under another table say nothing about this one.
            self._schedule = schedule
            self._history = History({})
            self._recent.clear()
            self._copies.clear()
            self._first.clear()
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
            if self._again is None:
                self._first += steps
            given = (recent, costs, schedule, self.plan, peaks, exposed, copies)
            self._compare = partial(measured, *given)
            self._renew()
        if self.steps - self._sampled_at < SAMPLE:
            return []
        self._sampled_at = self.steps
        return self._sample(costs, schedule)

    def predict_again(self, seconds: Sequence[float]) -> Again | None:
        """Predict the step from the passes measured so far, on the rank that writes the log.

        If a pipeline's new bubble differs from the plan's by DIFFERS or more, `now` has the new
        prediction from here on. Returns None unless `measures_enough`, so at most one call returns
        a prediction.

        Args:
            seconds: the durations of the last steps.
        """
        if not self.measures_enough or self._schedule is None:
            return None
        # Before these, another batch size may have had another table.
        last = seconds[-len(self._first) :]
        given = (self._first, self.plan.costs, self._schedule, last, tuple(self._copies))
        self._again = predict_again(*given)
        plan = bubble_of(simulated(self._schedule, self.plan.costs))
        differs = abs(self._again.bubble - plan) >= DIFFERS
        # Without a pipeline the host's time between two passes would count as a bubble.
        self.predicts_again = differs and len(self._schedule.ranks) > 1
        self._first = []
        self._renew()
        return self._again

    def _renew(self) -> None:
        """Let `now` compare the last steps with the latest prediction: the plan's, or a new one."""
        assert self._compare is not None
        # The comparison simulates the table, so it is made only if a report asks for it.
        again = partial(self._compare, again=self._again, by_again=self.predicts_again)
        self._now = cache(again)

    def _sample(self, costs: Costs, schedule: Schedule) -> list[Slow]:
        """Compare the replicas of the pipeline, stage by stage.

        Collective over data parallelism, among each replica's rank that collects times.

        Args:
            costs: measured costs of this replica.
            schedule: the table.
        Returns: stages and links that have become slow, or are slow no longer.
        """
        comm = costs.comm if isinstance(costs.comm, tuple) else ()
        # A GPU may be slow in one replica only, so replicas are compared stage by stage.
        rows = self.mesh.dp_cp.gather_json(
            [*times_of_stages(costs, schedule), comm, self.mesh.pp.ranks]
        )
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
