"""A search during a run, in a process of its own: a better table for the same placement.

The search needs no torch, so the process starts at once. Input and output are JSON in files,
because a full pipe without a reader would stop the search. It ends with its caller's process.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryFile
from typing import NamedTuple
from weakref import finalize

from megapipe.errors import ScheduleError
from megapipe.schedule.costs import Costs
from megapipe.schedule.costs_file import dump_costs, read_costs
from megapipe.schedule.ingredients import FixedCosts, Search
from megapipe.schedule.memory.limits import within
from megapipe.schedule.passes import Schedule
from megapipe.schedule.recipe import Recipe
from megapipe.schedule.simulate import simulate
from megapipe.schedule.text import from_json, to_json


class Better(NamedTuple):
    """The result of a search for a table that is faster than an old one.

    Attributes:
        table: the best table as JSON.
        before, after: makespan of the old table and of the best one, in the unit of the costs.
    """

    table: str
    before: float
    after: float


class Beside:
    """A search for a faster table in another process, while the caller continues.

    `result` returns the table when the search is done.

    Args:
        schedule: the table in use.
        costs: the costs under which a table is to be faster.
        memory: limit on each rank's activation, in the unit of the costs.
        effort: about the seconds to spend on one core.
    """

    def __init__(
        self, schedule: Schedule, costs: Costs, memory: tuple[float, ...], effort: float
    ) -> None:
        self.costs = costs
        self._out = TemporaryFile()  # noqa: SIM115  closed with this object
        task = [to_json(schedule), dump_costs(costs), memory, effort, os.getpid()]
        # The child must find this package also where it is not installed, as under tools/.
        paths = [str(Path(__file__).parents[3]), *filter(None, [os.environ.get("PYTHONPATH")])]
        # Files, not pipes: a large table fills a pipe before the child can read it.
        with TemporaryFile() as given:
            given.write(json.dumps(task).encode())
            given.seek(0)
            self._process = subprocess.Popen(
                [sys.executable, "-m", "megapipe.schedule.search.beside"],
                stdin=given,
                stdout=self._out,
                env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
            )
        finalize(self, self._process.kill)  # at the exit of this process at the latest

    def result(self) -> Better | None:
        """Return the best table, which is the old one if none is faster.

        Returns None while the search runs.

        Raises: ScheduleError if the search failed; the error of the other process is on stderr.
        """
        status = self._process.poll()
        if status is None:
            return None
        if status:
            raise ScheduleError(
                f"a search during the run ended with status {status}, without a result."
            )
        self._out.seek(0)
        return Better(*json.loads(self._out.read()))


def better(
    schedule: Schedule, costs: Costs, memory: tuple[float, ...], effort: float, caller: int = 0
) -> Better:
    """Search for a faster table with the same placement and slices.

    If the table has depths of multi-token prediction, they are left out of the search and added
    afterwards. If a rank has no other stage than depths, there is no search.

    Args:
        schedule: the old table.
        memory: limit on each rank's activation, in the unit of the costs.
        effort: about the seconds to spend on one core.
        caller: id of the process whose end stops the search; 0 for none.
    Returns: the fastest table and both makespans; the old table if none is faster.
    """

    def stop_alone(share: float) -> None:
        # A caller that was killed cannot stop the search itself.
        if caller and os.getppid() != caller:
            sys.exit(1)

    place = schedule.placement
    before = simulate(schedule, costs).makespan
    best = Better(to_json(schedule), before, before)
    own = place.own_chain
    # A rank has nothing but depths. The search places passes of the model's own chain only.
    if set(own.rank_of) != set(place.rank_of):
        return best
    held = costs.held_by_rank(place)
    # How much memory depths need is known only once they are in the table. So the own chain is
    # searched several times, each time with one microbatch less of every rank's memory.
    tries = 1
    if place.depths:
        tries = 2 + place.depths
    recipe = Recipe(
        "zb-auto",
        place.num_ranks,
        schedule.num_microbatches,
        search=Search((own,), effort=effort / tries, progress=stop_alone),
        cuts=schedule.cuts,
        depths=place.rank_of[place.main : place.chain],
    )
    for spared in range(tries):
        room = [most - spared * one for most, one in zip(memory, held, strict=True)]
        try:
            made = recipe.build(FixedCosts(costs, tuple(room), place.depths)).table
        except ScheduleError:  # no room for a microbatch
            break
        time = simulate(made, costs)
        if time.makespan < best.after and (within(time.peak, memory) or not place.depths):
            best = Better(to_json(made), before, time.makespan)
    return best


if __name__ == "__main__":
    os.nice(10)  # the run comes first
    table, costs_text, limits, seconds, parent = json.load(sys.stdin)
    costs = read_costs(json.loads(costs_text))
    print(json.dumps(better(from_json(table), costs, tuple(limits), seconds, parent)))
