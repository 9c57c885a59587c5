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
from megapipe.schedule.passes import Placement, Schedule, loop, vee
from megapipe.schedule.patterns import check_size, fixed
from megapipe.schedule.search.anneal import Cooling, Found, anneal
from megapipe.schedule.search.bound import lower_bound
from megapipe.schedule.search.seeds import blocks, deals, patterns, unroll
from megapipe.schedule.simulate import simulate

# Passes that a second of effort may place in the search, and what a move costs beside its own. Counted, not timed: the
# result is the same on every machine. Measured on a core that is shared, so that 60 is a minute.
_PASSES_PER_SECOND, _PER_MOVE = 1_600_000, 32

# How many go on, their share of the effort after the starts are found, and the temperature at the start.
_ROUNDS = ((20, 0.4, 0.4), (5, 0.3, 0.3), (1, 0.3, 0.3))
# The share that finds starts: more where few microbatches stand for many, as all of them are slow to anneal.
_START, _LONG_START = 0.2, 0.5
# Cooling.spread in turns: in a loop the ranks must gain together.
_SPREADS, _LOOP_SPREADS = (0.3, 4.0, 0.05, 1.0), (4.0, 1.0, 4.0, 0.3)
# Steps of one annealing; more are better spent on heating again.
_LONG = 16_000


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
        bound: no schedule of this placement, memory and objective can be faster.
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
    progress: Callable[[float], None] | None = None,
) -> Report:
    """Search schedules with a split backward. The same arguments give the same schedule.

    Args:
        placement: "loop", "v", or None for the better.
        chunks: stages per rank: any number for a loop, 2 for a V; None for the best of 1, 2 and 4.
        costs: per device share, or by stage; costs by stage leave only placements with as many stages.
        memory: most activation a rank may hold, in the unit of the costs, for all ranks or for each; None: as 1F1B, p.
        objective: "makespan" (a barrier ends the iteration) or "period" (longest span of a rank; no barrier).
        effort: about the seconds to spend on one core; 40 finds what 4 may miss.
        seconds: CPU seconds of this process after which it makes do with what it has; the result is then the machine's.
        progress: called with the share of the effort spent.
    Raises: ScheduleError in one line if arguments make no sense or the memory cannot hold one microbatch.
    """
    check_size("zb-auto", ranks, microbatches, chunks or 1)
    places = _placements(ranks, microbatches, placement, chunks, costs, objective)
    candidates = [Candidate(place, costs, limits(place, costs, memory)) for place in places]
    return search_among(
        candidates, microbatches, objective=objective, effort=effort, seconds=seconds, progress=progress
    )


def search_among(
    candidates: Sequence[Candidate],
    microbatches: int,
    *,
    objective: str = "makespan",
    effort: float = 4.0,
    seconds: float = inf,
    progress: Callable[[float], None] | None = None,
) -> Report:
    """A search where each placement has its own costs, in the same units: the splits of one model.

    Raises: ScheduleError if no candidate can hold one microbatch.
    """
    period = objective == "period"
    problems = [problem(x.placement, microbatches, x.costs, x.memory, period) for x in candidates]
    best = _contest(_possible(problems), effort, process_time() + seconds, progress or (lambda share: None))
    schedule, costs = decode(best.problem, best.found.orders, "zb-auto"), best.problem.costs
    for x in problems:  # also of those a search does not make: whole backwards cost one overhead, not two
        for made in _fitting(x):
            if _worth(made, x.costs, period) < _worth(schedule, costs, period):
                schedule, costs = made, x.costs
    timeline = simulate(schedule, costs)
    least = timeline.period if period else timeline.makespan
    bound = min(lower_bound(x.placement, microbatches, x.costs, x.memory, objective) for x in problems)
    if schedule.placement == best.problem.placement:
        bound = best.bound
    distance = least / bound - 1 if bound else 0.0
    return Report(schedule, timeline.makespan, timeline.period, max(timeline.peak), bound, distance)


