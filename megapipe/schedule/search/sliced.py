"""An order for microbatches in slices: the best one found for as many more of them that are shorter, read as slices."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial

from megapipe.errors import ScheduleError
from megapipe.schedule.costs import ATTENTION, Costs
from megapipe.schedule.passes import Placement, Schedule
from megapipe.schedule.patterns import fixed
from megapipe.schedule.search.auto import Candidate, search_among
from megapipe.schedule.shapes.slices.slices import Documents, slices
from megapipe.schedule.simulate import simulate

_TRIES = 4
_HAIR = 1 + 1e-9


def searched_slices(
    place: Placement,
    microbatches: int,
    cuts: tuple[float, ...],
    costs: Costs,
    memory: tuple[float, ...],
    *,
    documents: Documents = (),
    effort: float,
    portable: bool = False,
    progress: Callable[[float], None] | None = None,
) -> Schedule | None:
    """The fastest table of these stages and cuts that is found within the memory of each rank, if any is; none of the
    catalogue is faster.

    The search knows slices of the mean length that wait for none of their own microbatch. What ranks then hold more,
    as slices differ and forwards come sooner, it has less room for the next time.
    """
    n = len(cuts)
    mean = replace(costs, **dict.fromkeys(ATTENTION, 0.0)).of_slice((1.0,) * n, (0, 0, n))
    held = mean.memory(place).b
    own = [max(held[s] for s in place.stages_on(rank)) for rank in range(place.num_ranks)]
    room = tuple(most - (n - 1) * one for most, one in zip(memory, own, strict=True))
    best: tuple[float, Schedule] | None = None

    def over(order: Schedule) -> list[float]:
        """The excess that each rank holds under it, once it is cut; the best without any is kept."""
        nonlocal best
        table = slices(partial(_given, order), microbatches, cuts, costs, documents=documents)
        time = simulate(table, costs)
        more = [max(0.0, now - most * _HAIR) for now, most in zip(time.peak, memory, strict=True)]
        if not any(more) and (best is None or time.makespan < best[0]):
            best = time.makespan, replace(table, name="zb-auto")
        return more

    with suppress(ScheduleError):  # no room for a slice, or backwards that wait for slices behind them
        for _ in range(_TRIES):
            asked, part = [Candidate(place, mean, room)], effort / _TRIES
            found = search_among(asked, n * microbatches, effort=part, portable=portable, progress=progress)
            more = over(found.schedule)
            room = tuple(most - x for most, x in zip(room, more, strict=True)) if any(more) else memory
    for order in fixed(place.num_ranks, n * microbatches, place.num_stages // place.num_ranks, mean, place):
        with suppress(ScheduleError):
            over(order)
    return best and best[1]


def fastest_slices(
    candidates: Sequence[Candidate],
    microbatches: int,
    cuts: tuple[float, ...],
    *,
    documents: Documents = (),
    effort: float,
    portable: bool = False,
    progress: Callable[[float], None] | None = None,
) -> Schedule:
    """The fastest table for any of these placements. Raises: ScheduleError if none is found within their memory."""
    found: list[tuple[float, int, Schedule]] = []
    for i, one in enumerate(candidates):
        size, part = (one.placement, microbatches, cuts, one.costs, one.memory), effort / len(candidates)
        made = searched_slices(*size, documents=documents, effort=part, portable=portable, progress=progress)
        found += [] if made is None else [(simulate(made, one.costs).makespan, i, made)]
    if not found:
        most = max(max(one.memory) for one in candidates)
        raise ScheduleError(
            f"zb-auto finds no order of {len(cuts)} slices in memory {most:g}. Allow more, or take fewer slices."
        )
    return min(found)[2]


def _given(schedule: Schedule, _: int) -> Schedule:
    return schedule
