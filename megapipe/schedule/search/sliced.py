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
    progress: Callable[[float], None] | None = None,
) -> Schedule | None:
    """Return the fastest table found for these stages and slices; None if none fits the memory.

    No table of the catalogue is faster. The search assumes slices of the mean length that do not
    wait for other slices of their microbatch. The resulting table may hold more, because slices
    differ and forwards come sooner. The next search then has less memory by this excess.

    Args:
        cuts: lengths of the slices.
        memory: limit of each rank, in the unit of the costs.
        documents: as in `Schedule.documents`.
        effort, progress: as in `search.auto`.
    """
    n = len(cuts)
    mean = replace(costs, **dict.fromkeys(ATTENTION, 0.0)).of_slice((1.0,) * n, (0, 0, n))
    held = mean.memory(place).b
    own = [max(held[s] for s in place.stages_on(rank)) for rank in range(place.num_ranks)]
    room = tuple(most - (n - 1) * one for most, one in zip(memory, own, strict=True))
    best: tuple[float, Schedule] | None = None

    def over(order: Schedule) -> list[float]:
        """Return each rank's excess over its limit with this order in slices.

        The best table without excess is kept.
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
            asked = [Candidate(place, mean, room)]
            part = effort / _TRIES
            found = search_among(asked, n * microbatches, effort=part, progress=progress)
            more = over(found.schedule)
            room = (
                tuple(most - x for most, x in zip(room, more, strict=True)) if any(more) else memory
            )
    for order in fixed(
        place.num_ranks, n * microbatches, place.num_stages // place.num_ranks, mean, place
    ):
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
    progress: Callable[[float], None] | None = None,
) -> Schedule:
    """Return the fastest table for any of these placements. Arguments are as in `searched_slices`.

    Raises: ScheduleError if none is found within the memory.
    """
    found: list[tuple[float, int, Schedule]] = []
    for i, one in enumerate(candidates):
        size = (one.placement, microbatches, cuts, one.costs, one.memory)
        part = effort / len(candidates)
        made = searched_slices(*size, documents=documents, effort=part, progress=progress)
        found += [] if made is None else [(simulate(made, one.costs).makespan, i, made)]
    if not found:
        most = max(max(one.memory) for one in candidates)
        raise ScheduleError(
            f"zb-auto finds no order of {len(cuts)} slices in memory {most:g}. "
            "Allow more, or take fewer slices."
        )
    return min(found)[2]


def _given(schedule: Schedule, _: int) -> Schedule:
    return schedule
