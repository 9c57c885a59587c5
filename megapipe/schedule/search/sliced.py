"""An order for microbatches in slices: the best one found for as many more of them that are shorter, read as slices."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

from megapipe.errors import ScheduleError
from megapipe.schedule.costs import ATTENTION, Costs
from megapipe.schedule.passes import Placement, Schedule
from megapipe.schedule.search.auto import Candidate, search_among
from megapipe.schedule.simulate import simulate
from megapipe.schedule.transforms.slices import slices

_TRIES = 4
_HAIR = 1 + 1e-9


def searched_slices(
    place: Placement,
    microbatches: int,
    cuts: tuple[float, ...],
    costs: Costs,
    memory: tuple[float, ...],
    *,
    effort: float,
    progress: Callable[[float], None] | None = None,
) -> Schedule | None:
    """The fastest table of these stages and cuts that is found within the memory of each rank, if any is.

    The search knows slices of the mean length that wait for none of their own microbatch. What ranks then hold more,
    as slices differ and forwards come sooner, it has less room for the next time.
    """
    n = len(cuts)
    mean = replace(costs, **dict.fromkeys(ATTENTION, 0.0)).of_slice((1.0,) * n, (0, 0, n))
    held, *_ = mean.memory(place)
    own = [max(held[s] for s in place.stages_on(rank)) for rank in range(place.num_ranks)]
    room = tuple(most - (n - 1) * one for most, one in zip(memory, own, strict=True))
    best: tuple[float, Schedule] | None = None
    for _ in range(_TRIES):
        try:
            found = search_among(
                [Candidate(place, mean, room)], n * microbatches, effort=effort / _TRIES, progress=progress
            )
            table = slices(partial(_given, found.schedule), microbatches, cuts, costs)
        except ScheduleError:  # no room for a slice, or backwards that wait for slices behind them
            break
        time = simulate(table, costs)
        over = [max(0.0, now - most * _HAIR) for now, most in zip(time.peak, memory, strict=True)]
        if not any(over) and (best is None or time.makespan < best[0]):
            best = time.makespan, table
        room = tuple(most - more for most, more in zip(room, over, strict=True)) if any(over) else memory
    return best and best[1]


def _given(schedule: Schedule, _: int) -> Schedule:
    return schedule