def _fitting(of: Problem) -> Iterator[Schedule]:
    """The catalogue's schedules of this placement and memory under these costs."""
    place = of.placement
    for made in fixed(place.num_ranks, of.microbatches, place.num_stages // place.num_ranks, of.costs):
        if made.placement == place and all(
            peak <= limit * (1 + 1e-9) for peak, limit in zip(simulate(made, of.costs).peak, of.memory, strict=True)
        ):
            yield replace(made, name="zb-auto")


def _worth(schedule: Schedule, costs: Costs, period: bool) -> tuple[float, float]:
    """Its time and, of equal ones, what ranks hold; less is better, by more than a hair."""
    time = simulate(schedule, costs)
    return float(f"{time.period if period else time.makespan:.12g}"), float(f"{sum(time.peak):.9g}")


@dataclass(frozen=True)
class _Entrant:
    """A schedule in the contest, the bound of its placement, and `spread` of the annealings to come, in turns."""

    problem: Problem
    bound: float
    found: Found
    spreads: tuple[float, ...]

    def improved(self, seconds: float, until: float, hot: float, random: Random) -> _Entrant:
        """Annealed, and reheated from the best if there is time."""
        steps = int(seconds * _PASSES_PER_SECOND / (self.problem.num_passes + _PER_MOVE))
        rounds = max(1, steps // _LONG)
        found = self.found
        for i in range(rounds):
            # Reheated now hotter, now colder: which heat frees a schedule is not known before.
            heat = hot * (1.0, 0.5, 2.0, 4.0)[i % 4] * min(1.0, steps / 5000)
            cooling = Cooling(steps // rounds, heat, 0.05 * heat, self.spreads[i % len(self.spreads)], until)
            found = anneal(self.problem, found, cooling, random, self.bound * (1 + 1e-9))
        return replace(self, found=found)


def _contest(problems: list[Problem], seconds: float, until: float, progress: Callable[[float], None]) -> _Entrant:
    """Anneal many starts for a short time, the best of them longer, the very best longest."""
    random = Random(0)
    spent = starts = _LONG_START if problems[0].microbatches >= 2 * _few(problems[0]) else _START
    entrants = _entrants(problems, starts * seconds, until, random)
    progress(spent)
    for keep, part, hot in _ROUNDS:
        best = min(x.found.length for x in entrants)
        # A placement whose bound is no better than what another has found cannot win.
        entrants = [x for x in entrants if x.bound < best * (1 - 1e-9) or x.found.length == best]
        entrants = sorted(entrants, key=lambda x: x.found.length)[:keep]
        each = part * (1.0 - starts) / len(entrants)
        for i, x in enumerate(entrants):
            entrants[i] = x.improved(each * seconds, until, hot, random)
            spent += each
            progress(spent)
    progress(1.0)
    return min(entrants, key=lambda x: x.found.length)


def _entrants(problems: list[Problem], seconds: float, until: float, random: Random) -> list[_Entrant]:
    """The best pattern of each placement and, if that is not optimal, other starts."""
    result = []
    for x in problems:
        objective = "period" if x.period else "makespan"
        bound = lower_bound(x.placement, x.microbatches, x.costs, x.memory, objective)
        starts = patterns(x)[:1]
        if starts[0].length > bound * (1 + 1e-9):
            starts += _starts(x, seconds / len(problems), until, random)
        spreads = _LOOP_SPREADS if _is_dealt(x.placement) else _SPREADS
        turns = [spreads[i % len(spreads) :] + spreads[: i % len(spreads)] for i in range(len(starts))]
        result += [_Entrant(x, bound, found, turn) for found, turn in zip(starts, turns, strict=True)]
    return result


def _starts(full: Problem, seconds: float, until: float, random: Random) -> list[Found]:
    """Building blocks; for many microbatches the result of a smaller contest, unrolled."""
    few = _few(full)
    if full.microbatches >= 2 * few:
        small = problem(full.placement, few, full.costs, full.memory, full.period)
        return unroll(full, small, _contest([small], seconds, until, lambda share: None).found)[:2]
    tries = int(seconds * _PASSES_PER_SECOND / full.num_passes / 2)
    dealt = deals(full, tries // 6, until, random) if _is_dealt(full.placement) else []
    islands = max(1, min(16 - len(dealt), tries // 200))
    return dealt + [found for _ in range(islands) for found in blocks(full, tries // islands, until, random)[:1]]


def _is_dealt(place: Placement) -> bool:
    """Is it a loop of several chunks?"""
    chunks = place.num_stages // place.num_ranks
    return chunks > 1 and place == loop(place.num_ranks, chunks)


def _few(full: Problem) -> int:
    """Microbatches of a smaller problem that has the same ramps and a middle to repeat."""
    return 3 * full.placement.num_ranks


def _placements(
    ranks: int, microbatches: int, placement: str | None, chunks: int | None, costs: Costs, objective: str
) -> list[Placement]:
    """Placements to try."""
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
        mem_b, *_ = costs.memory(place)
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
