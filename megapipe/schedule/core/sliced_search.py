"""Search of an order for microbatches in slices.

It searches an order for n times as many microbatches of 1/n of the length, and reads these as
slices.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial

from megapipe.errors import ScheduleError
from megapipe.schedule.costs import ATTENTION, Costs
from megapipe.schedule.passes import Placement, Schedule
from megapipe.schedule.patterns import fixed
from megapipe.schedule.search.auto import CandidatePlacement, search_among
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
    progress: Callable[[float], None] | None = None,
) -> Schedule | None:
    """Return the fastest table found for a placement and slices; None if none fits the memory.

    No built-in schedule is faster. The search takes all slices as equally long, and ignores that a
    slice waits for other slices of its microbatch. So the table found may exceed the memory. The
    search is then repeated with a limit that is lower by the excess.

    Args:
        cuts: lengths of the slices of a microbatch.
        memory: limit on each rank's activation, in the unit of the costs.
        documents: slices that begin a document, as in `Schedule.documents`.
        effort: about the seconds to spend on one core.
        progress: called with the fraction of the effort spent, 0 to 1.
    """
    n = len(cuts)
    mean = replace(costs, **dict.fromkeys(ATTENTION, 0.0)).of_slice((1.0,) * n, (0, 0, n))
    largest = [0.0] * place.num_ranks
    for size, rank in zip(mean.memory(place).b, place.rank_of, strict=True):
        largest[rank] = max(largest[rank], size)
    # Backwards run from the last slice to the first. So n - 1 further slices of a microbatch have
    # run their forward before its first backward, which the search does not know.
    room = tuple(most - (n - 1) * one for most, one in zip(memory, largest, strict=True))
    best: tuple[float, Schedule] | None = None

    def over(order: Schedule) -> list[float]:
        """Return the memory by which each rank exceeds its limit with this order in slices.

        The fastest table that exceeds no limit is kept in `best`.
        """
        nonlocal best
        table = slices(partial(_given, order), microbatches, cuts, costs, documents=documents)
        time = simulate(table, costs)
        more = [max(0.0, now - most * _HAIR) for now, most in zip(time.peak, memory, strict=True)]
        if not any(more) and (best is None or time.makespan < best[0]):
            best = time.makespan, replace(table, name="zb-auto")
        return more

    # A slice may not fit the memory, or backwards may wait for later slices.
    with suppress(ScheduleError):
        for _ in range(_TRIES):
            asked = [CandidatePlacement(place, mean, room)]
            part = effort / _TRIES
            found = search_among(asked, n * microbatches, effort=part, progress=progress)
            more = over(found.schedule)
            # Within the limit there may be room left, so the next search gets all of it.
            room = memory
            if any(more):
                room = tuple(most - x for most, x in zip(asked[0].memory, more, strict=True))
    chunks = place.num_stages // place.num_ranks
    for order in fixed(place.num_ranks, n * microbatches, chunks, mean, place):
        with suppress(ScheduleError):
            over(order)
    return best and best[1]


def fastest_slices(
    candidates: Sequence[CandidatePlacement],
    microbatches: int,
    cuts: tuple[float, ...],
    *,
    documents: Documents = (),
    effort: float,
    progress: Callable[[float], None] | None = None,
) -> Schedule:
    """Return the fastest table with slices that is found for any of these placements.

    Args:
        candidates: placements with their costs and memory limits.
        cuts: lengths of the slices of a microbatch.
        documents: slices that begin a document, as in `Schedule.documents`.
        effort: about the seconds to spend on one core.
        progress: called with the fraction of the effort spent, 0 to 1.
    Raises: ScheduleError if none is found within the memory.
    """
    found: list[tuple[float, int, Schedule]] = []
    for i, one in enumerate(candidates):
        size = (one.placement, microbatches, cuts, one.costs, one.memory)
        part = effort / len(candidates)
        made = searched_slices(*size, documents=documents, effort=part, progress=progress)
        if made is not None:
            # The number breaks ties, because schedules have no order.
            found.append((simulate(made, one.costs).makespan, i, made))
    if not found:
        most = max(max(one.memory) for one in candidates)
        raise ScheduleError(
            f"zb-auto finds no order of {len(cuts)} slices in memory {most:g}. "
            "Allow more, or take fewer slices."
        )
    return min(found)[2]


def _given(schedule: Schedule, _: int) -> Schedule:
    return schedule
