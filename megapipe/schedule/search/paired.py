"""zb-auto with pairs: the best table with pairs over the catalogue's orders, at a memory limit.

Pairs are found by plays of a table's orders (`transforms.together`), so what is searched is which orders, in how many
chunks, and in which manner ranks choose. All orders have a few plays, the best of them what is left of the effort.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

from megapipe.errors import ScheduleError
from megapipe.schedule.costs import Costs
from megapipe.schedule.generators.waves import loop, vee
from megapipe.schedule.passes import Schedule, unpaired
from megapipe.schedule.patterns import fixed
from megapipe.schedule.search.compiled import library
from megapipe.schedule.shapes.pairs.pairs import limits_in_pairs, pairs, refuse_unpairable
from megapipe.schedule.shapes.pairs.together import best_play
from megapipe.schedule.verify import verify

CHUNKS = (1, 2, 4, 8)
_FIRST, _FINALISTS = 8, 3
# Passes that a second of effort may place in plays, in Python and compiled. Counted, not timed: a faster or a busier
# machine finds the same.
_PYTHON, _COMPILED = 180_000, 2_000_000


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
    """The best table with pairs that is found. The same arguments give the same schedule.

    Args:
        placement: "loop" or "v"; chunks: stages per rank; None: whichever is best.
        memory: most activation of a rank; None: what pairs of each table ask for.
        effort: about the seconds to spend on one core, beyond a first look at every table.
    Raises: ScheduleError where there is no such table, or none can be run within the memory.
    """
    if objective != "makespan":
        raise ScheduleError(
            f"zb-auto with pairs is searched for the makespan, not the {objective}. Leave out --objective."
        )
    tables = list(_tables(ranks, microbatches, placement, chunks, costs))
    if not tables:
        raise ScheduleError(f"zb-auto: no {placement or 'table'} of {chunks} chunk(s) on {ranks} ranks has pairs.")
    refuse_unpairable(tables[0], costs)
    limits = [limits_in_pairs(table, costs, memory) for table in tables]
    found = []
    for n, table in enumerate(tables):
        progress(n / len(tables) / 2)
        if best := best_play(table, costs, limits[n], _FIRST):
            found.append((best[0], n, best[1]))
    found.sort(key=lambda entry: entry[0])
    pace = _PYTHON if library() is None else _COMPILED
    for place, (_, n, _) in enumerate(found[:_FINALISTS]):
        progress((1 + place / _FINALISTS) / 2)
        tries = int(effort / _FINALISTS * pace / (3 * tables[n].placement.num_stages * microbatches))
        best = best_play(tables[n], costs, limits[n], _FIRST + tries)
        assert best is not None
        found.append((best[0], n, best[1]))
    if not found:
        pairs(tables[0], costs, memory=memory)  # says what it would need
    made = replace(min(found, key=lambda entry: entry[0])[2], name="zb-auto")
    verify(made, memory=memory, costs=costs)
    return made


def _tables(
    ranks: int, microbatches: int, placement: str | None, chunks: int | None, costs: Costs
) -> Iterator[Schedule]:
    """Tables of the catalogue with one copy of the model, each order once."""
    seen = set[str]()
    for v in CHUNKS if chunks is None else (chunks,):
        for table in fixed(ranks, microbatches, v, costs):
            shape = "v" if table.placement == vee(ranks) else "loop" if table.placement == loop(ranks, v) else None
            if placement not in (None, shape):
                continue
            passes = [[x for step in row for x in step] for row in table.ranks]
            orders = str(
                [[x for x in row if x.kind.is_forward] + [x for x in row if x.kind.is_backward] for row in passes]
            )
            if orders not in seen:
                seen.add(orders)
                yield unpaired(table)
