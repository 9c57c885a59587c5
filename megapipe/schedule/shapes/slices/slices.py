"""Slices of the sequence for any table: a pass of a microbatch becomes passes of its slices.

Forwards of a microbatch run from its first slice to its last, backwards from the last to the first
(Li et al. 2021, TeraPipe; Sun et al. 2024, Seq1F1B). A table for m n microbatches, read as one for
m microbatches of n slices each, has ramps n times shorter. The first backward waits for all slices
of its microbatch, so forwards must come n - 1 passes sooner. That is all the memory it adds: a rank
holds (k + n - 1) / n microbatches where it held k. A document that begins with a slice needs
nothing of other documents. Its slices act as a microbatch of their own, which waits for less and
holds less.

Two microbatches in 2 slices on 2 ranks, 1F1B at F = BW. A number is microbatch.slice, and backwards
are in brackets:

    rank 0   0.0   0.1   1.0        [0.1]  1.1  [0.0]       [1.1] [1.0]
    rank 1         0.0   0.1  [0.1]  1.0  [0.0]  1.1  [1.1] [1.0]
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import pairwise

from megapipe.errors import ScheduleError
from megapipe.schedule.costs import UNIT, Costs
from megapipe.schedule.kinds import LAYERS
from megapipe.schedule.passes import Pass, Placement, Schedule, Step, unpaired
from megapipe.schedule.simulate import simulate
from megapipe.schedule.verify import verify

_SMALL = 1e-9  # rounding
Documents = tuple[tuple[int, ...], ...]
"""Slices that begin a document, as in `Schedule.documents`."""


def slices(
    made_for: Callable[[int], Schedule],
    microbatches: int,
    cuts: tuple[float, ...],
    costs: Costs = UNIT,
    *,
    memory: float | None = None,
    documents: Documents = (),
) -> Schedule:
    """Return a schedule with every microbatch cut into slices; overlapped pairs are separated.

    Args:
        made_for: takes a number of microbatches and returns the table for it.
        microbatches: number of microbatches before they are cut.
        cuts: lengths of the slices, in any unit.
        costs: costs that say how long slices take.
        memory: limit on a rank's activation, in the unit of the costs. A forward may come earlier
            where the limit allows it. None takes the least memory that slices need.
        documents: slices that begin a document, as in `Schedule.documents`.
    Returns: a table that `verify` has passed.
    Raises: ScheduleError if no such table fits the memory, or the table has other kinds of pass
    than F, B, W and BW.
    """
    n = len(cuts)
    # Forwards move ahead of backwards below, so a pair could not stay together.
    pattern = unpaired(made_for(n * microbatches))
    refuse_uncuttable(pattern)
    _refuse_costs(costs, cuts, pattern.placement)
    best: tuple[float, Schedule] | None = None
    least = 0.0
    # At most by all forwards that a microbatch has on a rank.
    most = n * pattern.placement.num_stages // pattern.placement.num_ranks
    for sooner in range(_longest(n, documents) - 1, most + 1):
        found = of_microbatches(_with_forwards_sooner(pattern, sooner), cuts, documents)
        try:
            time = simulate(found, costs)
        except ScheduleError:
            # Chunks of a rank share its row, so their forwards must come sooner still.
            continue
        least = least or max(time.peak)
        # Each forward further ahead holds more, so no later table fits.
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
    """Return a schedule in which every microbatch is cut into `count` slices of equal length.

    Args:
        name: name of the returned schedule.
        made_for: (number of microbatches) -> a table of whole microbatches.
        microbatches: number of microbatches before they are cut.
    """
    return replace(slices(made_for, microbatches, (1.0,) * count), name=name)


def in_place(schedule: Schedule, cuts: tuple[float, ...], documents: Documents = ()) -> Schedule:
    """Return a table in which each pass of a microbatch is replaced by one pass for each slice.

    With two slices F0 F1 B0 becomes F0.0 F0.1 F1.0 F1.1 B0.1 B0.0. Warm-up and cool-down become
    shorter, and the memory stays the same. This way of cutting serves tables from files, which
    exist for one number of microbatches only.

    Args:
        cuts: lengths of the slices, in any unit.
        documents: slices that begin a document, as in `Schedule.documents`.
    """
    refuse_uncuttable(schedule)
    n = len(cuts)

    # A backward adds to the gradients of keys of earlier slices, so these come after it.
    def sliced(step: Step) -> Iterator[Step]:
        (item,) = step
        order = range(n) if item.kind.is_forward else reversed(range(n))
        for number in order:
            yield (item._replace(slice=number),)

    table = replace(unpaired(schedule).map(sliced), cuts=cuts, documents=documents)
    verify(table)
    return table


def of_microbatches(
    pattern: Schedule, cuts: tuple[float, ...], documents: Documents = ()
) -> Schedule:
    """Return the table with every n consecutive microbatches renamed to the n slices of one.

    The order of the passes stays: for n = 2, F0 F1 F2 F3 becomes F0.0 F0.1 F1.0 F1.1.

    Args:
        pattern: the table, with n times the microbatches of the result.
        cuts: lengths of the n slices, in any unit.
        documents: slices that begin a document, as in `Schedule.documents`.
    """
    # The pattern has n times as many microbatches, each as short as a slice.
    n = len(cuts)
    microbatches = pattern.num_microbatches // n
    table = replace(pattern, num_microbatches=microbatches, cuts=cuts, documents=documents)

    def slice_of(x: Pass) -> Pass:
        item = x._replace(microbatch=x.microbatch // n, slice=x.microbatch % n)
        if x.kind.is_forward:
            return item
        # Backwards run through the slices of a document in reverse.
        of = table.document(item)
        return item._replace(slice=of[0] + of[-1] - x.microbatch % n)

    return replace(table, ranks=pattern.map(lambda step: (tuple(map(slice_of, step)),)).ranks)


def _longest(n: int, documents: Documents) -> int:
    """Return the largest number of slices in any document.

    Args:
        n: number of slices of a microbatch.
        documents: slices that begin a document, as in `Schedule.documents`.
    """
    borders = [(0, *begins, n) for begins in documents or ((),)]
    return max(b - a for row in borders for a, b in pairwise(row))


def refuse_uncuttable(schedule: Schedule) -> None:
    """Check that a table has no slices yet, and no passes but F, B, W and BW.

    Raises: ScheduleError that names the passes, or the flag to leave out.
    """
    more = sorted(schedule.kinds.difference(LAYERS))
    if more:
        raise ScheduleError(
            f"{schedule.name} has {', '.join(more)}, and slices are cut in a table of F, B, W and "
            "BW alone. Give the table without them: copies and gathers are added after slices."
        )
    if schedule.cuts:
        raise ScheduleError(
            f"{schedule.name} is cut in {len(schedule.cuts)} slices already. Leave out --slices; "
            "--attention-share says what they take."
        )


def _refuse_costs(costs: Costs, cuts: tuple[float, ...], place: Placement) -> None:
    """Check that costs fit a table with slices: numbers of stages and links, costs of slices.

    Args:
        cuts: lengths of the slices of a microbatch.
        place: the table's placement.
    Raises: ScheduleError that names the wrong or missing field of `costs`.
    """
    # Checked before any simulation: an error there is taken for a table that cannot run.
    part = costs.of_slice(cuts, (0, 0, len(cuts)))
    part.check(place)
    for rank in range(1, place.num_ranks):
        costs.lag(rank - 1, rank, place.num_ranks)


def _with_forwards_sooner(schedule: Schedule, by: int) -> Schedule:
    """Return the table with each forward where the forward `by` before it was.

    The first `by` forwards start the rank's row. Example for by = 1:

        F0 B0 F1 B1 F2 B2  ->  F0 F1 B0 F2 B1 B2
    """

    def sooner(row: tuple[Step, ...]) -> Iterator[Step]:
        forwards = deque(step for step in row if step[0].kind.is_forward)
        yield from (forwards.popleft() for _ in range(min(by, len(forwards))))
        # Backwards keep their places, and the last `by` places of forwards are left out.
        for step in row:
            if not step[0].kind.is_forward:
                yield step
            elif forwards:
                yield forwards.popleft()

    return replace(schedule, ranks=tuple(tuple(sooner(row)) for row in schedule.ranks))


def _refusal(pattern: Schedule, n: int, memory: float | None, least: float) -> str:
    """Return a sentence that says why there is no table with slices.

    Args:
        pattern: the table before it is cut, with n times the microbatches.
        n: number of slices.
        memory: limit on a rank's activation; None for no limit.
        least: memory of the first table that can run without deadlock; 0 if none can.
    """
    if memory is None or not least:
        return (
            f"{pattern.name} cannot be cut in {n} slices for {pattern.num_microbatches // n} "
            "microbatches: its backwards wait for slices that come after them. "
            "Take another number of slices or another schedule."
        )
    return (
        f"{pattern.name} in {n} slices holds {least:g}, over the memory limit of {memory:g}. "
        "Raise --memory, or take more slices or another schedule."
    )
