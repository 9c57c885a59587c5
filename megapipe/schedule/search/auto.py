"""zb-auto: a schedule searched for given costs, memory and placement.

The papers' patterns and our own building blocks are candidates. Annealing improves the best of them
until the lower bound is met or the effort is spent. `python tools/bench/search.py` shows the gain
where a better schedule than any fixed pattern is known.
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
from megapipe.schedule.core.bound import bound_of_any
from megapipe.schedule.core.compiled import library
from megapipe.schedule.core.orders import Problem, decode, one_by_one, problem
from megapipe.schedule.costs import UNIT, Costs
from megapipe.schedule.ingredients import placements
from megapipe.schedule.memory.limits import within
from megapipe.schedule.passes import Placement, Schedule
from megapipe.schedule.patterns import check_size, fixed, one_of
from megapipe.schedule.placement import vee
from megapipe.schedule.search.contest import Spending, contest
from megapipe.schedule.search.seeds import few, is_large
from megapipe.schedule.simulate import Timeline, simulate

# Part of a limited time that annealing may take. The rest is for the schedules of the catalogue.
CONTEST = 0.6


@dataclass(frozen=True)
class CandidatePlacement:
    """A placement on which to search for an order of passes.

    Attributes:
        costs: the costs of the placement's stages.
        memory: limit on each rank's activation, in the unit of the costs.
    """

    placement: Placement
    costs: Costs
    memory: tuple[float, ...]


@dataclass(frozen=True)
class Report:
    """The result of a search. Times and memory are in the units of the costs.

    Attributes:
        makespan, period: end of the last pass, and longest time from a rank's first start to its
            last end.
        peak: the most activation that any rank holds.
        bound: lower bound of the objective for any schedule of this placement and memory, also one
            with fused backwards or overlapped pairs of passes.
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
        shape = f"loop of {chunks} chunk(s)"
        if chunks == 2 and place == vee(place.num_ranks):
            shape = "v"
        return (
            f"{shape}: makespan {self.makespan:g}, period {self.period:g}, "
            f"peak memory {self.peak:g}, lower bound {self.bound:g}, distance {self.distance:.1%}"
        )


def describe_search(
    table: Schedule, costs: Costs, memory: float | tuple[float, ...] | None, objective: str
) -> list[str]:
    """Return lines that compare the table that a search found with a lower bound.

    Args:
        memory: limit on activation, of all ranks or of each; None for the memory of 1F1B.
        objective: "makespan", or "period" (longest time from a rank's first start to its last end).
    """
    place = table.placement
    time = simulate(table, costs)
    bound = bound_of_any(
        place, table.num_microbatches, costs, limits(place, costs, memory), objective
    )
    took = _took(time, objective == "period")
    lines = [f"lower bound: {bound:.5g}; {_distance(took, bound):.1%} above it"]
    if library() is None:
        lines.append(
            "not annealed: the moves of the search are C, and this machine has no C compiler "
            "(cc, or $CC)"
        )
    return lines


def _took(time: Timeline, period: bool) -> float:
    """Return the period of a timeline if `period` is true, else its makespan."""
    return time.period if period else time.makespan


def _distance(took: float, bound: float) -> float:
    """Return took / bound - 1; 0 if the bound is 0 because passes take no time."""
    return took / bound - 1 if bound else 0.0


def zb_auto(ranks: int, microbatches: int, **arguments: Any) -> Schedule:
    """Return the best schedule that `search` finds, of backwards that are split or whole.

    If the search has the time, it also tries each built-in schedule with one copy of the model that
    fits in this placement and memory.

    Args:
        arguments: keyword arguments of `search`, such as placement, chunks, costs and memory.
    """
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
    progress: Callable[[float], None] | None = None,
) -> Report:
    """Search for the best schedule. Backwards are split into B and W where that is shorter.

    Equal arguments give equal schedules.

    Args:
        placement: "loop", "v", or None for the better.
        chunks: stages on each rank: any number for a loop, 2 for a V; None for the best of 1, 2 and
            4.
        costs: tuples with a value for each stage leave only placements with as many stages.
        memory: limit on activation, one for all ranks or one for each, in the unit of the costs.
            None for the memory of 1F1B: p microbatches on p ranks.
        objective: "makespan" if a barrier ends the step. If not, "period": the longest time from a
            rank's first start to its last end.
        effort: about the seconds to spend on one core; 40 finds what 4 may miss. The effort is
            converted to a number of moves. Moves need a C compiler. Without one the result is the
            best known schedule, with its W (weight gradient) put where ranks would wait.
        seconds: CPU seconds of this process after which the search returns the best so far. The
            result then depends on the machine.
        progress: called with the fraction of the effort spent, 0 to 1.
    Raises: ScheduleError in one line if arguments contradict each other, or the memory does not
        hold one microbatch.
    """
    check_size("zb-auto", ranks, microbatches, chunks or 1)
    places = placements(ranks, microbatches, placement, chunks, costs, objective)
    candidates = [
        CandidatePlacement(place, costs, limits(place, costs, memory)) for place in places
    ]
    return search_among(
        candidates,
        microbatches,
        objective=objective,
        effort=effort,
        seconds=seconds,
        progress=progress,
    )


