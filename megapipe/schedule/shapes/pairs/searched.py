"""zb-auto with pairs: the best table with overlapped pairs, at a memory limit.

Pairs come from simulations of a table's orders (`shapes.pairs.together`). The search chooses the
order of the catalogue, the number of chunks, and the policy by which ranks choose passes. Every
order is simulated a few times, and the best orders with the rest of the effort.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

from megapipe.errors import ScheduleError
from megapipe.schedule.core.compiled import library
from megapipe.schedule.costs import Costs
from megapipe.schedule.passes import Pass, Schedule, unpaired
from megapipe.schedule.patterns import fixed
from megapipe.schedule.placement import loop, vee
from megapipe.schedule.shapes.pairs.pairs import limits_in_pairs, pairs, refuse_unpairable
from megapipe.schedule.shapes.pairs.together import best_play
from megapipe.schedule.verify import verify

CHUNKS = (1, 2, 4, 8)
_FIRST = 8
_FINALISTS = 3
"""Simulations of every order at first, and orders that get the rest of the effort."""
# Passes that a second of effort may place, in Python and in C. They are counted and not timed, so
# that a faster or busier machine finds the same table.
_PYTHON = 180_000
_COMPILED = 2_000_000


def search_pairs(
    ranks: int,
    microbatches: int,
    *,
    costs: Costs,
    placement: str | None = None,
    chunks: int | None = None,
    memory: float | None = None,
    objective: str = "makespan",
    effort: float = 4.0,
    progress: Callable[[float], None] = lambda share: None,
) -> Schedule:
    """Return the best table with overlapped pairs that a search finds.

    Equal arguments give equal tables.

    Args:
        placement: "loop" or "v"; None to try these and Hanayo's waves.
        chunks: stages on each rank; None for the best of CHUNKS.
        memory: limit on a rank's activation, in the unit of the costs; None for as much as the
            pairs of each table need.
        objective: "makespan"; any other is refused.
        effort: about the seconds to spend on one core, after a first simulation of every table.
        progress: called with the fraction of the effort spent, 0 to 1.
    Raises: ScheduleError if there is no such table, if none fits the memory, or for another
        objective.
    """
    if objective != "makespan":
        raise ScheduleError(
            f"zb-auto with pairs is searched for the makespan, not the {objective}. "
            "Leave out --objective."
        )
    tables = list(_tables(ranks, microbatches, placement, chunks, costs))
    if not tables:
        raise ScheduleError(
            f"zb-auto: no {placement or 'table'} of {chunks} chunk(s) on {ranks} ranks has pairs."
        )
    refuse_unpairable(tables[0], costs)
    limits = [limits_in_pairs(table, costs, memory) for table in tables]
    found = []
    for n, table in enumerate(tables):
        progress(n / len(tables) / 2)
        if best := best_play(table, costs, limits[n], _FIRST):
            found.append((best[0], n, best[1]))
    found.sort(key=lambda entry: entry[0])
    pace = _COMPILED
    if library() is None:
        pace = _PYTHON
    for place, (_, n, _) in enumerate(found[:_FINALISTS]):
        progress((1 + place / _FINALISTS) / 2)
        passes = 3 * tables[n].placement.num_stages * microbatches
        tries = int(effort / _FINALISTS * pace / passes)
        best = best_play(tables[n], costs, limits[n], _FIRST + tries)
        assert best is not None
        found.append((best[0], n, best[1]))
    if not found:
        pairs(tables[0], costs, memory=memory)  # raises with the memory that pairs need
    made = replace(min(found, key=lambda entry: entry[0])[2], name="zb-auto")
    verify(made, memory=memory, costs=costs)
    return made


def _tables(
    ranks: int, microbatches: int, placement: str | None, chunks: int | None, costs: Costs
) -> Iterator[Schedule]:
    """Yield the built-in tables with one copy of the model, their pairs of passes separated.

    Of tables with the same order of forwards and the same order of backwards, only the first is
    yielded.

    Args:
        placement: "loop" or "v"; None for any.
        chunks: stages on each rank; None for each of CHUNKS.
    """
    seen = set[tuple[Pass, ...]]()
    for v in CHUNKS if chunks is None else (chunks,):
        for table in fixed(ranks, microbatches, v, costs):
            shape = None
            if table.placement == loop(ranks, v):
                shape = "loop"
            if table.placement == vee(ranks):
                shape = "v"
            if placement not in (None, shape):
                continue
            # Pairs are formed again from the order of forwards and the order of backwards alone.
            # Tables that differ only in how they mix these, or in W, give the same pairs.
            forwards = [x for x in table.passes() if x.kind.is_forward]
            backwards = [x for x in table.passes() if x.kind.is_backward]
            orders = (*forwards, *backwards)
            if orders not in seen:
                seen.add(orders)
                yield unpaired(table)
