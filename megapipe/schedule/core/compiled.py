"""The compiled code of searches, on machines that have a C compiler (see megapipe/compiled.py)."""

from __future__ import annotations

import ctypes
from array import array
from collections.abc import Callable, Sequence
from functools import cache
from itertools import accumulate, pairwise
from math import log
from pathlib import Path
from statistics import NormalDist

from megapipe.compiled import c_fields, compiled
from megapipe.schedule.core.orders import Orders, Problem

_FILES = "search/clock.h", "search/moves.c", "shapes/pairs/play.c", "families/offload/weigh.c"
SOURCES = tuple(Path(__file__).parents[1] / name for name in _FILES)
# Without fused multiply-adds sums are rounded as Python rounds them. A search must find the same
# table with and without a compiler.
FLAGS = ("-O2", "-ffp-contract=off", "-fPIC", "-shared")

Fill = Callable[[float], tuple[Orders, list[float]] | None]
# 1,024 quantiles of a normal and of an exponential distribution. The moves of a search draw these.
QUANTILES = [(i + 0.5) / 1024 for i in range(1024)]
# Rounded: the same on every machine, whatever the last bit of its logarithm is.
NORMAL = tuple(round(NormalDist().inv_cdf(x), 6) for x in QUANTILES)
DECAY = tuple(round(-log(x), 6) for x in QUANTILES)


class _Problem(ctypes.Structure):
    # The same fields in the same order as `Problem` in search/clock.h.
    _fields_ = c_fields(
        "int passes microbatches ranks stages period",
        "double unit",
        "double* duration lag holds memory",
        "int* source target rank row",
        "double* normal decay",
    )


@cache
def library() -> ctypes.CDLL | None:
    """Return the compiled C code of the searches; None on a machine without a C compiler."""
    return compiled("moves", SOURCES, FLAGS)


def ints(values: Sequence[int]) -> ctypes.Array[ctypes.c_int]:
    """Return a C array of integers with these values."""
    # By way of an array: it converts a list five times as fast as ctypes does.
    return (ctypes.c_int * len(values)).from_buffer(array("i", values))


def doubles(values: Sequence[float]) -> ctypes.Array[ctypes.c_double]:
    """Return a C array of doubles with these values."""
    return (ctypes.c_double * len(values)).from_buffer(array("d", values))


def given_to_c(of: Problem, rows: list[int]) -> _Problem:
    """Return the C struct of a problem.

    Memory limits are multiplied by 1 + 1e-9, so that rounding does not exceed them.

    Args:
        of: the placement, its costs and memory limits as lists of numbers.
        rows: where each rank's row begins in one array of all rows, then the length of the array:
            [0, 6, 12] for two ranks with six passes each.
    """
    # As in `orders.fits_rank`: a sum that is over its limit by rounding alone still fits.
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


def compiled_fill(of: Problem, orders: Orders) -> Fill | None:
    """Return a function that inserts W as `fit.fill_weights` does, with bitwise equal times.

    Args:
        of: the placement with its costs and memory limits.
        orders: each rank's order of F and B, as integers.
    Returns: a function, or None without a C compiler. The function takes an overrun: the fraction
        of a W that may extend beyond the wait in which it starts. The function returns (orders with
        W, end of every pass), or None if the order deadlocks or exceeds the memory limit.
    """
    code = library()
    if code is None:
        return None
    # In the filled orders each B of a rank has brought its W. The kind x // m % 3 is 1 for B.
    m = of.microbatches
    lengths = []
    for order in orders:
        backwards = sum(x // m % 3 for x in order)
        lengths.append(len(order) + backwards)
    rows = [0, *accumulate(lengths)]
    bare = [0] * rows[-1]
    for order, row in zip(orders, rows, strict=False):
        bare[row : row + len(order)] = order
    given = given_to_c(of, rows)
    sizes = ints([len(order) for order in orders])
    bare_in_c = ints(bare)

    def fill(overrun: float) -> tuple[Orders, list[float]] | None:
        full = ints(bare)
        end = doubles([0.0] * (of.num_passes + 1))
        if not code.fill(
            ctypes.byref(given), bare_in_c, sizes, ctypes.c_double(overrun), full, end
        ):
            return None
        found = list(full)
        return [found[a:b] for a, b in pairwise(rows)], list(end)

    return fill
