"""A split schedule as lists of integers, with a fast clock, for generators and searches with costs.

A pass with kind k, stage s and microbatch i is the integer (3 s + k) m + i, with F, B, W = 0, 1, 2.
So x // m is the *class* of a pass (kind and stage), and x + 1 is the next microbatch of the class.
Orders run the microbatches of each class in order.
"""

from __future__ import annotations

from dataclasses import dataclass

from megapipe.schedule.costs import Costs
from megapipe.schedule.passes import Kind, Pass, Placement, Schedule

Orders = list[list[int]]
KINDS = (Kind.F, Kind.B, Kind.W)


@dataclass(frozen=True)
class Problem:
    """A placement with its costs as lists of numbers, for a search for the best order of passes.

    Each pass F, B or W of a stage and microbatch has an integer. A list has one entry for each
    pass, at its integer. The list's last entry stands for "no pass", which ends at time 0. Times
    and memory are in the units of the costs.

    Attributes:
        microbatches: number of microbatches.
        costs: the costs from which the lists are computed.
        memory: limit of each rank.
        period: a search minimises the longest time from first start to last end of a rank, and not
            the makespan.
        duration: time of each pass.
        lag: time of the message that each pass waits for; 0 if none.
        source: the pass whose result each pass takes; "no pass" for none.
        target: the pass on another rank that takes the result of each pass; "no pass" for none.
        rank: the rank of each pass.
        holds: memory that each pass adds, negative if it frees memory. F adds mem_b, B adds mem_w -
            mem_b, and W adds -mem_w.
        unit: duration of the longest pass, the scale of random changes.
    """

    placement: Placement
    microbatches: int
    costs: Costs
    memory: tuple[float, ...]
    period: bool
    duration: list[float]
    lag: list[float]
    source: list[int]
    target: list[int]
    rank: list[int]
    holds: list[float]
    unit: float

    @property
    def num_passes(self) -> int:
        return len(self.duration) - 1

    @property
    def nothing(self) -> int:
        """Return the integer of "no pass", the last index of each list, which ends at time 0."""
        return len(self.duration) - 1


def problem(
    placement: Placement, microbatches: int, costs: Costs, memory: tuple[float, ...], period: bool
) -> Problem:
    """Return the placement and its costs as a `Problem`: lists with a number for each pass.

    Args:
        memory: limit of each rank, in the memory unit of the costs.
        period: minimise the longest time from first start to last end of a rank, and not the
            makespan.
    """
    m = microbatches
    stages = placement.num_stages
    rank_of = placement.rank_of
    # Lists of numbers, not objects: a search simulates thousands of orders.
    n = 3 * stages * m
    time = costs.durations(placement)
    mem_b, mem_w = costs.memory(placement)
    # F takes a result of the stage before, B of the stage after, W of its own stage.
    steps = (-1, 1, 0)
    duration = [0.0] * (n + 1)
    lag = [0.0] * (n + 1)
    holds = [0.0] * (n + 1)
    source = [n] * (n + 1)
    target = [n] * (n + 1)
    rank = [-1] * (n + 1)
    for s in range(stages):
        for k, held in enumerate((mem_b[s], mem_w[s] - mem_b[s], -mem_w[s])):
            before = s + steps[k]
            is_handed = before != s and 0 <= before < stages
            for x in range((3 * s + k) * m, (3 * s + k + 1) * m):
                duration[x] = time[KINDS[k]][s]
                holds[x] = held
                rank[x] = rank_of[s]
                if is_handed:
                    source[x] = x + 3 * m * (before - s)
                    if rank_of[before] != rank_of[s]:
                        lag[x] = costs.lag(rank_of[before], rank_of[s], placement.num_ranks)
                        target[source[x]] = x
                # Without a neighbour, B waits for F of its stage (at the loss), and W for its B.
                elif k:
                    source[x] = x - m
    unit = max(duration)
    return Problem(
        placement, m, costs, memory, period, duration, lag, source, target, rank, holds, unit
    )


def clock(problem: Problem, orders: Orders) -> list[float] | None:
    """Return when every pass ends, a list indexed by the pass's integer.

    Each pass starts as soon as it can.

    Args:
        problem: the placement with its costs and memory limits.
        orders: each rank's passes as integers.
    Returns: the ends in the time unit of the costs, with 0 for "no pass" as the last entry. None if
        ranks deadlock.
    """
    # Local names and lists: this runs for every candidate of a generator or a search. In C,
    # `search/clock.h` has the same sums in the same order, and finds the same times.
    duration = problem.duration
    lag = problem.lag
    source = problem.source
    target = problem.target
    rank = problem.rank
    n = problem.num_passes

    # -1: has not run yet. The last entry is "no pass".
    end = [-1.0] * n + [0.0]
    at = [0] * len(orders)
    now = [0.0] * len(orders)
    sizes = [len(order) for order in orders]
    ready = list(range(len(orders)))
    left = n

    # A rank runs until it lacks an input. The pass that makes this input puts it back on the stack.
    while ready:
        r = ready.pop()
        order = orders[r]
        i = at[r]
        t = now[r]
        size = sizes[r]
        left += i
        while i < size:
            x = order[i]
            arrival = end[source[x]]
            if arrival < 0.0:
                break
            arrival += lag[x]
            if arrival > t:
                t = arrival
            t += duration[x]
            end[x] = t
            i += 1
            y = target[x]
            # Wake the receiver only if it stands at the pass that waits for this one.
            if y != n:
                q = rank[y]
                if at[q] < sizes[q] and orders[q][at[q]] == y:
                    ready.append(q)
        left -= i
        at[r] = i
        now[r] = t
    return None if left else end


