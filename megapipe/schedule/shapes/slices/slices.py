"""Slices of a sequence for any table: passes of microbatches become passes of their slices.

Forwards of a microbatch run from its first slice to its last, backwards from the last to the first (Li et al. 2021,
TeraPipe; Sun et al. 2024, Seq1F1B). Read a table for m n microbatches as one of m in n slices each: its ramps are n
times shorter. Its forwards must come n - 1 sooner, as the first backward waits for all slices of its microbatch, and
that is all that a rank holds more: (k + n - 1) / n microbatches where it held k. A document that begins with a slice
needs nothing of the others: its slices are a microbatch of their own here, which wait for less and keep less.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import pairwise

from megapipe.errors import ScheduleError
from megapipe.schedule.costs import UNIT, Costs
from megapipe.schedule.kinds import Kind
from megapipe.schedule.passes import Pass, Placement, Schedule, Step, unpaired
from megapipe.schedule.simulate import simulate
from megapipe.schedule.verify import verify

_SMALL = 1e-9  # rounding
Documents = tuple[tuple[int, ...], ...]


def slices(
    made_for: Callable[[int], Schedule],
    microbatches: int,
    cuts: tuple[float, ...],
    costs: Costs = UNIT,
    *,
    memory: float | None = None,
    documents: Documents = (),
) -> Schedule:
    """A schedule with every microbatch cut in slices of these lengths; pairs become two passes.

    Args:
        made_for: makes the table for a number of microbatches.
        memory: most activation of a rank; None: what the rule above asks for.
        documents: as a `Schedule` has them, of tables in which each runs by itself.
    Returns: a table that `verify` has passed.
    Raises: ScheduleError if no such table keeps to the memory, or the table has other passes than of layers.
    """
    n = len(cuts)
    pattern = unpaired(made_for(n * microbatches))
    refuse_uncuttable(pattern)
    _refuse_costs(costs, cuts, pattern.placement)
    best: tuple[float, Schedule] | None = None
    least = 0.0
    most = n * pattern.placement.num_stages // pattern.placement.num_ranks
    for sooner in range(_longest(n, documents) - 1, most + 1):
        found = of_microbatches(_with_forwards_sooner(pattern, sooner), cuts, documents)
        try:
            time = simulate(found, costs)
        except ScheduleError:  # chunks of a rank share its forwards: more of them must come sooner
            continue
        least = least or max(time.peak)
        if memory is not None and max(time.peak) > memory * (1 + _SMALL):
            break
        if best is None or time.makespan < best[0] * (1 - _SMALL):
            best = time.makespan, found
        if memory is None:
            break
    if best is None:
        raise ScheduleError(_refusal(pattern, n, memory, least))
    verify(best[1], memory=memory, costs=costs)
    return best[1]


def of_one_length(
    name: str, made_for: Callable[[int], Schedule], microbatches: int, count: int
) -> Schedule:
    """A schedule of the literature by this name: one with every microbatch in so many slices of one length."""
    return replace(slices(made_for, microbatches, (1.0,) * count), name=name)


def in_place(schedule: Schedule, cuts: tuple[float, ...], documents: Documents = ()) -> Schedule:
    """A table with each pass replaced by those of its slices: ramps are shorter, memory stays. Of a table in a file,
    which is made for its microbatches alone."""
    refuse_uncuttable(schedule)
    n = len(cuts)
    rows = (
        tuple(
            (x._replace(slice=j if x.kind.is_forward else n - 1 - j),)
            for (x,) in row
            for j in range(n)
        )
        for row in unpaired(schedule).ranks
    )
    table = replace(schedule, ranks=tuple(rows), cuts=cuts, documents=documents)
    verify(table)
    return table


def of_microbatches(
    pattern: Schedule, cuts: tuple[float, ...], documents: Documents = ()
) -> Schedule:
    """A table whose microbatches are read as slices, n after n of one microbatch; the order of its passes stays."""
    n = len(cuts)
    table = replace(
        pattern, num_microbatches=pattern.num_microbatches // n, cuts=cuts, documents=documents
    )

    def slice_of(x: Pass) -> Pass:
        item = x._replace(microbatch=x.microbatch // n, slice=x.microbatch % n)
        of = table.document(item)
        return item if x.kind.is_forward else item._replace(slice=of[0] + of[-1] - x.microbatch % n)

    return replace(
        table,
        ranks=tuple(tuple(tuple(map(slice_of, step)) for step in row) for row in pattern.ranks),
    )


def _longest(n: int, documents: Documents) -> int:
    """Slices of the document that has most of them."""
    return max(b - a for begins in documents or ((),) for a, b in pairwise((0, *begins, n)))


def refuse_uncuttable(schedule: Schedule) -> None:
    """Raises: ScheduleError for a table that is cut already or has passes of other kinds."""
    more = sorted(schedule.kinds - {Kind.F, Kind.B, Kind.W, Kind.BW})
    if more:
        raise ScheduleError(
            f"{schedule.name} has {', '.join(more)}, and slices are cut in a table of F, B, W and BW alone. Give the "
            "table without them: copies and gathers are added after slices."
        )
    if schedule.cuts:
        raise ScheduleError(
            f"{schedule.name} is cut in {len(schedule.cuts)} slices already. Leave out --slices; "
            "--attention-share says what they take."
        )


def _refuse_costs(costs: Costs, cuts: tuple[float, ...], place: Placement) -> None:
    """Raises: ScheduleError for costs that are not of these stages and links, or cannot be of slices."""
    part = costs.of_slice(cuts, (0, 0, len(cuts)))
    part.check(place)
    for rank in range(1, place.num_ranks):
        costs.lag(rank - 1, rank, place.num_ranks)


def _with_forwards_sooner(schedule: Schedule, by: int) -> Schedule:
    """The forwards of each rank in their order, each in the place of the one that was so many before it."""

    def sooner(row: tuple[Step, ...]) -> Iterator[Step]:
        forwards = deque(step for step in row if step[0].kind.is_forward)
        yield from (forwards.popleft() for _ in range(min(by, len(forwards))))
        for step in row:
            if not step[0].kind.is_forward:
                yield step
            elif forwards:
                yield forwards.popleft()

    return replace(schedule, ranks=tuple(tuple(sooner(row)) for row in schedule.ranks))


def _refusal(pattern: Schedule, n: int, memory: float | None, least: float) -> str:
    if memory is None or not least:
        return (
            f"{pattern.name} cannot be cut in {n} slices for {pattern.num_microbatches // n} microbatches: its "
            "backwards wait for slices that come behind them. Take another number of slices or another schedule."
        )
    return (
        f"{pattern.name} in {n} slices holds {least:g}, over the memory limit of {memory:g}. Raise --memory, or take "
        "more slices or another schedule."
    )
