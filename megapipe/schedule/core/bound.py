"""A lower bound of the makespan, from chains of passes, the memory limit and the work of a rank.

It has three ideas, for any costs by stage. Before its first B a rank can only run F, as many as fit
its memory. After its last B it can only run W, as many as its memory has deferred. Every microbatch
occupies memory from its F to its W, so memory times time is bounded (Little's law).
"""

from __future__ import annotations

from dataclasses import replace
from itertools import accumulate, pairwise
from typing import NamedTuple

from megapipe.schedule.costs import SHARES, Costs
from megapipe.schedule.families.family import times
from megapipe.schedule.memory.limits import by_rank
from megapipe.schedule.passes import Kind, Placement, Schedule


class Overheads(NamedTuple):
    """The parts of `Costs.overhead`, a pass's host time, that a lower bound adds to F, B and W.

    If some passes cost one overhead together, their parts add up to 1. A fused backward has (b, w)
    = (1, 0). An overlapped pair of F and BW has (f, b, w) = (0.5, 0.5, 0).

    Attributes:
        f, b, w: the part for a forward, an input gradient and a weight gradient.
    """

    f: float
    b: float
    w: float


SPLIT = Overheads(1.0, 1.0, 1.0)
WHOLE = Overheads(1.0, 1.0, 0.0)  # a BW costs one for its B and its W together
PAIRED = Overheads(0.5, 0.5, 0.0)  # a pair costs one for both of its passes


def lower_bound(
    placement: Placement,
    microbatches: int,
    costs: Costs,
    memory: float | tuple[float, ...],
    objective: str,
    overheads: Overheads = SPLIT,
) -> float:
    """Return a lower bound of the makespan or period of any schedule of one copy of the model.

    A table with overlapped pairs (two passes at once) may be faster, see `bound_of_any`.

    Take uniform stages on p ranks, m >= 2p microbatches, messages that take no time, and a memory
    limit of p microbatches. With one chunk on each rank the bound is then

        m(F+B+W) + (p-1) max(B, F + max(0, B-W)),

    and with two in a loop m(F+B+W) + (p-1) max(F, B)/2.

    Args:
        memory: limit of all ranks, or one for each, in the unit of the costs.
        objective: "makespan" or "period" (longest time from a rank's first start to its last end).
        overheads: how often F, B, W pay costs.overhead: SPLIT, WHOLE (some BW), PAIRED (pairs too).
    Returns: a time in the unit of the costs.
    """
    ranks = placement.num_ranks
    m = microbatches
    rank_of = placement.rank_of
    limits = by_rank(memory, ranks)
    work = replace(costs, overhead=0.0).durations(placement)
    each = zip((Kind.F, Kind.B, Kind.W), overheads, strict=True)
    f, b, w = ([time + count * costs.overhead for time in work[kind]] for kind, count in each)
    mem_b, mem_w, *_ = costs.memory(placement)
    lag = [costs.lag(one, two, ranks) for one, two in pairwise(rank_of)] + [0.0]
    # The first microbatch on three stages. down[s]: when F of stage s can start. up[s]: how long
    # after the start of the last stage's B the B of stage s can start.
    #
    #     stage 0  F0             B0    down = 0, f0, f0 + f1, turn
    #     stage 1     F1       B1       up   = b2 + b1, b2, 0
    #     stage 2        F2 B2          turn = f0 + f1 + f2, when the last stage's B starts
    down = [0.0, *accumulate(x + y for x, y in zip(f, lag, strict=True))]
    backwards = (b[s] + lag[s - 1] for s in reversed(range(1, placement.num_stages)))
    up = [0.0, *accumulate(backwards)][::-1]
    turn = down[-1]

    def at_rest(rank: int) -> tuple[float, float]:
        """Return a rank's least time from its first F to (the end of its last B, its last end)."""
        stages = placement.stages_on(rank)
        limit = limits[rank] * (1 + 1e-9)
        first = stages[0]
        deepest = stages[-1]
        busy = m * sum(f[s] + b[s] + w[s] for s in stages)
        # From its first F to its first B a rank runs only forwards, as many as its memory holds. In
        # the rest of this time it waits.
        wait = max(0.0, turn + up[deepest] - down[first] - _most(limit, m, stages, f, mem_b))
        lives = [mem_b[s] * (turn + up[s] + b[s] - down[s]) for s in stages]
        owed = [mem_w[s] * w[s] for s in stages]
        # Memory times time is an area. So m such lifespans need at least this time under the limit.
        share = 0.0
        if limit:
            share = m / limit
        to_last_b = max(busy + wait - _most(limit, m, stages, w, mem_w), sum(lives) * share)
        return to_last_b, max(busy + wait, (sum(lives) + sum(owed)) * share)

    # The bound of a rank q follows from a rank r below it: the first microbatch goes from q to r,
    # r does its own work, and the last gradient returns to q.
    alone = [at_rest(rank) for rank in range(ranks)]
    entry = [placement.stages_on(rank)[0] for rank in range(ranks)]
    best = 0.0
    for q, first in enumerate(entry):
        span = max(alone[q][1], turn - down[first] + up[first] + b[first] + w[first])
        for r, deeper in enumerate(entry):
            if deeper >= first:
                back = up[first] + b[first] - up[deeper] - b[deeper]
                span = max(span, down[deeper] - down[first] + alone[r][0] + back + w[first])
        # The makespan also counts the time before the rank's first forward.
        if objective == "makespan":
            span += down[first]
        best = max(best, span)
    return best


