"""One solver over three verbs: for each stage and microbatch hold, copy to the host, or compute again; least makespan.

What does not fit is moved, one microbatch of each full rank at a time: to the host where the copy is out of the way in
time and back without anyone waiting, else it is computed again. Then single choices are changed as long as that pays.
The order of the passes is a table's of the catalogue, the best of all where none is named.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from random import Random

from megapipe.errors import ScheduleError
from megapipe.schedule.costs import Costs
from megapipe.schedule.kinds import Kind
from megapipe.schedule.passes import Pass, Schedule
from megapipe.schedule.patterns import PATTERNS, make
from megapipe.schedule.simulate import Timeline, run_clock, simulate, uncollected
from megapipe.schedule.transforms.memory import longest, with_offload, with_recompute

Place = tuple[int, int]
"""A stage and a microbatch."""
_HAIR = 1 + 1e-9


class Verb(StrEnum):
    """Choices for the activations of a stage and microbatch until their backward."""

    HOLD = "hold"
    OFFLOAD = "offload"
    RECOMPUTE = "recompute"


@dataclass(frozen=True)
class Solved:
    """A table with its choices.

    Attributes:
        plain: the table without them.
        choices: of what is not held.
    """

    plain: Schedule
    choices: Mapping[Place, Verb]
    schedule: Schedule
    time: Timeline

    @property
    def makespan(self) -> float:
        return self.time.makespan

    def fits(self, memory: float) -> bool:
        """Does every rank hold at most so much?"""
        return max(self.time.peak) <= memory * _HAIR


def tables(ranks: int, microbatches: int, costs: Costs) -> Iterator[Schedule]:
    """The catalogue's tables of these numbers that have one copy of the weights and no pairs."""
    for name, entry in PATTERNS.items():
        if entry.copies == 1 and not entry.pairs:
            try:
                yield make(name, entry, ranks, microbatches, chunks=2 if entry.chunks is None else None, costs=costs)
            except ScheduleError:
                continue


@uncollected()
def solve(plain: Sequence[Schedule], costs: Costs, memory: float, *, tries: int = 60, seed: int = 0) -> Solved:
    """The best choices for one of some tables.

    Args:
        memory: most activation that a rank may hold, in the unit of the costs.
        tries: changes of single choices that are tried, in each of the three best tables.
    Returns: same arguments, same result.
    Raises: ScheduleError if no table fits.
    """
    found: list[Solved] = []
    # Moving activations only takes time: a table that takes longer without is not looked at.
    for table in sorted(plain, key=lambda table: simulate(table, costs).makespan):
        start = applied(table, {}, costs)
        if found and start.makespan >= min(one.makespan for one in found):
            break
        found += [one for one in starts(start, costs, memory) if one.fits(memory)]
    if not found:
        raise ScheduleError(
            f"no choice of holding, copying and computing again fits a memory of {memory:g}. Allow more, or take a "
            "schedule of more stages for each rank, such as v-min."
        )
    dice = Random(seed)
    best = sorted(found, key=lambda one: one.makespan)
    first: dict[str, Solved] = {}
    for one in best:
        first.setdefault(one.plain.name, one)
    return min(
        (_improved(one, costs, memory, dice, tries) for one in list(first.values())[:3]), key=lambda one: one.makespan
    )


def starts(start: Solved, costs: Costs, memory: float) -> Iterator[Solved]:
    """First answers for one table: each verb for all, and each first for what does not fit."""
    every = {x[1:3] for row in start.plain.ranks for step in row for x in step if x.kind.is_forward}
    yield start
    if not start.fits(memory):
        yield applied(start.plain, dict.fromkeys(every, Verb.RECOMPUTE), costs)
        offloaded = {place: Verb.OFFLOAD for place in every if _pays(start.time, start.plain, place, costs)}
        yield applied(start.plain, offloaded, costs)
        clock = run_clock(start.plain, costs)
        for share in (0.25, 0.5, 0.75):
            yield applied(start.plain, dict.fromkeys(longest(start.plain, clock, share), Verb.OFFLOAD), costs)
        for verbs in ((Verb.OFFLOAD, Verb.RECOMPUTE), (Verb.RECOMPUTE,)):
            yield from _fitted(start, costs, memory, verbs)
            yield from _fitted(applied(start.plain, offloaded, costs), costs, memory, verbs)


