"""A fit of a fixed order to costs: they can still change where the weight gradients stand.

F and B keep their order, so a schedule keeps its picture and its memory; W go where a rank would wait under the costs
at hand, or where the memory asks for them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import accumulate
from math import inf

from megapipe.schedule.costs import Costs
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

PATIENCE = (0.0, 0.15, 0.3, 0.45, 0.6, 0.8, 1.0)
"""Parts of W by which one may overrun a wait that is shorter than itself."""


def shortest(candidates: Sequence[Schedule], costs: Costs, memory: float) -> Schedule:
    """The one of least makespan under costs, as it is or with its W refilled; the first of equals.

    Args:
        candidates: split schedules of one placement that hold at most `memory`.
        memory: limit of a refilled one, in microbatches of a device share, whatever the costs count.
    """
    place, m = candidates[0].placement, candidates[0].num_microbatches
    shares = replace(costs, mem_b=1.0, mem_w=1.0)
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


def refilled(
    of: Problem, orders: Orders, patiences: Sequence[float] = PATIENCE
) -> Iterator[tuple[Orders, list[float]]]:
    """Orders of the same F and B, made to fit the memory, with W wherever there is a wait, once for each patience of
    `fill_weights`: orders and the end of every pass; none where they cannot fit."""
    bare: Orders = []
    for rank, order in enumerate(orders):
        fitting = backward_sooner(of, [x for x in order if x // of.microbatches % 3 != 2], rank)
        if fitting is None:
            return
        bare.append(fitting)
    for patience in patiences:
        if filled := fill_weights(of, bare, patience):
            yield filled


def fill_weights(
    problem: Problem, orders: Orders, patience: float
) -> tuple[Orders, list[float]] | None:
    """Play an order of F and B, and put W where a rank would wait or needs the memory; the oldest W first.

    Args:
        orders: F and B of each rank.
        patience: a W may begin in a wait that is shorter than itself if it overruns it by at most this part of W.
    Returns: (orders with W, end of every pass), None if the order blocks or does not fit.
    """
    duration, lag, source, target, rank = (
        problem.duration,
        problem.lag,
        problem.source,
        problem.target,
        problem.rank,
    )
    holds, n, m, p = problem.holds, problem.num_passes, problem.microbatches, len(orders)
    end = [-1.0] * n + [0.0]
    at, now, held, paid = [0] * p, [0.0] * p, [0.0] * p, [0] * p
    owed: Orders = [[] for _ in orders]
    full: Orders = [[] for _ in orders]
    ready, left = list(range(p)), sum(map(len, orders))
    limits = [limit * (1 + 1e-9) for limit in problem.memory]
    while ready:
        r = ready.pop()
        order, owe, out, limit, i = orders[r], owed[r], full[r], limits[r], at[r]
        t, mem, w = now[r], held[r], paid[r]
        left += i
        while i < len(order):
            x = order[i]
            arrival = end[source[x]]
            if arrival < 0.0:
                break
            arrival += lag[x]
            while w < len(owe):
                y = owe[w]
                slack = patience * duration[y] + 1e-9 * arrival
                if mem + holds[x] <= limit and t + duration[y] > arrival + slack:
                    break
                t += duration[y]
                end[y] = t
                out.append(y)
                mem += holds[y]
                w += 1
            mem += holds[x]
            if mem > limit:
                return None
            t = (arrival if arrival > t else t) + duration[x]
            end[x] = t
            out.append(x)
            i += 1
            if x // m % 3:  # not an F but a B: its W is owed from here on
                owe.append(x + m)
            y = target[x]
            if y != n:
                q = rank[y]
                if at[q] < len(orders[q]) and orders[q][at[q]] == y:
                    ready.append(q)
        left -= i
        at[r], now[r], held[r], paid[r] = i, t, mem, w
    if left:
        return None
    for out, rest, t in zip(
        full, (o[n:] for o, n in zip(owed, paid, strict=True)), now, strict=True
    ):
        out += rest
        for y, done in zip(rest, accumulate((duration[y] for y in rest), initial=t), strict=False):
            end[y] = done + duration[y]
    return full, end
