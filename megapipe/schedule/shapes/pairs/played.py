"""Simulations with pairs in C, with the same rows and times as `together`.

They need a C compiler on the machine.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate, product

from megapipe.compiled import c_fields
from megapipe.schedule.core.compiled import doubles, ints, library
from megapipe.schedule.costs import Costs
from megapipe.schedule.kinds import LAYERS, Kind
from megapipe.schedule.passes import Pass, Schedule, Step
from megapipe.schedule.shapes.pairs.manner import PairingPolicy

Rows = tuple[tuple[Step, ...], ...]
_TOGETHER = ((0, 3), (0, 0), (1, 1), (3, 3), (1, 2), (3, 2), (0, 2))
"""Pairs of kinds, as indices of `LAYERS`, that run overlapped."""
_SMALL = 1e-9


class _Table(ctypes.Structure):
    # The same fields in the same order as in play.c, here and in the next class.
    _fields_ = c_fields(
        "int ranks stages microbatches chunks split",
        "int* rank_of local next prev",
        "double* held owes lag_next lag_prev",
        "int* forwards backwards begin",
        "double* alone pairs limits",
        "double forward",
    )


class _Manner(ctypes.Structure):
    _fields_ = c_fields(
        "double wait forwards_from",
        "int reach backwards weights keep",
        "double* spare",
    )


def compiled_play(
    schedule: Schedule, costs: Costs, limits: Sequence[float], split: bool
) -> Callable[[PairingPolicy], tuple[float, Callable[[], Rows]] | None] | None:
    """Return a function that simulates the table in C, with pairs chosen by a policy.

    The function takes the policy by which ranks choose among ready passes. The result is
    (makespan, rows), or None if ranks deadlock. `rows()` returns each rank's steps; call it before
    the next simulation.

    Args:
        limits: limit on each rank's activation, in the unit of the costs.
        split: split a backward that is not in a pair into B and W, even if the table has it fused.
    Returns: the function. None without a C compiler, or for a table with slices.
    """
    code = library()
    if code is None or schedule.cuts:
        return None
    place = schedule.placement
    m = schedule.all_microbatches
    held = costs.memory(place).b
    largest = []
    for rank in range(place.num_ranks):
        largest.append(max(held[stage] for stage in place.stages_on(rank)))
    table = _table(schedule, costs, limits, split)
    begin = [0, *accumulate(_count(row) for row in schedule.ranks)]
    # The C code writes here: per rank at most 3 steps for each forward, a step as 4 integers.
    steps = ints([0] * (12 * begin[-1]))
    made = ints([0] * place.num_ranks)
    code.play.restype = ctypes.c_double

    def timed(manner: PairingPolicy) -> tuple[float, Callable[[], Rows]] | None:
        spare = manner.spare or (0,) * place.num_ranks
        given = _Manner(
            manner.wait,
            manner.forwards,
            manner.reach,
            manner.backwards,
            manner.weights,
            manner.keep,
            doubles([n * most for n, most in zip(spare, largest, strict=True)]),
        )
        makespan = code.play(ctypes.byref(table), ctypes.byref(given), steps, made)
        if makespan < 0:
            return None
        # Few tables are built: a policy with a longer makespan needs no rows.
        return makespan, lambda: tuple(map(row, range(place.num_ranks)))

    def row(rank: int) -> tuple[Step, ...]:
        """Return a rank's steps in the last simulation."""
        first = 12 * begin[rank]
        numbers = steps[first : first + 4 * made[rank]]
        return tuple(tuple(_passes(numbers[i : i + 4], m)) for i in range(0, len(numbers), 4))

    return timed


def _passes(numbers: Sequence[int], m: int) -> Iterator[Pass]:
    """Yield the one or two passes of a step, which the C code writes as four integers.

    Args:
        numbers: kind, pass, kind, pass. A kind is an index in `LAYERS`. A pass is stage * m +
            microbatch, or -1 for no second pass.
        m: number of microbatches.
    """
    for kind, x in (numbers[:2], numbers[2:]):
        if x >= 0:
            yield Pass(LAYERS[kind], *divmod(x, m))


def _count(row: Sequence[Step]) -> int:
    """Return the number of forwards in a rank's row."""
    return sum(x.kind.is_forward for step in row for x in step)


def _table(schedule: Schedule, costs: Costs, limits: Sequence[float], split: bool) -> _Table:
    """Return the C struct of the table, its costs and memory limits.

    Args:
        limits: limit on each rank's activation, in the unit of the costs.
        split: split a backward that is not in a pair into B and W, even if the table has it fused.
    """
    place = schedule.placement
    m = schedule.all_microbatches
    stages = range(place.num_stages)
    own = [place.stages_on(r) for r in range(place.num_ranks)]
    chunks = max(map(len, own))
    wide = 4 * chunks
    after = [place.next(s) for s in stages]
    before = [place.prev(s) for s in stages]
    held, owes = costs.memory(place)

    # Times of single passes and of pairs. A pair of a rank is a row and a column in a square of
    # (kind, own stage), because a table for all stages of the model would be too large.
    alone = [time for kind in LAYERS for time in costs.durations(place)[kind]]
    together = [0.0] * (place.num_ranks * wide * wide)
    for rank, mine in enumerate(own):
        for (a, b), (i, s), (j, t) in product(_TOGETHER, enumerate(mine), enumerate(mine)):
            step = Pass(LAYERS[a], s, 0), Pass(LAYERS[b], t, 1)
            at = (rank * wide + a * chunks + i) * wide + b * chunks + j
            together[at] = costs.of_step(step, place)

    def lags(to: Sequence[int | None]) -> list[float]:
        """Return the time of the message from each stage to its neighbour, 0 without one.

        Args:
            to: the neighbour of each stage.
        """
        ranks = place.rank_of
        found = []
        for s, t in zip(stages, to, strict=True):
            lag = 0.0
            if t is not None:
                lag = costs.lag(ranks[s], ranks[t], len(own))
            found.append(lag)
        return found

    def numbers(to: Sequence[int | None]) -> ctypes.Array[ctypes.c_int]:
        """Return the neighbour of each stage as a C array, with -1 for None."""
        return ints([-1 if t is None else t for t in to])

    def order(way: Callable[[Kind], bool]) -> list[int]:
        """Return all forwards or backwards as stage * m + microbatch, in the order of the table.

        Args:
            way: returns whether a kind of pass belongs to the list.
        """
        return [x.stage * m + x.microbatch for x in schedule.passes() if way(x.kind)]

    local = [own[place.rank_of[s]].index(s) for s in stages]
    return _Table(
        *(len(own), len(stages), m, chunks, split or any(kind.is_split for kind in schedule.kinds)),
        *map(ints, (place.rank_of, local)),
        numbers(after),
        numbers(before),
        *map(doubles, (held, owes, lags(after), lags(before))),
        ints(order(lambda kind: kind.is_forward)),
        ints(order(lambda kind: kind.is_backward)),
        ints([0, *accumulate(map(_count, schedule.ranks))]),
        *map(doubles, (alone, together, [limit * (1 + _SMALL) for limit in limits])),
        max(costs.durations(place)[Kind.F]),
    )
