"""zb-auto: a schedule searched for the costs, the memory and the placement at hand.

The papers' patterns and building blocks of our own are candidates; annealing improves the best of them until the lower
bound is met or the effort is spent. `python tools/bench/search.py` shows the gain where a better schedule than any
fixed pattern is known to exist.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from math import inf
from random import Random
from time import process_time
from typing import Any

from megapipe.errors import ScheduleError
from megapipe.schedule.costs import UNIT, Costs
from megapipe.schedule.generators.orders import Problem, decode, one_by_one, problem
from megapipe.schedule.generators.waves import loop, vee
from megapipe.schedule.passes import Placement, Schedule
from megapipe.schedule.patterns import check_size, fixed, one_of
from megapipe.schedule.search.bound import bound_of_any
from megapipe.schedule.search.compiled import library
from megapipe.schedule.search.contest import Spending, contest, pace_here
from megapipe.schedule.search.seeds import is_large
from megapipe.schedule.simulate import Timeline, simulate


@dataclass(frozen=True)
class Candidate:
    """A placement to search in, what its stages cost, and the most that each rank may hold."""

    placement: Placement
    costs: Costs
    memory: tuple[float, ...]


@dataclass(frozen=True)
class Report:
    """The result of a search. Times and memory are in the units of the costs.

    Attributes:
        bound: no schedule of this placement, memory and objective can be faster, also with whole backwards or pairs.
        distance: objective / bound - 1.
    """

    schedule: Schedule
    makespan: float
    period: float
    peak: float
    bound: float
    distance: float

    def __str__(self) -> str:
        place = self.schedule.placement
        chunks = place.num_stages // place.num_ranks
        shape = "v" if chunks == 2 and place == vee(place.num_ranks) else f"loop of {chunks} chunk(s)"
        return (
            f"{shape}: makespan {self.makespan:g}, period {self.period:g}, peak memory {self.peak:g}, "
            f"lower bound {self.bound:g}, distance {self.distance:.1%}"
        )


def describe_search(
    table: Schedule, costs: Costs, memory: float | tuple[float, ...] | None, objective: str
) -> list[str]:
    """Return lines on how far the table that a search found is above the lower bound."""
    place = table.placement
    time = simulate(table, costs)
    bound = bound_of_any(place, table.num_microbatches, costs, limits(place, costs, memory), objective)
    took = time.period if objective == "period" else time.makespan
    lines = [f"lower bound: {bound:.5g}; {took / bound - 1 if bound else 0.0:.1%} above it"]
    if library() is None:
        lines.append("searched in Python: with a C compiler (cc, or $CC) it tries some fifty times as many orders")
    return lines


def zb_auto(ranks: int, microbatches: int, **arguments: Any) -> Schedule:
    """The best schedule that the search finds. Never worse than any schedule of the catalogue with one copy of
    the model that fits the memory and the placement, under the same costs; arguments as in `search`."""
    return search(ranks, microbatches, **arguments).schedule


def search(
    ranks: int,
    microbatches: int,
    *,
    placement: str | None = None,
    chunks: int | None = None,
    costs: Costs = UNIT,
    memory: float | tuple[float, ...] | None = None,
    objective: str = "makespan",
    effort: float = 4.0,
    seconds: float = inf,
    portable: bool = False,
    progress: Callable[[float], None] | None = None,
) -> Report:
    """Search schedules with a split backward. The same arguments give the same schedule.

    Args:
        placement: "loop", "v", or None for the better.
        chunks: stages per rank: any number for a loop, 2 for a V; None for the best of 1, 2 and 4.
        costs: per device share, or by stage; costs by stage leave only placements with as many stages.
        memory: most activation a rank may hold, in the unit of the costs, for all ranks or for each; None: as 1F1B, p.
        objective: "makespan" (a barrier ends the iteration) or "period" (longest span of a rank; no barrier).
        effort: about the seconds to spend on one core; 40 finds what 4 may miss. It buys so many moves, fifty times as
            many where there is a C compiler.
        seconds: CPU seconds of this process after which it makes do with what it has; the result is then the machine's.
        portable: as many moves as without a compiler: the same result on every machine.
        progress: called with the share of the effort spent.
    Raises: ScheduleError in one line if arguments make no sense or the memory cannot hold one microbatch.
    """
    check_size("zb-auto", ranks, microbatches, chunks or 1)
    places = placements(ranks, microbatches, placement, chunks, costs, objective)
    candidates = [Candidate(place, costs, limits(place, costs, memory)) for place in places]
    return search_among(
        candidates,
        microbatches,
        objective=objective,
        effort=effort,
        seconds=seconds,
        portable=portable,
        progress=progress,
    )


def search_among(
    candidates: Sequence[Candidate],
    microbatches: int,
    *,
    objective: str = "makespan",
    effort: float = 4.0,
    seconds: float = inf,
    portable: bool = False,
    progress: Callable[[float], None] | None = None,
) -> Report:
    """A search where each placement has its own costs, in the same units: the splits of one model.

    Raises: ScheduleError if no candidate can hold one microbatch.
    """
    period = objective == "period"
    problems = [problem(x.placement, microbatches, x.costs, x.memory, period) for x in candidates]
    spending = Spending(pace_here(portable), process_time() + seconds, Random(0))
    best = contest(_possible(problems), effort, spending, progress or (lambda share: None))
    schedule, of = decode(best.problem, best.found.orders, "zb-auto"), best.problem
    timeline = simulate(schedule, of.costs)
    for x in problems:  # also of those a search does not make: whole backwards cost one overhead, not two
        least = _worth(timeline, period)[0]
        if bound_of_any(x.placement, microbatches, x.costs, x.memory, objective) > least * (1 + 1e-9):
            continue
        for made, time in _fitting(x, timeline):
            if _worth(time, period) < _worth(timeline, period):
                schedule, of, timeline = made, x, time
    least = timeline.period if period else timeline.makespan
    bound = bound_of_any(of.placement, microbatches, of.costs, of.memory, objective)
    distance = least / bound - 1 if bound else 0.0
    return Report(schedule, timeline.makespan, timeline.period, max(timeline.peak), bound, distance)


def _fitting(of: Problem, best: Timeline) -> Iterator[tuple[Schedule, Timeline]]:
    """The catalogue's schedules of this placement and memory under these costs, and how long they take. Of large tables
    those that may be better than the best."""
    place = of.placement
    size = place.num_ranks, of.microbatches, place.num_stages // place.num_ranks, of.costs
    for made in _promising(of, best) if is_large(of) else fixed(*size, place):
        time = simulate(made, of.costs)
        if _fits(of, time):
            yield replace(made, name="zb-auto"), time


def _promising(of: Problem, best: Timeline) -> Iterator[Schedule]:
    """Yield the catalogue's schedules that may be better than the best.

    Those of few microbatches would be, if each further one took only the work of the busiest rank.
    """
    place, ranks, m = of.placement, of.placement.num_ranks, of.microbatches
    chunks, n = place.num_stages // ranks, 2 * ranks + m % ranks
    least, least_held = _worth(best, of.period)
    for small in fixed(ranks, n, chunks, of.costs, place):
        time = simulate(small, of.costs)
        took, held = _worth(time, of.period)
        grown = float(f"{took + max(time.busy) / n * (m - n):.9g}")
        if _fits(of, time) and (grown, held) < (float(f"{least:.9g}"), least_held):
            yield from one_of(small.name, ranks, m, chunks, of.costs)


def _fits(of: Problem, time: Timeline) -> bool:
    return all(peak <= limit * (1 + 1e-9) for peak, limit in zip(time.peak, of.memory, strict=True))


def _worth(time: Timeline, period: bool) -> tuple[float, float]:
    """Its time and, of equal ones, what ranks hold; less is better, by more than a hair."""
    return float(f"{time.period if period else time.makespan:.12g}"), float(f"{sum(time.peak):.9g}")


def placements(
    ranks: int, microbatches: int, placement: str | None, chunks: int | None, costs: Costs, objective: str
) -> list[Placement]:
    """Placements to try. Raises: ScheduleError if arguments make no sense."""
    if ranks < 1 or microbatches < 1:
        raise ScheduleError(f"zb-auto needs at least 1 rank and 1 microbatch, got {ranks} and {microbatches}.")
    if placement not in (None, "loop", "v"):
        raise ScheduleError(f'zb-auto has the placements "loop" and "v", not "{placement}".')
    if objective not in ("makespan", "period"):
        raise ScheduleError(f'zb-auto has the objectives "makespan" and "period", not "{objective}".')
    if chunks is not None and (chunks < 1 or (placement == "v" and chunks != 2)):
        raise ScheduleError(f"zb-auto cannot cut a {placement or 'loop'} in {chunks} chunks per rank; a V has 2.")
    places = [vee(ranks)] if placement != "loop" and chunks in (None, 2) else []
    if placement != "v":
        places += [loop(ranks, v) for v in ((1, 2, 4) if chunks is None else (chunks,))]
    by_stage = [x for x in (costs.f, costs.b, costs.w, costs.mem_b, costs.mem_w) if isinstance(x, tuple)]
    return [p for p in places if all(len(x) == p.chain for x in by_stage)] or places


def limits(place: Placement, costs: Costs, memory: float | tuple[float, ...] | None) -> tuple[float, ...]:
    """The limit of each rank; without one that of 1F1B, p microbatches of the rank with the largest."""
    if isinstance(memory, tuple):
        if len(memory) != place.num_ranks:
            raise ScheduleError(
                f"zb-auto takes one memory limit or one for each of {place.num_ranks} ranks, not {len(memory)}."
            )
        return memory
    if memory is None:
        mem_b = costs.memory(place).b
        memory = place.num_ranks * max(sum(mem_b[s] for s in place.stages_on(r)) for r in range(place.num_ranks))
    return (memory,) * place.num_ranks


def _possible(problems: list[Problem]) -> list[Problem]:
    """Problems whose ranks can hold one microbatch."""
    found, lacking = [], []
    for x in problems:
        least = [max(accumulate(x.holds[y] for y in order)) for order in one_by_one(x)]
        short = [r for r, need in enumerate(least) if need > x.memory[r] * (1 + 1e-9)]
        if short:
            lacking.append((max(least[r] for r in short), short[0], x.memory[short[0]]))
        else:
            found.append(x)
    if not found:
        need, rank, limit = min(lacking)
        raise ScheduleError(
            f"zb-auto cannot run in memory {limit:g}: "
            f"rank {rank} needs {need:g} for one microbatch. Use --memory {need:g}."
        )
    return found
