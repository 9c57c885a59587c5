"""Simulated annealing of a schedule's orders, in compiled code (`moves.c`), with two moves.

*Push* takes a critical path of the schedule, and moves a pass of it, or a pass that delays it, by a
few places. *Shift* moves a pattern in time: some kinds of pass, of a range of ranks and
microbatches, start sooner or later. Every rank then runs its passes in the order of their new
times. A push cannot leave a local minimum that several ranks must leave together, but a shift can.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from itertools import accumulate, pairwise
from math import inf
from time import process_time

from megapipe.compiled import c_fields
from megapipe.schedule.core.compiled import doubles, given_to_c, ints, library
from megapipe.schedule.core.orders import Orders, Problem, length

# The search looks at the time whenever its moves have placed this many passes: a few hundredths of
# a second. The C code cannot be interrupted, so it returns to Python in between.
PASSES_AT_ONCE = 4_000_000


@dataclass(frozen=True)
class FoundSchedule:
    """A schedule that a search found.

    Attributes:
        orders: each rank's passes as integers, in order (`core.orders.encode`).
        end: end of every pass, by its integer, in the time unit of the costs.
        length: value of the objective, which the search minimises.
    """

    orders: Orders
    end: list[float]
    length: float


@dataclass(frozen=True)
class Cooling:
    """The settings of one simulated annealing.

    The temperature falls geometrically: hot, hot * factor, hot * factor^2, ..., cold. `factor`
    returns this factor.

    Attributes:
        steps: number of random moves to try.
        hot, cold: first and last temperature, in units of the longest pass.
        spread: this multiple of the ranks' mean time is added to the objective, which is a maximum
            over ranks. So gains on other ranks than the slowest count too.
        until: CPU time of this process, in seconds, at which to stop.
    """

    steps: int
    hot: float
    cold: float
    spread: float
    until: float = inf

    @property
    def factor(self) -> float:
        """Return the factor by which the temperature changes from one move to the next."""
        # pow() of two C libraries may differ in the last bit, and the search would then differ too.
        return round(float((self.cold / self.hot) ** (1 / self.steps)), 12)


class _State(ctypes.Structure):
    """The struct State of clock.h: the fields and their order are the same there."""

    _fields_ = c_fields(
        "int* orders best_orders path",
        "double* end best_end",
        "double cost best heat cooler spread goal",
        "uint64 draws",
        "int path_length",
    )


def anneal(
    problem: Problem, start: FoundSchedule, cooling: Cooling, seed: int, goal: float
) -> FoundSchedule:
    """Return the best orders that annealing finds; `start` on a machine without a C compiler.

    Equal arguments give equal orders, unless `cooling.until` ends it early.

    Args:
        problem: placement, costs, memory limits and objective.
        start: the schedule to begin with.
        cooling: settings of the annealing.
        seed: the seed of the random numbers.
        goal: stop when the objective has this value.
    """
    moves = library()
    if moves is None:
        return start
    # C has the orders of all ranks in one array; rank r has the places rows[r] to rows[r + 1].
    rows = [0, *accumulate(map(len, start.orders))]
    given = given_to_c(problem, rows)
    orders = [x for order in start.orders for x in order]
    best_orders = ints(orders)
    best_end = doubles(start.end)
    state = _State(
        *(ints(orders), best_orders, ints(orders)),
        *(doubles(start.end), best_end),
        *(length(problem, start.orders, start.end, cooling.spread), start.length),
        *(problem.unit * cooling.hot, cooling.factor, cooling.spread, goal),
        seed,
    )
    at_once = max(1, PASSES_AT_ONCE // problem.num_passes)
    for done in range(0, cooling.steps, at_once):
        if process_time() > cooling.until:
            break
        asked = min(at_once, cooling.steps - done)
        # Fewer moves than asked: the goal is met.
        if moves.anneal(ctypes.byref(given), ctypes.byref(state), asked) < asked:
            break
    found = list(best_orders)
    return FoundSchedule([found[a:b] for a, b in pairwise(rows)], list(best_end), state.best)
