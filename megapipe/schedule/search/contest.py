"""The contest of a search: many starts are annealed shortly, the best ones longer."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from random import Random
from time import process_time

from megapipe.schedule.core.bound import lower_bound
from megapipe.schedule.core.orders import Problem, problem
from megapipe.schedule.passes import Placement
from megapipe.schedule.placement import loop
from megapipe.schedule.search.anneal import Cooling, FoundSchedule, anneal
from megapipe.schedule.search.seeds import (
    blocks,
    few,
    in_groups,
    is_large,
    pattern,
    patterns,
    unroll,
)

# Effort is counted in passes and not in time, so that faster or busier machines find the same
# schedule. Measured on a shared core: an effort of 60 is about a minute.
PASSES_PER_SECOND = 90_000_000  # passes that a second of effort may place by moves
PER_MOVE = 32  # cost of a move in passes, in addition to the passes of the table
PASSES_PER_SECOND_OF_STARTS = 1_600_000  # starts are made in Python
# Moves of one annealing; further moves are better spent on heating again.
LONG = 200_000
# Temperature factor of each heating, in turns. Which one frees a schedule is not known in advance.
HEATS = (1.0, 0.5, 1.5, 2.0)
# `Cooling.spread` of each heating, in turns. The ranks of a loop of several chunks must gain
# together, so the mean over ranks has other weights there.
SPREADS_OF_LOOPS = (0.3, 0.3, 1.0, 0.1)
SPREADS = (0.3, 4.0, 0.05, 1.0)

# Rounds of (entrants that continue, share of the effort after the starts, first temperature).
_ROUNDS = ((20, 0.4, 0.4), (5, 0.3, 0.3), (1, 0.3, 0.3))
# Share of the effort that finds starts. It is larger if few microbatches stand for many, because
# annealing the full table is slow.
_START = 0.2
_LONG_START = 0.5


@dataclass(frozen=True)
class Spending:
    """The resources that a search may still use: CPU time and random numbers.

    Attributes:
        until: CPU time of this process, in seconds, at which to stop.
        random: the generator of the search's random numbers.
    """

    until: float
    random: Random


@dataclass(frozen=True)
class Entrant:
    """One of several schedules that are annealed, so that the best one wins.

    `improved` returns the entrant after further annealing.

    Attributes:
        problem: the schedule's placement, costs, memory limits and objective.
        bound: lower bound of the objective for this placement.
        found: the schedule.
        spreads: values of `Cooling.spread` for the annealings of one call of `improved`, in turn.
    """

    problem: Problem
    bound: float
    found: FoundSchedule
    spreads: tuple[float, ...]

    def improved(self, seconds: float, of: Spending, hot: float) -> Entrant:
        """Return the entrant after annealing it, once or, for many seconds, several times.

        Args:
            seconds: about the seconds to spend on one core.
            of: the limit of CPU time, and the random numbers.
            hot: first temperature, in units of the longest pass.
        """
        steps = int(seconds * PASSES_PER_SECOND / (self.problem.num_passes + PER_MOVE))
        if not steps:
            return self
        rounds = max(1, steps // LONG)
        goal = self.bound * (1 + 1e-9)
        found = self.found
        for i in range(rounds):
            # Few moves cannot cool a hot schedule down again, so they start colder.
            heat = hot * HEATS[i % len(HEATS)] * min(1.0, steps / 5000)
            spread = self.spreads[i % len(self.spreads)]
            cooling = Cooling(steps // rounds, heat, 0.05 * heat, spread, of.until)
            found = anneal(self.problem, found, cooling, of.random.getrandbits(64), goal)
        return replace(self, found=found)


def contest(
    problems: list[Problem],
    seconds: float,
    of: Spending,
    progress: Callable[[float], None],
    known: FoundSchedule | None = None,
) -> Entrant:
    """Return the entrant with the best schedule: many are annealed shortly, the best ones longer.

    Args:
        problems: the problem of each placement to try.
        seconds: about the seconds to spend on one core.
        of: the limit of CPU time, and the random numbers.
        progress: called with the fraction of the effort spent, 0 to 1.
        known: the best built-in schedule, if the caller has it and there is one problem; else None.
    """
    starts = _START
    if problems[0].microbatches >= 2 * few(problems[0]):
        starts = _LONG_START
    entrants = _entrants(problems, starts * seconds, of, known)
    spent = starts
    progress(spent)
    for keep, part, hot in _ROUNDS:
        best = min(x.found.length for x in entrants)
        # A placement whose bound is no better than another's schedule cannot win.
        entrants = [x for x in entrants if x.bound < best * (1 - 1e-9) or x.found.length == best]
        entrants = sorted(entrants, key=lambda x: x.found.length)[:keep]
        each = part * (1.0 - starts) / len(entrants)
        for i, x in enumerate(entrants):
            entrants[i] = x.improved(each * seconds, of, hot)
            spent += each
            progress(spent)
    progress(1.0)
    return min(entrants, key=lambda x: x.found.length)


def _entrants(
    problems: list[Problem], seconds: float, of: Spending, known: FoundSchedule | None
) -> list[Entrant]:
    """Return the schedules to anneal: for each placement the best built-in one, and others.

    If the best built-in schedule is optimal, there are no others.

    Args:
        problems: the problem of each placement to try.
        seconds: about the seconds to spend on finding them.
        of: the limit of CPU time, and the random numbers.
        known: the best built-in schedule, if the caller has it and there is one problem; else None.
    """
    result: list[Entrant] = []
    bounds = [(_bound(x), i) for i, x in enumerate(problems)]
    some_large = any(map(is_large, problems))
    # The most promising placement first, because its result may rule out the others.
    if some_large:
        bounds.sort()
    for bound, i in bounds:
        x = problems[i]
        each = seconds / len(problems)
        # Starts of a large table take long, so none are made for a placement that cannot win, nor
        # after the last time.
        if some_large and result:
            least = min(one.found.length for one in result)
            if bound >= least * (1 - 1e-9) or process_time() > of.until:
                continue
        if is_large(x):
            starts = _unrolled(x, each, of)
        else:
            starts = [known or patterns(x)[0][0]]
            # A pattern that meets the bound is optimal: no other start is needed.
            if starts[0].length > bound * (1 + 1e-9):
                starts += _starts(x, each, of)
        spreads = SPREADS_OF_LOOPS if _is_interleaved(x.placement) else SPREADS
        # Each start begins with another spread, so that the short first round tries them all.
        for number, found in enumerate(starts):
            turn = number % len(spreads)
            result.append(Entrant(x, bound, found, spreads[turn:] + spreads[:turn]))
    return result


def _bound(x: Problem) -> float:
    objective = "makespan"
    if x.period:
        objective = "period"
    return lower_bound(x.placement, x.microbatches, x.costs, x.memory, objective)


def _unrolled(full: Problem, seconds: float, of: Spending) -> list[FoundSchedule]:
    """Return schedules to begin with for a large table, from a search with few microbatches.

    The middle of each result of that search is repeated for the other microbatches. The built-in
    schedule that is best for few microbatches is one more.

    Args:
        full: the problem with all microbatches.
        seconds: about the seconds to spend on one core.
        of: the limit of CPU time, and the random numbers.
    """
    small = problem(full.placement, few(full), full.costs, full.memory, full.period)
    ranked = patterns(small)
    # Random numbers of its own: the small contest's draws must not shift the large one's.
    own = replace(of, random=Random(0))
    best = contest([small], seconds, own, lambda share: None, ranked[0][0])
    found = unroll(full, small, best.found)[:2]
    name = next((name for _, name in ranked if name), "")
    if name:
        found += pattern(full, name)[:1]
    return sorted(found, key=lambda x: x.length) or [patterns(full)[0][0]]


def _starts(full: Problem, seconds: float, of: Spending) -> list[FoundSchedule]:
    """Return schedules with which to begin: building blocks, repeated for all microbatches.

    For a loop with several chunks there are also interleaved orders with random groups. For many
    microbatches, a search with few microbatches gives the schedules: the middle of its result is
    repeated.

    Args:
        full: the problem with all microbatches.
        seconds: about the seconds to spend on one core.
        of: the limit of CPU time, and the random numbers.
    """
    if full.microbatches >= 2 * few(full):
        small = problem(full.placement, few(full), full.costs, full.memory, full.period)
        best = contest([small], seconds, replace(of, random=Random(0)), lambda share: None)
        return unroll(full, small, best.found)[:2]
    tries = int(seconds * PASSES_PER_SECOND_OF_STARTS / full.num_passes / 2)
    starts = []
    if _is_interleaved(full.placement):
        starts = in_groups(full, tries // 6, of.until, of.random)
    # Several searches of blocks that know nothing of each other, because the blocks of one search
    # soon resemble its best.
    islands = max(1, min(16 - len(starts), tries // 200))
    for _ in range(islands):
        starts += blocks(full, tries // islands, of.until, of.random)[:1]
    return starts


def _is_interleaved(place: Placement) -> bool:
    """Return whether a placement is a loop with several stages on each rank."""
    chunks = place.num_stages // place.num_ranks
    return chunks > 1 and place == loop(place.num_ranks, chunks)
