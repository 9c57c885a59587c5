"""Overlapped pairs: two passes run together, and the communication of one hides under the other.

DualPipe's tables consist of such pairs (DeepSeek-V3 report, sec. 3.2.1). Here they are a transform
of any table. In the steady phase each F runs with a BW. Let rank r run its pair i at time
t_r + i Q, each of length P. The F of a pair comes from a pair of rank r - 1, its B from a pair of
rank r + 1. With w_r forwards before the first pair, and the same d = w_(r-1) - w_r between all
neighbours,

    t_r >= t_(r-1) + P - d Q    and    t_(r-1) >= t_r + P,    so that    Q >= 2 P / d.

A pair at a time (Q = P) therefore needs warm-ups of neighbouring ranks that differ by two passes.
If they differ by one, as in 1F1B, pairs run at half that speed. If they are equal, ranks deadlock.
The rule costs memory (`held_in_pairs`), on rank 0: 2p microbatches for 1F1B, p (v+1)/v for v chunks
dealt round-robin, and p + 1/2 for a V.
"""

from __future__ import annotations

from dataclasses import replace

from megapipe.errors import ScheduleError
from megapipe.schedule.costs import Costs
from megapipe.schedule.ingredients import refuse_idle
from megapipe.schedule.kinds import LAYERS
from megapipe.schedule.memory.limits import within
from megapipe.schedule.passes import Schedule, unpaired
from megapipe.schedule.shapes.pairs.manner import GRID
from megapipe.schedule.shapes.pairs.together import best_play
from megapipe.schedule.simulate import simulate
from megapipe.schedule.verify import verify

_SMALL = 1e-9  # rounding


def pairs(
    schedule: Schedule,
    costs: Costs,
    *,
    memory: float | None = None,
    split: bool = False,
    tries: int = 72,
) -> Schedule:
    """Return a table with overlapped pairs that make the step shorter under `costs`.

    Each stage keeps the order of its microbatches. A rank may run forwards sooner than in its
    table, because pairs need longer warm-ups.

    Args:
        schedule: the table; pairs that it has already are separated and chosen anew.
        memory: limit on a rank's activation, in the unit of the costs. None takes as much as longer
            warm-ups need, or as the table holds if that is more.
        split: split a backward that is not in a pair into B and W, even if the table has it fused.
        tries: number of tables to choose from.
    Returns: a table that `verify` has passed; the given one if its own pairs are the best.
    Raises: ScheduleError if no pair makes the step shorter, with the least memory with which pairs
    would. Also for a table or costs that `refuse_unpairable` refuses.
    """
    refuse_unpairable(schedule, costs)
    # The table's own pairs are one candidate. Simulations of its single passes give the others.
    alone = unpaired(schedule)
    plain = simulate(alone, costs)
    given = simulate(schedule, costs)
    limits = limits_in_pairs(schedule, costs, memory)
    best = None
    # A pair must gain something: passes that run one by one need no kernels that overlap.
    least = plain.makespan * (1 - _SMALL)
    if given.makespan < least and within(given.peak, limits):
        best = schedule
        least = given.makespan
    found = best_play(alone, costs, limits, tries, split=split)
    if found is not None and found[0] < least * (1 - _SMALL):
        best = replace(found[1], name=schedule.name)
    if best is None:
        raise ScheduleError(_no_gain(alone, costs, limits, plain.makespan))
    verify(best, memory=memory, costs=costs)
    return best


def held_in_pairs(schedule: Schedule, costs: Costs) -> list[float]:
    """Return the activation that each rank holds while it runs one overlapped pair after another.

    A pair is two passes that run together. In the steady state a rank runs pairs of each of its
    stages in turn. A microbatch advances by one stage in the time of a pair. The activation is in
    the unit of the costs.
    """
    place = schedule.placement
    held = costs.memory(place).b
    most = schedule.num_microbatches // place.num_chains
    rows = []
    for rank in range(place.num_ranks):
        own = place.stages_on(rank)
        total = 0.0
        for stage in own:
            # A microbatch passes the later stages down and up, a stage in each pair of its rank.
            # Number of pairs from the forward to the backward of a microbatch.
            lifespan = 2 * (place.chain - place.position(stage)) / (len(own) // place.num_chains)
            total += min(most, lifespan / place.num_chains) * held[stage]
        rows.append(total)
    return rows


def limits_in_pairs(schedule: Schedule, costs: Costs, memory: float | None) -> list[float]:
    """Return the most activation that each rank may hold in a table with overlapped pairs.

    Args:
        schedule: the table without pairs.
        memory: the limit of every rank, in the unit of the costs. None takes the memory that
            overlapped pairs need, or the table's own if that is more.
    """
    asked = held_in_pairs(schedule, costs)
    if memory is not None:
        return [memory] * len(asked)
    peak = simulate(schedule, costs).peak
    return [max(of) for of in zip(asked, peak, strict=True)]


def refuse_unpairable(schedule: Schedule, costs: Costs) -> None:
    """Refuse a table or costs for which no overlapped pairs can be chosen.

    A table with slices, or with other kinds of pass than F, B, W and BW, is refused. So are costs
    without communication, because pairs have nothing to hide then.

    Raises: ScheduleError that says what to change.
    """
    more = sorted(schedule.kinds.difference(LAYERS))
    if more:
        raise ScheduleError(
            f"{schedule.name} has {', '.join(more)}, and pairs are made of F, B, W and BW alone. "
            "Give the table without them: copies and gathers are added after pairs."
        )
    if schedule.cuts:
        raise ScheduleError(
            f"{schedule.name} is cut in slices: pairs are made in a table of whole microbatches."
        )
    refuse_idle(costs)


def _no_gain(schedule: Schedule, costs: Costs, limits: list[float], plain: float) -> str:
    """Return a sentence: why overlapped pairs do not help, and with how much memory they would.

    Args:
        limits: limit on each rank's activation.
        plain: the makespan without pairs.
    """
    text = f"{schedule.name} is no shorter with pairs than without, {plain:g}"
    if schedule.num_microbatches == 1:
        return (
            f"{text}: one microbatch has no two passes that could run together. "
            "Take more microbatches."
        )
    asked = held_in_pairs(schedule, costs)
    rule = (
        "to run each F with a BW, warm-ups of neighbouring ranks must differ by two passes, "
        f"which takes a memory of {max(asked):g}"
    )
    step = min(costs.memory(schedule.placement).b)
    low = max(limits)
    found = None

    # Bisect for the least memory with which pairs help, in steps of a microbatch of a stage. The
    # memory of the rule comes first: if pairs do not help with that, they do with none below it.
    few = 0
    enough = 0
    if step:
        enough = int((max(asked) - low) / step + 1 - _SMALL)
    while few < enough:
        more = enough
        if found:
            more = (few + enough) // 2
        best = best_play(schedule, costs, [low + more * step] * len(limits), len(GRID))
        if best is not None and best[0] < plain * (1 - _SMALL):
            found = low + more * step, best[0]
            enough = more
            continue
        if found is None:
            break
        few = more + 1
    if found:
        return (
            f"{text}, at a memory of {low:g}: {rule}. "
            f"They gain from --memory {found[0]:g} on: {found[1]:g}."
        )
    return (
        f"{text}: {rule}, and with that none was found that gains. "
        "Take more microbatches or another schedule."
    )
