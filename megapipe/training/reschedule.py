"""--reschedule-after N: measure the passes of a run and continue under a better table.

All tables of the same stages give bitwise equal results, so only the time changes. The first rank
searches in a process of its own. When that has found a table, all ranks take it before the same
step.
"""

from __future__ import annotations

import json
import time
from collections.abc import Generator, Iterator
from dataclasses import replace
from statistics import median

from megapipe.config import Config
from megapipe.errors import ScheduleError
from megapipe.pipeline_parallel.stopwatch import ran_by_all
from megapipe.plan import GIB, Plan
from megapipe.schedule import from_json
from megapipe.schedule.costs_file import dump_costs, read_costs
from megapipe.schedule.measured.costs import MeasuredPass, StepsRan, measured_costs
from megapipe.schedule.search.beside import Beside
from megapipe.training.hooks import Callback, Hooks
from megapipe.training.run import Run
from megapipe.training.steps.step import StepResult

_EFFORT = 10.0
"""The largest effort of the search, about seconds of one core."""
_EFFORT_PER_PASS = 0.02
"""The effort for each forward pass of the table."""
_WORTH = 0.01
"""The least share of the passes' time that the new table must save by its prediction."""


def with_rescheduling(hooks: Hooks, config: Config, plan: Plan) -> Hooks:
    """Return the hooks, with a callback for --reschedule-after if that flag is given.

    A run that lacks a rank keeps its table, and is measured when the rank is back.
    """
    # A rerouted step has no times of a whole replica's table.
    if config.parallel.reschedule_after is None or config.lacks_a_rank:
        return hooks
    return replace(hooks, callbacks=(*hooks.callbacks, Rescheduling(config, plan)))


class Rescheduling(Callback):
    """Measures steps 2 to N (--reschedule-after), and changes to a faster table if there is one.

    The new table may use the activation memory that --memory-limit-gib allows. Without that flag a
    rank may hold as much as the heaviest rank does under the plan's table.
    """

    def __init__(self, config: Config, plan: Plan) -> None:
        assert config.parallel.reschedule_after is not None
        self.after = config.parallel.reschedule_after
        self.limit_gib = config.parallel.memory_limit_gib
        self.plan = plan
        # The generator lives through the run; each callback moves it on by one step.
        self._story: Iterator[None] | None = None
        self._search: Beside | None = None
        self._began = 0.0
        self._took = 0.0

    def before_step(self, run: Run) -> None:
        if self._story is None:
            self._story = self._reschedule(run)
            next(self._story)
        self._began = time.perf_counter()

    def after_step(self, run: Run, result: StepResult) -> None:
        self._took = time.perf_counter() - self._began
        assert self._story is not None
        next(self._story, None)

    def _reschedule(self, run: Run) -> Iterator[None]:
        """Measure steps, search a better table, run under it, and print how much faster it is.

        This is a generator: the caller advances it once for each step of the run.
        """
        # The first step warms up.
        yield
        before, steps = yield from self._timed(run)
        old = self.plan.schedule
        if run.mesh.world.rank == 0:
            costs = measured_costs(steps, old.placement, self.plan.costs, old.cuts)
            passes = old.num_microbatches * len(old.slices) * old.placement.num_stages
            effort = min(_EFFORT, _EFFORT_PER_PASS * passes)
            # The search may use no more memory than the run has left.
            self._search = Beside(old, costs, self._allowed_bytes(), effort)
        # All ranks ask after every step, because they must take the table before the same step.
        while (found := run.mesh.world.gather_json(self._found())[0]) is None:
            yield
        now = f"rescheduling at iteration {run.progress.iteration}"
        if isinstance(found, str):
            run.say(f"WARNING: {now}: {found} The run goes on under {old.name}.")
            return
        table, was, will, measured = found
        text = f"{now}: under {old.name} its passes take {was * 1e3:.1f} ms by measured costs"
        if will > was * (1 - _WORTH):
            run.say(
                f"{text}, under the best table found {will * 1e3:.1f} ms. The run goes on under "
                f"{old.name}."
            )
            return
        new = from_json(table)
        run.say(
            f"{text}, under {new.name} {will * 1e3:.1f} ms, {1 - will / was:.1%} less. The run "
            "goes on under it."
        )
        # With the costs: messages are posted in the order that follows from them.
        run.stages.follow(new, read_costs(measured))
        # The first step under the new table warms up too.
        yield
        since, _ = yield from self._timed(run)
        # Medians: a single slow step must not decide the reported gain.
        a = median(before)
        b = median(since)
        run.say(
            f"rescheduling gained {1 - b / a:.1%}: a step took {a * 1e3:.1f} ms before, "
            f"{b * 1e3:.1f} ms after it"
        )

    def _timed(self, run: Run) -> Generator[None, None, tuple[list[float], StepsRan]]:
        """Yield before each of N - 1 steps, for N of --reschedule-after.

        Returns: (seconds of each step, [step][pipeline rank] -> its measured passes).
        """
        times: list[float] = []
        steps: list[list[list[MeasuredPass]]] = []
        for _ in range(self.after - 1):
            yield
            times.append(self._took)
            steps += ran_by_all([run.stages.stopwatch], run.mesh.pp)
        return times, steps

    def _allowed_bytes(self) -> tuple[float, ...]:
        """Return the bytes of activations that each pipeline rank may hold."""
        plan = self.plan
        # Devices are equal: what fits on the heaviest rank fits on each.
        if self.limit_gib is None:
            return (max(plan.timeline.peak),) * plan.schedule.placement.num_ranks
        return tuple(self.limit_gib * GIB - state for state in plan.state_bytes)

    def _found(self) -> object:
        """Return the search's result in JSON types; None before it is known.

        The result is an error's text, or [table, seconds under the old table, seconds under the new
        one, costs]. Ranks other than 0 do not search and return None.
        """
        if self._search is None:
            return None
        try:
            found = self._search.result()
        except ScheduleError as error:
            return str(error)
        if found is None:
            return None
        return [*found, json.loads(dump_costs(self._search.costs))]