def length(problem: Problem, orders: Orders, end: list[float], spread: float = 0.0) -> float:
    """Return the value that a search minimises, in the time unit of the costs.

    This is the makespan, or with `problem.period` the longest time of a rank from its first start
    to its last end.

    Args:
        orders: each rank's passes as integers.
        end: end of every pass, as `clock` returns it.
        spread: this multiple of the ranks' mean time is added. So a search also sees gains on ranks
            other than the slowest.
    """
    ends = [end[order[-1]] for order in orders]
    # Without a barrier between steps a rank begins its next step when its own row has ended.
    if problem.period:
        firsts = [order[0] for order in orders]
        both = zip(ends, firsts, strict=True)
        ends = [last - end[first] + problem.duration[first] for last, first in both]
    total = 0.0
    # Add one after another, as the C code does: from Python 3.12 on `sum` compensates rounding.
    for e in ends:
        total += e
    return max(ends) + spread * total / len(ends)


def fits(problem: Problem, orders: Orders) -> bool:
    """Return whether every rank stays within its memory limit in its order of passes.

    Args:
        problem: the placement with its costs and memory limits.
        orders: each rank's passes as integers.
    """
    return all(fits_rank(problem, order, rank) for rank, order in enumerate(orders))


def fits_rank(problem: Problem, order: list[int], rank: int) -> bool:
    """Return whether one rank stays within its memory limit if it runs its passes in `order`.

    Args:
        problem: the placement with its costs and memory limits.
        order: the rank's passes as integers.
    """
    holds = problem.holds
    # Rounding alone does not exceed a limit.
    limit = problem.memory[rank] * (1 + 1e-9)
    held = 0.0
    for x in order:
        held += holds[x]
        if held > limit:
            return False
    return True


def encode(problem: Problem, schedule: Schedule) -> Orders:
    """Return each rank's passes of a table as integers, in the order of its row.

    A BW becomes B and W. An overlapped pair becomes its two passes, one after the other.

    Args:
        problem: the placement, which says the integer of each pass.
    """
    m = problem.microbatches
    split = {kind: (kind,) for kind in KINDS} | {Kind.BW: (Kind.B, Kind.W)}
    orders = []
    for row in schedule.ranks:
        passes = [(x, kind) for step in row for x in step for kind in split[x.kind]]
        orders.append([(3 * x.stage + KINDS.index(kind)) * m + x.microbatch for x, kind in passes])
    return orders


def decode(problem: Problem, orders: Orders, name: str) -> Schedule:
    """Return these orders as a table with the given name. Each step of a row is a single pass.

    Args:
        problem: the placement, which says the integer of each pass.
        orders: each rank's passes as integers.
    """
    m = problem.microbatches
    rows = []
    for order in orders:
        passes = [Pass(KINDS[x // m % 3], x // m // 3, x % m) for x in order]
        rows.append(tuple((item,) for item in passes))
    return Schedule(name, problem.placement, m, tuple(rows))


def one_by_one(problem: Problem) -> Orders:
    """Return the orders of least memory: each rank ends one microbatch before it begins the next.

    Args:
        problem: the placement with its costs.
    Returns: each rank's passes as integers.
    """
    m = problem.microbatches
    rows = []
    for rank in range(problem.placement.num_ranks):
        stages = problem.placement.stages_on(rank)
        # F down the chain, then B and W up again.
        classes = [3 * s for s in stages] + [3 * s + k for s in reversed(stages) for k in (1, 2)]
        rows.append([c * m + i for i in range(m) for c in classes])
    return rows


def backward_sooner(problem: Problem, order: list[int], rank: int) -> list[int] | None:
    """Return a rank's order of F and B, with some B moved ahead so that its memory limit is kept.

    If an F does not fit, although all W so far have freed their memory, the next B whose F has run
    comes before it.

    Args:
        problem: the placement with its costs and memory limits.
        order: F and B of the rank as integers, without W.
    Returns: the new order; None if no B can make room, or a B comes before its own F.
    """
    m = problem.microbatches
    holds = problem.holds
    limit = problem.memory[rank] * (1 + 1e-9)
    backward = [x for x in order if x // m % 3 == 1]
    done: set[int] = set()
    result: list[int] = []
    held = 0.0
    first = 0
    for x in order:
        # A B that has been moved ahead of its place.
        if x in done:
            continue
        if x // m % 3 == 0:
            while held + holds[x] > limit:
                while first < len(backward) and backward[first] in done:
                    first += 1
                # b - m is the forward of the same stage and microbatch.
                can = (b for b in backward[first:] if b not in done and b - m in done)
                sooner = next(can, None)
                if sooner is None:
                    return None
                done.add(sooner)
                result.append(sooner)
                # B together with its W frees all that F took.
                held -= holds[sooner - m]
            held += holds[x]
        elif x - m in done:
            held -= holds[x - m]
        else:
            return None
        done.add(x)
        result.append(x)
    return result
