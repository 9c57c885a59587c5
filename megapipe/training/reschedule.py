"""--reschedule-after N: a run that measures its passes and goes on under a better table.

All tables of the same stages train the same bits, so nothing but the time changes. The first rank has a process of its
own search; when that has found something, all ranks take the new table between the same two steps.
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
from megapipe.schedule.measured.costs import Ran, StepsRan, measured_costs
from megapipe.schedule.search.beside import Beside
from megapipe.training.hooks import Callback, Hooks
from megapipe.training.run import Run
from megapipe.training.steps.step import StepResult

_EFFORT, _EFFORT_PER_PASS = 10.0, 0.02
"""The effort of the search, about seconds of a core: at most, and for each F."""
_WORTH = 0.01
"""The share of the passes' time that the new table must save by its prediction."""


def with_rescheduling(hooks: Hooks, config: Config, plan: Plan) -> Hooks:
    """The hooks with a callback that does what --reschedule-after asks for."""
    if config.parallel.reschedule_after is None:
        return hooks
    return replace(hooks, callbacks=(*hooks.callbacks, Rescheduling(config, plan)))


class Rescheduling(Callback):
    """Measures steps 2 to N, has a better table searched, goes on under it, and tells what that gained.

    It may hold what --memory-limit-gib leaves for activations, without it on each rank what the plan's table holds on
    the heaviest.
    """

    def __init__(self, config: Config, plan: Plan) -> None:
        assert config.parallel.reschedule_after is not None
        self.after, self.limit_gib, self.plan = config.parallel.reschedule_after, config.parallel.memory_limit_gib, plan
        self._course: Iterator[None] | None = None
        self._search: Beside | None = None
        self._began = self._took = 0.0

    def before_step(self, run: Run) -> None:
        if self._course is None:
            self._course = self._through(run)
            next(self._course)
        self._began = time.perf_counter()

    def after_step(self, run: Run, result: StepResult) -> None:
        self._took = time.perf_counter() - self._began
        assert self._course is not None
        next(self._course, None)

    def _through(self, run: Run) -> Iterator[None]:
        """The whole story; each yield is a step of training."""
        yield  # warms up
        before, steps = yield from self._timed(run)
        old = self.plan.schedule
        if run.mesh.world.rank == 0:
            costs = measured_costs(steps, old.placement, self.plan.costs, old.cuts)
            passes = old.num_microbatches * len(old.slices) * old.placement.num_stages
            effort = min(_EFFORT, _EFFORT_PER_PASS * passes)
            self._search = Beside(old, costs, self._room(), effort)
        # Asked after every step and of all ranks: they must take the new table between the same two steps.
        while (found := run.mesh.world.gather_json(self._found())[0]) is None:
            yield
        now = f"rescheduling at iteration {run.progress.iteration}"
        if isinstance(found, str):
            run.say(f"WARNING: {now}: {found} The run goes on under {old.name}.")
            return
        table, was, will, costs = found
        told = f"{now}: under {old.name} its passes take {was * 1e3:.1f} ms by measured costs"
        if will > was * (1 - _WORTH):
            run.say(f"{told}, under the best table found {will * 1e3:.1f} ms. The run goes on under {old.name}.")
            return
        new = from_json(table)
        run.say(f"{told}, under {new.name} {will * 1e3:.1f} ms, {1 - will / was:.1%} less. The run goes on under it.")
        run.stages.follow(new, read_costs(costs))
        yield  # warms up
        since, _ = yield from self._timed(run)
        a, b = median(before), median(since)
        run.say(f"rescheduling gained {1 - b / a:.1%}: a step took {a * 1e3:.1f} ms before, {b * 1e3:.1f} ms after it")

    def _timed(self, run: Run) -> Generator[None, None, tuple[list[float], StepsRan]]:
        """Times of `after` - 1 steps and of their passes."""
        times, steps = list[float](), list[list[list[Ran]]]()
        for _ in range(self.after - 1):
            yield
            times.append(self._took)
            steps += ran_by_all([run.stages.stopwatch], run.mesh.pp)
        return times, steps

    def _room(self) -> tuple[float, ...]:
        """Bytes of activations that each rank may hold."""
        plan = self.plan
        if self.limit_gib is None:
            return (max(plan.timeline.peak),) * plan.schedule.placement.num_ranks
        return tuple(self.limit_gib * GIB - state for state in plan.state_bytes)

    def _found(self) -> object:
        """The message of the rank that searches to the others: nothing yet, an error, or a table with its costs."""
        if self._search is None:
            return None
        try:
            found = self._search.result()
        except ScheduleError as error:
            return str(error)
        return None if found is None else [*found, json.loads(dump_costs(self._search.costs))]
