"""Fit of a schedule to costs: F and B keep their order, W moves.

W runs where a rank would wait under the given costs, or where the memory limit requires it. So a
schedule keeps its picture and its memory.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from math import inf

from megapipe.schedule.costs import Costs
from megapipe.schedule.generators.compiled import compiled_fill
from megapipe.schedule.generators.orders import (
    Orders,
    Problem,
    backward_sooner,
    clock,
    decode,
    encode,
    length,
    problem,
)
from megapipe.schedule.passes import Schedule

OVERRUNS = (0.0, 0.15, 0.3, 0.45, 0.6, 0.8, 1.0)
"""Fractions of a W that may extend beyond the wait in which it starts."""


Filled = tuple[Orders, list[float]]
"""(orders with W, end of every pass)."""


def shortest(candidates: Sequence[Schedule], costs: Costs, memory: float) -> Schedule:
    """Return the candidate of least makespan, with its own W or with W refilled.

    Among equal ones it is the first.

    Args:
        candidates: split schedules of one placement that hold at most `memory`.
        memory: limit of a refilled schedule, in microbatches of a device share, whatever memory
            the costs name.
    """
    place = candidates[0].placement
    m = candidates[0].num_microbatches
    shares = replace(costs, mem_b=1.0, mem_w=1.0)
    of = problem(place, m, shares, (memory,) * place.num_ranks, period=False)
    best = candidates[0]
    least = inf
    for candidate in candidates:
        orders = encode(of, candidate)
        end = clock(of, orders)
        assert end is not None, f"{candidate.name} cannot proceed"
        time = length(of, orders, end)
        if time < least * (1 - 1e-9):
            best = candidate
            least = time
        for filled, end in refilled(of, orders):
            time = length(of, filled, end)
            if time < least * (1 - 1e-9):
                best = decode(of, filled, candidate.name)
                least = time
    return best


def refilled(of: Problem, orders: Orders, overruns: Sequence[float] = OVERRUNS) -> Iterator[Filled]:
    """Yield (orders with W refilled, end of every pass), for each overrun of `fill_weights`.

    F and B keep their order, unless the memory limit requires a B to come sooner. Nothing is
    yielded if no order fits the limit.
    """
    bare: Orders = []
    for rank, order in enumerate(orders):
        without = [x for x in order if x // of.microbatches % 3 != 2]
        fitting = backward_sooner(of, without, rank)
        if fitting is None:
            return
        bare.append(fitting)
    fill = compiled_fill(of, bare) or partial(fill_weights, of, bare)
    for overrun in overruns:
        filled = fill(overrun)
        if filled:
            yield filled


def fill_weights(problem: Problem, orders: Orders, overrun: float) -> Filled | None:
    """Simulate an order of F and B, and insert W where a rank waits or lacks memory.

    Args:
        orders: F and B of each rank. The oldest pending W runs first.
        overrun: a W may extend beyond the wait in which it starts by this fraction of itself.
    Returns: None if the order deadlocks or does not fit.
    """
    duration = problem.duration
    lag = problem.lag
    source = problem.source
    target = problem.target
    rank = problem.rank
    holds = problem.holds
    n = problem.num_passes
    m = problem.microbatches
    end = [-1.0] * n + [0.0]
    at = [0 for _ in orders]
    now = [0.0 for _ in orders]
    held = [0.0 for _ in orders]
    paid = [0 for _ in orders]  # number of W in `owed` that have run
    owed: Orders = [[] for _ in orders]
    full: Orders = [[] for _ in orders]
    ready = list(range(len(orders)))
    left = sum(map(len, orders))
    while ready:
        r = ready.pop()
        order = orders[r]
        owe = owed[r]
        limit = problem.memory[r] * (1 + 1e-9)
        i = at[r]
        t = now[r]
        mem = held[r]
        w = paid[r]
        left += i
        while i < len(order):
            x = order[i]
            arrival = end[source[x]]
            if arrival < 0.0:
                break
            arrival += lag[x]
            while w < len(owe):
                y = owe[w]
                slack = overrun * duration[y] + 1e-9 * arrival
                if mem + holds[x] <= limit and t + duration[y] > arrival + slack:
                    break
                t += duration[y]
                end[y] = t
                full[r].append(y)
                mem += holds[y]
                w += 1
            mem += holds[x]
            if mem > limit:
                return None
            t = (arrival if arrival > t else t) + duration[x]
            end[x] = t
            full[r].append(x)
            i += 1
            if x // m % 3:  # B: from now on its W is pending
                owe.append(x + m)
            y = target[x]
            if y != n:
                q = rank[y]
                if at[q] < len(orders[q]) and orders[q][at[q]] == y:
                    ready.append(q)
        left -= i
        at[r] = i
        now[r] = t
        held[r] = mem
        paid[r] = w
    if left:
        return None
    # Whatever is still pending runs at the end.
    for out, owe, w, t in zip(full, owed, paid, now, strict=True):
        for y in owe[w:]:
            t += duration[y]
            end[y] = t
            out.append(y)
    return full, end
