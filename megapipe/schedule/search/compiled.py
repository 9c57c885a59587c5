"""Annealing in C: the same orders from the same random draws as in Python, but faster.

Without a C compiler (megapipe/compiled.py) a search runs in Python.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from functools import cache
from itertools import accumulate, pairwise
from pathlib import Path
from time import process_time

from megapipe.compiled import compiled
from megapipe.schedule.generators.orders import Problem, length
from megapipe.schedule.search.anneal import DECAY, NORMAL, Cooling, Found, anneal

_FILES = "search/clock.h", "search/moves.c", "shapes/pairs/play.c", "families/offload/weigh.c"
SOURCES = tuple(Path(__file__).parents[1] / name for name in _FILES)
FLAGS = ("-O2", "-ffp-contract=off", "-fPIC", "-shared")  # sums are rounded as Python rounds them
_PASSES_AT_ONCE = 4_000_000  # before the time is looked at

Ints = ctypes.POINTER(ctypes.c_int)
Doubles = ctypes.POINTER(ctypes.c_double)


class _Problem(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_int) for name in ("passes", "microbatches", "ranks", "stages", "period")),
        ("unit", ctypes.c_double),
        *((name, Doubles) for name in ("duration", "lag", "holds", "memory")),
        *((name, Ints) for name in ("source", "target", "rank", "row")),
        *((name, Doubles) for name in ("normal", "decay")),
    )


class _State(ctypes.Structure):
    _fields_ = (
        *((name, Ints) for name in ("orders", "best_orders", "path")),
        *((name, Doubles) for name in ("end", "best_end")),
        *((name, ctypes.c_double) for name in ("cost", "best", "heat", "cooler", "spread", "goal")),
        ("draws", ctypes.c_uint64),
        ("path_length", ctypes.c_int),
    )


@cache
def library() -> ctypes.CDLL | None:
    """Return the compiled code; None without a compiler."""
    return compiled("moves", SOURCES, FLAGS)


def anneal_fast(problem: Problem, start: Found, cooling: Cooling, seed: int, goal: float) -> Found:
    """Return the result of `anneal`, computed by the C code if there is a compiler."""
    moves = library()
    if moves is None:
        return anneal(problem, start, cooling, seed, goal)
    rows = [0, *accumulate(map(len, start.orders))]
    given = _problem(problem, rows)
    orders = [x for order in start.orders for x in order]
    ends = start.end
    best_orders = ints(orders)
    best_end = doubles(ends)
    state = _State(
        *(ints(orders), best_orders, ints(orders)),
        *(doubles(ends), best_end),
        *(length(problem, start.orders, ends, cooling.spread), start.length),
        *(problem.unit * cooling.hot, cooling.factor, cooling.spread, goal),
        seed,
    )
    at_once = max(1, _PASSES_AT_ONCE // problem.num_passes)
    for done in range(0, cooling.steps, at_once):
        if process_time() > cooling.until:
            break
        asked = min(at_once, cooling.steps - done)
        if moves.anneal(ctypes.byref(given), ctypes.byref(state), asked) < asked:
            break
    found = list(best_orders)
    return Found([found[a:b] for a, b in pairwise(rows)], list(best_end), state.best)


def _problem(of: Problem, rows: Sequence[int]) -> _Problem:
    limits = [limit * (1 + 1e-9) for limit in of.memory]
    return _Problem(
        *(
            of.num_passes,
            of.microbatches,
            len(rows) - 1,
            of.placement.num_stages,
            of.period,
            of.unit,
        ),
        *map(doubles, (of.duration, of.lag, of.holds, limits)),
        *map(ints, (of.source, of.target, of.rank, rows)),
        *map(doubles, (NORMAL, DECAY)),
    )


def ints(values: Sequence[int]) -> ctypes.Array[ctypes.c_int]:
    """Return a C array of integers."""
    return (ctypes.c_int * len(values))(*values)


def doubles(values: Sequence[float]) -> ctypes.Array[ctypes.c_double]:
    """Return a C array of doubles."""
    return (ctypes.c_double * len(values))(*values)
