"""What costs can still change in a fixed order: where the weight gradients stand.

F and B keep their order, so a schedule keeps its picture and its memory; W go where a rank would wait under the costs
at hand, or where the memory asks for them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import inf

from megapipe.schedule.costs import Costs
from megapipe.schedule.orders import (
    Orders,
    Problem,
    backward_sooner,
    clock,
    decode,
    encode,
    fill_weights,
    length,
    problem,
)
from megapipe.schedule.passes import Schedule

PATIENCE = (0.0, 0.15, 0.3, 0.45, 0.6, 0.8, 1.0)
"""How far a W may overrun a wait that is shorter than itself, in parts of W."""


def shortest(candidates: Sequence[Schedule], costs: Costs, memory: float) -> Schedule:
    """The one of least makespan under costs, as it is or with its W refilled; the first of equals.

    Args:
        candidates: split schedules of one placement that hold at most `memory`.
        memory: limit of a refilled one, in microbatches of a device share, whatever the costs count.
    """
    place, m = candidates[0].placement, candidates[0].num_microbatches
    shares = Costs(costs.f, costs.b, costs.w, comm=costs.comm)
    of = problem(place, m, shares, (memory,) * place.num_ranks, period=False)
    best, least = candidates[0], inf
    for candidate in candidates:
        orders = encode(of, candidate)
        end = clock(of, orders)
        assert end is not None, f"{candidate.name} cannot proceed"
        if (time := length(of, orders, end)) < least * (1 - 1e-9):
            best, least = candidate, time
        for filled, end in refilled(of, orders):
            if (time := length(of, filled, end)) < least * (1 - 1e-9):
                best, least = decode(of, filled, candidate.name), time
    return best


def refilled(of: Problem, orders: Orders) -> Iterator[tuple[Orders, list[float]]]:
    """The same F and B with W wherever there is a wait, once for each patience: orders and the end of every pass."""
    bare: Orders = []
    for rank, order in enumerate(orders):
        fitting = backward_sooner(of, [x for x in order if x // of.microbatches % 3 != 2], rank)
        if fitting is None:
            return
        bare.append(fitting)
    for patience in PATIENCE:
        if filled := fill_weights(of, bare, patience):
            yield filled
