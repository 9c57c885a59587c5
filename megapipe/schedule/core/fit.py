"""Fit of a schedule to costs: F and B keep their order, W moves.

W runs where a rank would wait under the given costs, or where the memory limit requires it. So a
schedule keeps its picture and its memory.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from math import inf

from megapipe.schedule.core.compiled import compiled_fill
from megapipe.schedule.core.orders import (
    Orders,
    Problem,
    backward_sooner,
    clock,
    decode,
    encode,
    length,
    problem,
)
from megapipe.schedule.costs import Costs
from megapipe.schedule.passes import Schedule

OVERRUNS = (0.0, 0.15, 0.3, 0.45, 0.6, 0.8, 1.0)
"""Fractions of a W that may extend beyond the wait in which it starts."""


Filled = tuple[Orders, list[float]]
"""(orders with W, end of every pass)."""


def shortest(candidates: Sequence[Schedule], costs: Costs, memory: float) -> Schedule:
    """Return the table of least makespan among candidates, and candidates with W moved into waits.

    A W (weight gradient) can be moved to where its rank would wait. Among equal tables the first
    candidate is taken.

    Args:
        candidates: tables with split backwards and one placement that hold at most `memory`.
        costs: the costs under which the makespan is simulated.
        memory: limit on the activations of a rank. The unit is one microbatch in 1/p of the model,
            on p ranks. `costs.mem_b` and `costs.mem_w` are ignored.
    """
    place = candidates[0].placement
    m = candidates[0].num_microbatches
    # The limit is part of the schedule's definition, and not a property of the costs.
    shares = replace(costs, mem_b=1.0, mem_w=1.0)
    of = problem(place, m, shares, (memory,) * place.num_ranks, period=False)
    best = candidates[0]
    least = inf
    for candidate in candidates:
        orders = encode(of, candidate)
        end = clock(of, orders)
        assert end is not None, f"{candidate.name} cannot proceed"
        time = length(of, orders, end)
        # Times that differ by rounding alone are equal: the first candidate is taken.
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
    """Yield, for each overrun, (each rank's order with all W inserted anew, end of every pass).

    F and B keep their order, unless the memory limit requires a B to come sooner. An overrun whose
    order deadlocks or exceeds the limit is left out.

    Args:
        of: the placement with its costs and memory limits.
        orders: each rank's passes as integers; W among them are ignored.
        overruns: fractions to try. With 0.3, a W may extend beyond the wait in which it starts by
            0.3 of its own time.
    """
    bare: Orders = []
    for rank, order in enumerate(orders):
        # The kind x // m % 3 is 2 for W.
        without = [x for x in order if x // of.microbatches % 3 != 2]
        fitting = backward_sooner(of, without, rank)
        if fitting is None:
            return
        bare.append(fitting)
    # No overrun is best for all costs: W that overrun delay the next pass, and without overruns
    # many W are left for the end of the row.
    fill = compiled_fill(of, bare) or partial(fill_weights, of, bare)
    for overrun in overruns:
        filled = fill(overrun)
        if filled:
            yield filled


def fill_weights(problem: Problem, orders: Orders, overrun: float) -> Filled | None:
    """Return (orders with W, end of every pass), with W where a rank waits or lacks memory.

    Args:
        orders: each rank's F and B of `problem`. The oldest pending W of a rank runs first.
        overrun: a W may extend beyond the wait in which it starts by this fraction of its own time.
    Returns: None if the order deadlocks or exceeds a rank's memory limit.
    """
    # Local names: the loops below run for every pass of every candidate and overrun.
    duration = problem.duration
    lag = problem.lag
    source = problem.source
    target = problem.target
    holds = problem.holds
    n = problem.num_passes
    m = problem.microbatches
    # -1: has not run yet. The last entry is "no pass". Each other list has an entry for each rank.
    end = [-1.0] * n + [0.0]
    at = [0 for _ in orders]
    now = [0.0 for _ in orders]
    held = [0.0 for _ in orders]
    owed = [deque[int]() for _ in orders]  # pending W
    full: Orders = [[] for _ in orders]
    ready = list(range(len(orders)))

    # A rank runs until it lacks an input. The pass that makes this input puts it back on the stack.
    while ready:
        r = ready.pop()
        order = orders[r]
        owe = owed[r]
        limit = problem.memory[r] * (1 + 1e-9)
        i = at[r]
        t = now[r]
        mem = held[r]
        while i < len(order):
            x = order[i]
            arrival = end[source[x]]
            if arrival < 0.0:
                break
            arrival += lag[x]
            # Before x: pending W that end in time, and those whose memory x needs.
            while owe:
                w = owe[0]
                # The second term: a wait that W fills exactly may be too short by rounding.
                slack = overrun * duration[w] + 1e-9 * arrival
                if mem + holds[x] <= limit and t + duration[w] > arrival + slack:
                    break
                t += duration[w]
                end[w] = t
                full[r].append(owe.popleft())
                mem += holds[w]
            mem += holds[x]
            if mem > limit:
                return None
            if arrival > t:
                t = arrival
            t += duration[x]
            end[x] = t
            full[r].append(x)
            i += 1
            if x // m % 3:  # B: from now on its W is pending
                owe.append(x + m)
            taker = target[x]
            # Wake the receiver only if it stands at the pass that waits for this one.
            if taker != n:
                q = problem.rank[taker]
                if at[q] < len(orders[q]) and orders[q][at[q]] == taker:
                    ready.append(q)
        at[r] = i
        now[r] = t
        held[r] = mem
    if at != [len(order) for order in orders]:
        return None
    # Whatever is still pending runs at the end.
    for out, owe, t in zip(full, owed, now, strict=True):
        for w in owe:
            t += duration[w]
            end[w] = t
            out.append(w)
    return full, end