def bound_of_any(
    placement: Placement,
    microbatches: int,
    costs: Costs,
    memory: float | tuple[float, ...],
    objective: str,
) -> float:
    """Return a lower bound that also holds for schedules with fused backwards and overlapped pairs.

    Args:
        memory: limit of all ranks, or one for each, in the unit of the costs.
        objective: "makespan" or "period" (longest time from a rank's first start to its last end).
    Returns: a time in the unit of the costs.
    """
    size = placement, microbatches
    beside = _beside_backwards(costs)
    links = [getattr(costs, name) for name in SHARES]
    if not any(links):
        # Without fb a pair takes the time of both of its passes.
        overheads = WHOLE
        if costs.fb is not None:
            overheads = PAIRED
        return lower_bound(*size, beside, memory, objective, overheads)
    # A pair takes at least the arithmetic of both passes, and at least their communication. With
    # either one as the time of passes, a pair becomes two steps of a table without pairs, which
    # holds no more memory.
    lanes = [1 - share for share in links], links
    return max(
        lower_bound(*size, _scaled(beside, shares), memory, objective, PAIRED) for shares in lanes
    )


def _beside_backwards(costs: Costs) -> Costs:
    """Return the costs with f reduced to what a forward adds to the time of a backward in a pair.

    With fb, the given time of a pair, f becomes fb - b - w. f becomes 0 for costs by stage, or if
    communication may hide more. Costs without fb are unchanged.
    """
    if costs.fb is None:
        return costs
    if isinstance(costs.f, tuple) or isinstance(costs.b, tuple) or isinstance(costs.w, tuple):
        return replace(costs, f=0.0)
    # With communication a forward may also hide in other pairs than the one whose time fb is.
    left = 0.0
    if not costs.communicates:
        left = max(0.0, costs.fb - costs.b - costs.w)
    return replace(costs, f=min(costs.f, left))


def _scaled(costs: Costs, shares: list[float]) -> Costs:
    """Return the costs with f, b and w multiplied by factors.

    Args:
        shares: the factors of f, b and w, in this order.
    """
    f, b, w = map(times, shares, (costs.f, costs.b, costs.w))
    return replace(costs, f=f, b=b, w=w)


def _most(
    limit: float, microbatches: int, stages: tuple[int, ...], time: list[float], memory: list[float]
) -> float:
    """Return how long a rank can run passes of one kind before its memory is full.

    Args:
        limit: memory limit of the rank.
        microbatches: number of microbatches of a training step.
        stages: stages of the rank. Each has one pass of the kind for each microbatch.
        time, memory: [num_stages] time of one pass on each stage, and memory that it takes.
    """
    everything = microbatches * sum(time[s] for s in stages)
    sizes = {memory[s] for s in stages}
    if min(sizes) <= 0.0 or limit == float("inf"):
        return everything
    # Passes of one size: a whole number of them fits. Else the best stage fills the memory exactly,
    # which no mix of passes exceeds.
    if len(sizes) == 1:
        return min(everything, limit // sizes.pop() * max(time[s] for s in stages))
    return min(everything, limit * max(time[s] / memory[s] for s in stages))


def paired_bound(schedule: Schedule, costs: Costs, memory: float) -> float | None:
    """Return a lower bound on the makespan of any table with the schedule's placement.

    The bound holds for tables with and without overlapped pairs of passes.

    Args:
        memory: limit on a rank's activation, in the unit of the costs.
    Returns: a time in the unit of the costs. None for two copies of the model, and for costs that
        give the time of a pair (`Costs.fb`).
    """
    place = schedule.placement
    # The bound does not know two copies, nor a time of pairs that their passes do not give.
    if place.num_chains > 1 or costs.fb is not None:
        return None
    return bound_of_any(place, schedule.num_microbatches, costs, memory, "makespan")
