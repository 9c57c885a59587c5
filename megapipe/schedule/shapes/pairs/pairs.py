"""Pairs: two passes of a rank run together, so that the communication of one hides behind the arithmetic of the other.

DualPipe's tables are made of them (DeepSeek-V3 report, sec. 3.2.1); here they are a transform of any table. In the
steady state each F runs with a BW. Let rank r run its pair number i at time t_r + i Q, each of length P. The F of a
pair comes from a whole pair of rank r - 1, its B from a whole pair of rank r + 1. With w_r forwards before the first
pair and d = w_(r-1) - w_r, the same between all neighbours,

    t_r >= t_(r-1) + P - d Q    and    t_(r-1) >= t_r + P,    so that    Q >= 2 P / d:

warm-ups of neighbouring ranks must differ by two passes for a pair at a time. By one, as in 1F1B, they go at half the
speed; by none they wait for each other for ever. The rule costs memory (`held_in_pairs`): 2p for 1F1B, p (v+1)/v for v
chunks dealt round-robin, p + 1/2 for a V.
"""

from __future__ import annotations

from dataclasses import replace

from megapipe.errors import ScheduleError
from megapipe.schedule.costs import SHARES, Costs
from megapipe.schedule.kinds import Kind
from megapipe.schedule.passes import Schedule, unpaired
from megapipe.schedule.search.bound import bound_of_any
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
    """A table with passes run together wherever that makes the step shorter by the clock of `costs`.

    Each stage keeps the order of its microbatches; a rank may run forwards sooner than its table says, as the rule
    asks. A backward that has no partner stays split where the table splits it.

    Args:
        memory: most activation of a rank; None: what the rule asks, or what the table holds where that is more.
        split: backwards without a partner are split where the table has them whole too.
        tries: tables to choose from.
    Returns: a table that `verify` has passed; the given one if its own pairs are the best.
    Raises: ScheduleError if no pair makes the step shorter, with the rule and the least memory with which one does.
    """
    refuse_unpairable(schedule, costs)
    # A table's own pairs are one candidate; the play makes others of its passes alone.
    alone = unpaired(schedule)
    plain, given = simulate(alone, costs), simulate(schedule, costs)
    limits = limits_in_pairs(schedule, costs, memory)
    best, least = None, plain.makespan * (1 - _SMALL)
    if given.makespan < least and all(
        x <= y * (1 + _SMALL) for x, y in zip(given.peak, limits, strict=True)
    ):
        best, least = schedule, given.makespan
    found = best_play(alone, costs, limits, tries, split=split)
    if found is not None and found[0] < least * (1 - _SMALL):
        best = replace(found[1], name=schedule.name)
    if best is None:
        raise ScheduleError(_no_gain(alone, costs, limits, plain.makespan))
    verify(best, memory=memory, costs=costs)
    return best


def held_in_pairs(schedule: Schedule, costs: Costs) -> list[float]:
    """Activation of each rank in a steady state of pairs: a microbatch passes a stage in each pair, down and up
    again, and a rank has a pair for each of its stages and microbatch."""
    place, held = schedule.placement, costs.memory(schedule.placement).b
    most = schedule.num_microbatches // place.num_chains
    rows = []
    for rank in range(place.num_ranks):
        own = place.stages_on(rank)
        lives = [
            (2 * (place.chain - place.position(s)) / (len(own) // place.num_chains), held[s])
            for s in own
        ]
        rows.append(
            sum(min(most, pairs_long / place.num_chains) * size for pairs_long, size in lives)
        )
    return rows


def limits_in_pairs(schedule: Schedule, costs: Costs, memory: float | None) -> list[float]:
    """Most activation of each rank; where no memory is given what pairs ask for, or what the table holds if more."""
    asked = held_in_pairs(schedule, costs)
    if memory is not None:
        return [memory] * len(asked)
    return [max(of) for of in zip(asked, simulate(schedule, costs).peak, strict=True)]


def refuse_unpairable(schedule: Schedule, costs: Costs) -> None:
    """Raises: ScheduleError for passes that have no partner, and for costs with nothing to hide."""
    more = sorted(schedule.kinds - {Kind.F, Kind.B, Kind.W, Kind.BW})
    if more:
        raise ScheduleError(
            f"{schedule.name} has {', '.join(more)}, and pairs are made of F, B, W and BW alone. Give the "
            "table without them: copies and gathers are added after pairs."
        )
    if schedule.cuts:
        raise ScheduleError(
            f"{schedule.name} is cut in slices: pairs are made in a table of whole microbatches."
        )
    refuse_idle(costs)


def refuse_idle(costs: Costs) -> None:
    """Raises: ScheduleError for costs that say of no pass that it has communication."""
    if costs.fb is None and not any(getattr(costs, name) for name in SHARES):
        raise ScheduleError(
            "pairs have nothing to hide, as no pass has communication. Say its share of a pass with --comm-share 0.2, "
            "or link_f and link_b in the file of --costs."
        )


def _no_gain(schedule: Schedule, costs: Costs, limits: list[float], plain: float) -> str:
    text = f"{schedule.name} is no shorter with pairs than without, {plain:g}"
    if schedule.num_microbatches == 1:
        return f"{text}: one microbatch has no pass that could run beside another. Take more microbatches."
    asked = held_in_pairs(schedule, costs)
    rule = (
        "to run each F with a BW, warm-ups of neighbouring ranks must differ by two passes, which takes a memory of "
        f"{max(asked):g}"
    )
    step, low, found = min(costs.memory(schedule.placement).b), max(limits), None
    steps = int((max(asked) - low) / step + 1 - _SMALL) if step else 0
    few, enough = 0, steps
    while few < enough:  # the least that gains, of those between
        more = (few + enough) // 2 if found else enough
        best = best_play(schedule, costs, [low + more * step] * len(limits), len(GRID))
        if best is not None and best[0] < plain * (1 - _SMALL):
            found, enough = (low + more * step, best[0]), more
            continue
        if found is None:
            break
        few = more + 1
    if found:
        return f"{text}, at a memory of {low:g}: {rule}. They gain from --memory {found[0]:g} on: {found[1]:g}."
    return f"{text}: {rule}, and with that none was found that gains. Take more microbatches or another schedule."


def paired_bound(schedule: Schedule, costs: Costs, memory: float) -> float | None:
    """No table of this placement and memory is faster, whatever runs together; None for two copies of the model."""
    place = schedule.placement
    if place.num_chains > 1 or costs.fb is not None:
        return None
    return bound_of_any(place, schedule.num_microbatches, costs, memory, "makespan")