def applied(plain: Schedule, choices: Mapping[Place, Verb], costs: Costs) -> Solved:
    """A table with these choices."""
    table = plain
    for verb, transform in _TRANSFORMS.items():
        if chosen := [place for place, choice in choices.items() if choice is verb]:
            table = transform(table, costs, chosen=chosen)
    return Solved(plain, dict(choices), table, simulate(table, costs))


_TRANSFORMS: dict[Verb, Callable[..., Schedule]] = {Verb.RECOMPUTE: with_recompute, Verb.OFFLOAD: with_offload}


def _fitted(start: Solved, costs: Costs, memory: float, verbs: Sequence[Verb]) -> Iterator[Solved]:
    """The table with as many choices as it needs to fit; none if none are enough."""
    now, choices = start, dict(start.choices)
    for _ in range(3 * sum(len(row) for row in start.plain.ranks)):
        if now.fits(memory):
            yield now
            return
        changed = [_moved(now, rank, choices, costs, memory, verbs) for rank in range(len(now.time.peak))]
        if not any(changed):
            return
        choices |= dict(filter(None, changed))
        now = applied(now.plain, choices, costs)


def _moved(
    now: Solved, rank: int, choices: Mapping[Place, Verb], costs: Costs, memory: float, verbs: Sequence[Verb]
) -> tuple[Place, Verb] | None:
    """The next move of a rank that is full: of what it has at that moment, what stays longest."""
    at = next((time for time, held in now.time.curves[rank] if held > memory * _HAIR), None)
    if at is None:
        return None
    time, candidates = now.time, list[tuple[bool, float, Place, Verb]]()
    for row in (step for step in now.plain.ranks[rank] if step[0].kind.is_forward or len(step) > 1):
        for place in (x[1:3] for x in row if x.kind.is_forward):
            made, used = time.end[Pass(Kind.F, *place)], time.start[_user(time, place)]
            choice = choices.get(place, Verb.HOLD)
            if time.start[Pass(Kind.F, *place)] > at or used <= at or choice is Verb.RECOMPUTE:
                continue
            if Verb.OFFLOAD in verbs and choice is Verb.HOLD and _pays(time, now.plain, place, costs):
                candidates.append((True, used - made, place, Verb.OFFLOAD))
            elif Verb.RECOMPUTE in verbs:
                candidates.append((False, used - made, place, Verb.RECOMPUTE))
    return max(candidates)[2:] if candidates else None


def _user(time: Timeline, place: Place) -> Pass:
    b = Pass(Kind.B, *place)
    return b if b in time.start else Pass(Kind.BW, *place)


def _pays(time: Timeline, plain: Schedule, place: Place, costs: Costs) -> bool:
    """Is there time to copy it out and back between its forward and its backward?"""
    there_and_back = sum(costs.durations(plain.placement)[kind][place[0]] for kind in (Kind.O, Kind.L))
    return time.start[_user(time, place)] - time.end[Pass(Kind.F, *place)] >= there_and_back


def _improved(start: Solved, costs: Costs, memory: float, dice: Random, tries: int) -> Solved:
    """The answer after single changes that make it faster, or as fast with fewer passes."""
    best, every = start, sorted(x[1:3] for row in start.plain.ranks for step in row for x in step if x.kind.is_forward)
    floor = simulate(start.plain, costs).makespan * _HAIR
    for _ in range(tries):
        if best.makespan <= floor:
            break
        choices = dict(best.choices)
        moved = [place for place in every if place in choices]
        # What is computed again takes time of its own: most changes are of these.
        again = [place for place in moved if choices[place] is Verb.RECOMPUTE]
        place = dice.choice(again if again and dice.random() < 0.7 else moved)
        choices[place] = dice.choice([verb for verb in Verb if verb is not choices[place]])
        if dice.random() < 0.5:
            choices[dice.choice(every)] = dice.choice(list(Verb))
        tried = applied(start.plain, {x: verb for x, verb in choices.items() if verb is not Verb.HOLD}, costs)
        if tried.fits(memory) and (tried.makespan, len(tried.choices)) < (best.makespan, len(best.choices)):
            best = tried
    return best
