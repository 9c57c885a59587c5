"""Compare every schedule with and without overlapped pairs."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from megapipe.errors import ScheduleError
from megapipe.notebook import aligned
from megapipe.schedule.catalogue import build, entry_of, is_file
from megapipe.schedule.core.bound import paired_bound
from megapipe.schedule.costs import Costs
from megapipe.schedule.ingredients import FixedCosts, Pairing, refuse_idle
from megapipe.schedule.passes import Schedule, overlaps, unpaired
from megapipe.schedule.recipe import Recipe
from megapipe.schedule.simulate import simulate
from megapipe.schedule.views.scene import short

CHUNKS = (2, 4, 8)
_HEAD = (
    "schedule",
    "alone",
    "memory",
    "pairs",
    "memory",
    "of alone",
    "F in pairs",
    "bound",
    "above",
)


def paired_table(
    ranks: int,
    microbatches: int,
    costs: Costs,
    memory: float | None,
    *,
    names: Sequence[str],
    progress: Callable[[float, str], None],
) -> str:
    """Return text that says what overlapped pairs of passes would gain in each built-in schedule.

    A line has a schedule's makespan and memory without and with pairs, the fraction of forwards
    that run with a backward, and a lower bound. Where pairs are impossible it has the reason.
    Searched schedules are left out.

    Args:
        memory: limit on a rank's activation, in the unit of the costs; None for no limit.
        names: names of built-in schedules.
        progress: called with the fraction of the work done, 0 to 1, and the name of the next
            schedule.
    """
    # Without communication no pair is shorter than its passes, and every row would say so.
    refuse_idle(costs)
    labels = [(name, v) for name in names for v in _chunks(name)]
    cells: list[tuple[str, ...]] = [_HEAD]
    refused = []
    for i, (name, v) in enumerate(labels):
        label = name
        if v:
            label += f" v={v}"
        progress(i / len(labels), label)
        try:
            table = build(name, ranks, microbatches, chunks=v, costs=costs)
            cells.append((label, *_row(table, costs, memory)))
        # No such table, or pairs do not make it shorter. The reason stands below the lines.
        except ScheduleError as error:
            refused.append(f"{label}: {error}")
    progress(1.0, "")
    # The shortest table with pairs first.
    body = sorted(cells[1:], key=lambda line: float(line[3]))
    return "\n".join([*aligned([_HEAD, *body], str.ljust), *refused])


def describe_pairs(made: Schedule, costs: Costs, memory: float | None) -> list[str]:
    """Return lines that compare a table with overlapped pairs to one without, and to a bound.

    Args:
        made: the table with overlapped pairs.
        memory: limit on a rank's activation, for the lower bound; None for the most that the table
            holds.
    """
    alone = simulate(unpaired(made), costs)
    time = simulate(made, costs)
    steps = [*made.steps()]
    # Without a limit the bound is for the memory that this table needs, so that the two compare.
    limit = max(time.peak) if memory is None else memory
    bound = paired_bound(made, costs, limit)
    lines = [
        f"pairs: {sum(len(step) > 1 for step in steps)} of {len(steps)} steps run two passes; "
        f"without any it takes {short(alone.makespan)} at a memory of {short(max(alone.peak))}"
    ]
    if bound:
        lines.append(
            f"lower bound with pairs: {short(bound)}; {time.makespan / bound - 1:.1%} above it"
        )
    return lines


def _chunks(name: str) -> tuple[int | None, ...]:
    """Return the numbers of stages per rank to try, such as (2, 4).

    The result is (None,) if the schedule itself fixes the number, and () for a searched schedule.
    """
    if is_file(name):
        return (None,)
    entry = entry_of(name)
    if entry.searched:
        return ()
    if entry.any_chunks:
        return CHUNKS
    return (None,)


def _row(table: Schedule, costs: Costs, memory: float | None) -> tuple[str, ...]:
    """Return the cells of a schedule's line after its name, in the order of the titles in `_HEAD`.

    Args:
        table: the table without pairs.
        memory: limit on a rank's activation, in the unit of the costs; None for no limit.
    """
    made = Recipe(table.name, table=table, pairs=Pairing()).build(FixedCosts(costs, memory)).table
    alone = simulate(unpaired(table), costs)
    time = simulate(made, costs)
    both = sum(overlaps(step) for step in made.steps())
    forwards = sum(x.kind.is_forward for x in made.passes())
    limit = max(time.peak) if memory is None else memory
    bound = paired_bound(made, costs, limit)
    # There is no bound for two copies of the model, nor where costs name an fb.
    ends = ["", ""]
    if bound:
        ends = [short(bound), f"{time.makespan / bound - 1:.1%}"]
    return (
        short(alone.makespan),
        short(max(alone.peak)),
        short(time.makespan),
        short(max(time.peak)),
        f"{time.makespan / alone.makespan:.3f}",
        f"{both / forwards:.0%}",
        *ends,
    )
