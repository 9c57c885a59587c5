"""Searches for tables whose activations are offloaded or recomputed afterwards."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from megapipe.errors import ScheduleError
from megapipe.schedule.costs import Costs
from megapipe.schedule.families.family import times
from megapipe.schedule.memory.limits import by_rank
from megapipe.schedule.passes import Placement, Schedule
from megapipe.schedule.search.auto import CandidatePlacement, search, search_among

EFFORT = 0.1
"""Seconds of a search for an order: a longer one gains less than other choices."""


def searched(
    ranks: int,
    microbatches: int,
    costs: Costs,
    memory: float | tuple[float, ...],
    *,
    place: Placement | None = None,
    effort: float = EFFORT,
) -> Iterator[Schedule]:
    """Yield tables that fit the memory limit once most activations are offloaded or recomputed.

    There are six searches. Most assume that a fraction of the activations (mem_b), such as 5%,
    stays on the device. The others assume 2 and 4 times the memory. All memory of a pending W
    (mem_w) counts, because it is never offloaded.

    Args:
        memory: limit on a rank's activation, or one limit for each rank, in the unit of the costs.
        place: the placement; None for the best of loops and V.
        effort: about the seconds of each search on one core.
    """
    # A search under the real costs would leave no order that holds more than the memory, and these
    # are the ones worth offloading.
    for part, limit in _MOVED_LATER:
        counted = replace(costs, mem_b=times(part, costs.mem_b))
        rooms = tuple(limit * x for x in by_rank(memory, ranks))
        try:
            if place is None:
                found = search(ranks, microbatches, costs=counted, memory=rooms, effort=effort)
            else:
                candidate = CandidatePlacement(place, counted, rooms)
                found = search_among([candidate], microbatches, effort=effort)
            yield found.schedule
        except ScheduleError:  # not even one microbatch fits
            continue


_MOVED_LATER = (0.05, 0.75), (0.05, 0.875), (0.15, 0.875), (0.33, 0.75), (1.0, 2.0), (1.0, 4.0)
"""(part of mem_b that stays, part of the memory for it); the rest is for copies in flight.

Each was the best of fifteen such pairs for some of fourteen drawn costs, the last two where a copy
takes longer than a forward.
"""
