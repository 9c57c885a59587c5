"""A schedule as orders of integers, with one tight clock: what generators that take costs and the search work on.

Pass (kind k, stage s, microbatch i) is (3 s + k) m + i with F, B, W = 0, 1, 2, so a whole number names its class
(kind and stage) and the next microbatch of the class is the next number. Orders keep every class FIFO.
"""

from __future__ import annotations

from dataclasses import dataclass

from megapipe.schedule.costs import Costs
from megapipe.schedule.passes import Kind, Pass, Placement, Schedule

Orders = list[list[int]]
KINDS = (Kind.F, Kind.B, Kind.W)


@dataclass(frozen=True)
class Problem:
    """A problem: all that does not change during a search. Lists of passes end with one more, "no pass", at time 0.

    Attributes:
        costs: what all below is made of.
        memory: limit of each rank, in the unit of the costs.
        period: minimise the longest span of a rank instead of the makespan.
        duration, lag: time of a pass, and of the message it waits for.
        source, target: the pass whose result a pass takes, and the pass on another rank that waits for it.
        rank: where it runs.
        holds: memory it adds; negative: frees. B swaps mem_b for mem_w.
        unit: the longest pass, the scale of every step of the search.
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
        """The pass that is none, done before the start."""
        return len(self.duration) - 1


def problem(
    placement: Placement, microbatches: int, costs: Costs, memory: tuple[float, ...], period: bool
) -> Problem:
    """Write placement and costs down by pass."""
    m, stages, rank_of = microbatches, placement.num_stages, placement.rank_of
    # A pass is one integer, (3 stage + kind) m + microbatch, and all is in lists: a search plays this at every move.
    n = 3 * stages * m
    time = costs.durations(placement)
    mem_b, mem_w, *_ = costs.memory(placement)
    duration, lag, holds = [0.0] * (n + 1), [0.0] * (n + 1), [0.0] * (n + 1)
    source, target, rank = [n] * (n + 1), [n] * (n + 1), [-1] * (n + 1)
    for s in range(stages):
        for k, held in enumerate((mem_b[s], mem_w[s] - mem_b[s], -mem_w[s])):
            before = (s - 1 if s else None, s + 1 if s + 1 < stages else None, None)[k]
            for x in range((3 * s + k) * m, (3 * s + k + 1) * m):
                duration[x], holds[x], rank[x] = time[KINDS[k]][s], held, rank_of[s]
                if before is not None:
                    source[x] = x + 3 * m * (before - s)
                    if rank_of[before] != rank_of[s]:
                        lag[x], target[source[x]] = (
                            costs.lag(rank_of[before], rank_of[s], placement.num_ranks),
                            x,
                        )
                # Without a stage before it a pass waits for its own microbatch's F (at the loss) or B (its W).
                elif k:
                    source[x] = x - m
    unit = max(duration)
    return Problem(
        placement, m, costs, memory, period, duration, lag, source, target, rank, holds, unit
    )


def clock(problem: Problem, orders: Orders) -> list[float] | None:
    """End of every pass if each starts as soon as it can; None if ranks wait for each other for ever."""
    duration, lag, source, target, rank = (
        problem.duration,
        problem.lag,
        problem.source,
        problem.target,
        problem.rank,
    )
    n = problem.num_passes
    # Below 0: not run yet. The last one is the pass that is none, over at the start.
    end = [-1.0] * n + [0.0]
    at, now, sizes = [0] * len(orders), [0.0] * len(orders), [len(order) for order in orders]
    ready, left = list(range(len(orders))), n
    while ready:
        r = ready.pop()
        order, i, t, size = orders[r], at[r], now[r], sizes[r]
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
            if y != n:
                q = rank[y]
                if at[q] < sizes[q] and orders[q][at[q]] == y:
                    ready.append(q)
        left -= i
        at[r], now[r] = i, t
    return None if left else end


def length(problem: Problem, orders: Orders, end: list[float], spread: float = 0.0) -> float:
    """The objective, plus `spread` times its mean over ranks: that tells the search of gains on ranks not the last."""
    ends = [end[order[-1]] for order in orders]
    if problem.period:
        ends = [e - end[o[0]] + problem.duration[o[0]] for e, o in zip(ends, orders, strict=True)]
    total = 0.0
    for (
        e
    ) in ends:  # one after the other, as C adds: `sum` corrects what is lost, from Python 3.12 on
        total += e
    return max(ends) + spread * total / len(ends)


def fits(problem: Problem, orders: Orders) -> bool:
    """Does every rank stay within its memory?"""
    return all(fits_rank(problem, order, rank) for rank, order in enumerate(orders))


def fits_rank(problem: Problem, order: list[int], rank: int) -> bool:
    """Does this order stay within the memory of the rank?"""
    holds, held, limit = problem.holds, 0.0, problem.memory[rank] * (1 + 1e-9)
    for x in order:
        held += holds[x]
        if held > limit:
            return False
    return True


def encode(problem: Problem, schedule: Schedule) -> Orders:
    """A table as integers; BW is a B with its W right behind it, a pair its F first."""
    m = problem.microbatches
    split = {kind: (kind,) for kind in KINDS} | {Kind.BW: (Kind.B, Kind.W)}
    return [
        [
            (3 * x.stage + KINDS.index(kind)) * m + x.microbatch
            for step in r
            for x in step
            for kind in split[x.kind]
        ]
        for r in schedule.ranks
    ]


def decode(problem: Problem, orders: Orders, name: str) -> Schedule:
    """Integers as a table."""
    m = problem.microbatches
    rows = (
        tuple((Pass(KINDS[x // m % 3], x // m // 3, x % m),) for x in order) for order in orders
    )
    return Schedule(name, problem.placement, m, tuple(rows))


def one_by_one(problem: Problem) -> Orders:
    """One microbatch at a time: the order of least memory."""
    m, place = problem.microbatches, problem.placement
    rows = []
    for rank in range(place.num_ranks):
        stages = place.stages_on(rank)
        classes = [3 * s for s in stages] + [3 * s + k for s in reversed(stages) for k in (1, 2)]
        rows.append([c * m + i for i in range(m) for c in classes])
    return rows


def backward_sooner(problem: Problem, order: list[int], rank: int) -> list[int] | None:
    """F and B of a rank, reordered to fit: where an F finds no room even with all W done, a later B comes first.

    None if that cannot help.
    """
    m, holds, limit = problem.microbatches, problem.holds, problem.memory[rank] * (1 + 1e-9)
    backward = [x for x in order if x // m % 3 == 1]
    done: set[int] = set()
    result: list[int] = []
    held, first = 0.0, 0
    for x in order:
        if x in done:
            continue
        if x // m % 3 == 0:
            while held + holds[x] > limit:
                while first < len(backward) and backward[first] in done:
                    first += 1
                sooner = next(
                    (b for b in backward[first:] if b not in done and b - m in done), None
                )
                if sooner is None:
                    return None
                done.add(sooner)
                result.append(sooner)
                # With its W, as in "all W done": the pair frees what F took.
                held -= holds[sooner - m]
            held += holds[x]
        elif x - m in done:
            held -= holds[x - m]
        else:
            return None
        done.add(x)
        result.append(x)
    return result


def weights_sooner(problem: Problem, order: list[int], rank: int) -> list[int] | None:
    """An order in which W that are owed come sooner where an F finds no room.

    None if that cannot help, or if a pass stands before one that it needs on the same rank.
    """
    m, holds, limit = problem.microbatches, problem.holds, problem.memory[rank] * (1 + 1e-9)
    done: set[int] = set()
    result: list[int] = []
    owed: list[int] = []
    held, first = 0.0, 0
    for x in order:
        kind = x // m % 3
        if x in done:
            continue
        if kind and x - m not in done:
            return None
        while held + holds[x] > limit:
            while first < len(owed) and owed[first] in done:
                first += 1
            # Nothing is left that frees memory: this order cannot be mended.
            if first == len(owed):
                return None
            done.add(owed[first])
            result.append(owed[first])
            held += holds[owed[first]]
        if kind == 1:
            owed.append(x + m)
        done.add(x)
        result.append(x)
        held += holds[x]
    return result