def search_among(
    candidates: Sequence[CandidatePlacement],
    microbatches: int,
    *,
    objective: str = "makespan",
    effort: float = 4.0,
    seconds: float = inf,
    progress: Callable[[float], None] | None = None,
) -> Report:
    """Search for the best schedule on placements that each have their own costs.

    For example, the placements have different splits of the layers.

    Args:
        candidates: the placements, with costs in the same units.
        objective: "makespan", or "period" (longest time from a rank's first start to its last end).
        effort: about the seconds to spend on one core.
        seconds: CPU seconds of this process after which the search returns the best so far.
        progress: called with the fraction of the effort spent, 0 to 1.
    Raises: ScheduleError if no candidate can hold one microbatch.
    """
    period = objective == "period"
    problems = [problem(x.placement, microbatches, x.costs, x.memory, period) for x in candidates]
    began = process_time()
    # The seed is fixed, so a command finds the table again that a run has trained with.
    spending = Spending(began + CONTEST * seconds, Random(0))
    best = contest(_possible(problems), effort, spending, progress or (lambda share: None))
    schedule = decode(best.problem, best.found.orders, "zb-auto")
    of = best.problem
    timeline = simulate(schedule, of.costs)
    # The catalogue also has tables that a search does not make: a whole backward pass costs one
    # overhead, and not two.
    for x in problems:
        least, _ = _worth(timeline, period)
        bound = bound_of_any(x.placement, microbatches, x.costs, x.memory, objective)
        # Then no table of this placement is better, and its tables need not be made.
        if bound > least * (1 + 1e-9):
            continue
        for made, time in _fitting(x, timeline, began + seconds):
            if _worth(time, period) < _worth(timeline, period):
                schedule = made
                of = x
                timeline = time
    bound = bound_of_any(of.placement, microbatches, of.costs, of.memory, objective)
    distance = _distance(_took(timeline, period), bound)
    return Report(schedule, timeline.makespan, timeline.period, max(timeline.peak), bound, distance)


def _fitting(of: Problem, best: Timeline, until: float) -> Iterator[tuple[Schedule, Timeline]]:
    """Yield (schedule, timeline) for built-in schedules that fit placement and memory.

    A large table is made only if it may be better than the best so far.

    Args:
        of: the problem with placement, costs and memory limits.
        best: timeline of the best schedule so far.
        until: CPU time of this process at which to stop.
    """
    place = of.placement
    size = place.num_ranks, of.microbatches, place.num_stages // place.num_ranks, of.costs
    tables = fixed(*size, place)
    if is_large(of):
        tables = _promising(of, best, until)
    for made in tables:
        if process_time() > until:
            return
        time = simulate(made, of.costs)
        if within(time.peak, of.memory):
            yield replace(made, name="zb-auto"), time


def _promising(of: Problem, best: Timeline, until: float) -> Iterator[Schedule]:
    """Yield the built-in schedules that may be better than the best so far.

    A schedule is made for few microbatches first. Each further microbatch is then counted with the
    work of the busiest rank only. The schedule is left out if it is worse even so.

    Args:
        of: the problem with placement, costs and memory limits.
        best: timeline of the best schedule so far.
        until: CPU time of this process at which to stop.
    """
    place = of.placement
    ranks = of.placement.num_ranks
    m = of.microbatches
    chunks = place.num_stages // ranks
    # With the same remainder: some patterns exist only for multiples of the ranks.
    n = few(of) + m % ranks
    least, least_held = _worth(best, of.period)
    for small in fixed(ranks, n, chunks, of.costs, place):
        if process_time() > until:
            return
        time = simulate(small, of.costs)
        took, held = _worth(time, of.period)
        grown = float(f"{took + max(time.busy) / n * (m - n):.9g}")
        if within(time.peak, of.memory) and (grown, held) < (float(f"{least:.9g}"), least_held):
            yield from one_of(small.name, ranks, m, chunks, of.costs)


def _worth(time: Timeline, period: bool) -> tuple[float, float]:
    """Return (value to minimise, sum of the ranks' peak memory), rounded.

    Args:
        period: minimise the longest time from a rank's first start to its last end, not the
            makespan.
        time: the simulated schedule.
    """
    # Two orders of the same passes add the same times in different orders. Without rounding their
    # last bits would decide between them, and not the memory.
    return float(f"{_took(time, period):.12g}"), float(f"{sum(time.peak):.9g}")


def limits(
    place: Placement, costs: Costs, memory: float | tuple[float, ...] | None
) -> tuple[float, ...]:
    """Return the memory limit of each rank, in the unit of the costs.

    Args:
        memory: one limit for all ranks, or one for each. None takes the memory of 1F1B: p times the
            most that one microbatch takes on any rank.
    Raises: ScheduleError if the number of limits is not the number of ranks.
    """
    if isinstance(memory, tuple):
        if len(memory) != place.num_ranks:
            raise ScheduleError(
                f"zb-auto takes one memory limit or one for each of {place.num_ranks} ranks, "
                f"not {len(memory)}."
            )
        return memory
    if memory is None:
        memory = place.num_ranks * max(costs.held_by_rank(place))
    return (memory,) * place.num_ranks


def _possible(problems: list[Problem]) -> list[Problem]:
    """Return the problems, one for each placement, whose ranks can hold one microbatch.

    Raises: ScheduleError if there are none, with the memory that one microbatch needs.
    """
    found = []
    lacking = []
    for x in problems:
        # One microbatch after another is the order that holds least. What it needs, all need.
        held = [map(x.holds.__getitem__, order) for order in one_by_one(x)]
        least = [max(accumulate(changes)) for changes in held]
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
