"""One solver over three verbs: for each stage and microbatch hold, copy to the host, or compute again; least makespan.

What does not fit is moved, one microbatch of each full rank at a time: to the host where the copy is out of the way in
time and back without anyone waiting, else it is computed again. Then single choices are changed as long as that pays.
The order of the passes is that of one of the tables that are given: `tables` has the catalogue's, `searched` such as
leave room for what cannot be moved.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from math import inf
from random import Random

from megapipe.errors import ScheduleError
from megapipe.schedule.costs import Costs
from megapipe.schedule.families.offload.copies import longest
from megapipe.schedule.families.offload.weigh import (
    HAIR,
    Choices,
    Memory,
    Place,
    Verb,
    Weigh,
    Weight,
    applied,
    by_rank,
    forward_of,
    places,
    scales,
)
from megapipe.schedule.kinds import Kind
from megapipe.schedule.passes import Placement, Schedule
from megapipe.schedule.patterns import PATTERNS, make
from megapipe.schedule.search.auto import Candidate, search, search_among
from megapipe.schedule.search.compiled import library
from megapipe.schedule.simulate import run_clock, uncollected

TRIES, FEW_TRIES = 2000, 60
"""Changes of single choices, with a C compiler and without: half a second for 8 ranks and 16 microbatches."""
_FEW = 128
"""Places of a rank that are moved one at a time."""
EFFORT = 0.1
"""Seconds of a search for an order: longer ones gain less than other choices."""


@dataclass(frozen=True)
class Solved:
    """A table with its choices.

    Attributes:
        plain: the table without them.
    """

    plain: Schedule
    choices: Choices
    schedule: Schedule
    makespan: float
    peak: tuple[float, ...]


def tables(ranks: int, microbatches: int, costs: Costs) -> list[Schedule]:
    """The catalogue's tables of these numbers that have one copy of the weights and no pairs."""
    found = []
    for name, entry in PATTERNS.items():
        if entry.copies == 1 and not entry.pairs:
            try:
                found.append(make(name, entry, ranks, microbatches, chunks=None if entry.chunks else 2, costs=costs))
            except ScheduleError:
                continue
    return found


def searched(
    ranks: int,
    microbatches: int,
    costs: Costs,
    memory: Memory,
    *,
    place: Placement | None = None,
    effort: float = EFFORT,
    portable: bool = False,
) -> Iterator[Schedule]:
    """Tables that fit this memory once most of what their forwards leave is moved.

    A search that counts a part of it alone, and all that weight gradients wait with, as nothing moves that.

    Args:
        place: the stages; None: the best of loops and V.
        effort, portable: of each of six searches, as in `search`.
    """
    for part, limit in _MOVED_LATER:
        held = tuple(part * x for x in costs.mem_b) if isinstance(costs.mem_b, tuple) else part * costs.mem_b
        counted, rooms = replace(costs, mem_b=held), tuple(limit * x for x in by_rank(memory, ranks))
        try:
            if place is None:
                found = search(ranks, microbatches, costs=counted, memory=rooms, effort=effort, portable=portable)
            else:
                candidate = Candidate(place, counted, rooms)
                found = search_among([candidate], microbatches, effort=effort, portable=portable)
            yield found.schedule
        except ScheduleError:  # not one microbatch fits
            continue


_MOVED_LATER = (0.05, 0.75), (0.05, 0.875), (0.15, 0.875), (0.33, 0.75), (1.0, 2.0), (1.0, 4.0)
"""Parts of mem_b that stay, and of the memory: the rest is for what is on its way. Each was best of fifteen such pairs
for some of fourteen drawn costs; the last two where a copy takes longer than a forward."""


@dataclass(frozen=True)
class _Answer:
    """Choices for one table, and what it takes with them."""

    table: _Table
    choices: Choices
    weight: Weight

    @property
    def rank(self) -> tuple[float, int]:
        """The time and, of equal ones, the number of what is moved."""
        return self.weight.makespan, len(self.choices)


class _Table:
    """A table without choices, and what it takes with them."""

    def __init__(self, plain: Schedule, costs: Costs, memory: Memory) -> None:
        self.plain, self.costs = plain, costs
        self._weigh: Weigh = scales(plain, costs, memory)
        self.held = self.answer({})
        place, self.every = plain.placement, places(plain)
        self.number = {one: x for x, one in enumerate(self.every)}
        took = {part: costs.of_slice(plain.cuts, part).durations(place) for part in (*plain.parts, None)}
        parts = [(plain.part(forward_of(plain, one)), one[0]) for one in self.every]
        self.copy = [sum(took[part][kind][stage] for kind in (Kind.O, Kind.L)) for part, stage in parts]
        self.on = [[one for one in self.every if place.rank_of[one[0]] == rank] for rank in range(place.num_ranks)]

    def answer(self, choices: Choices) -> _Answer:
        """The answer of these choices."""
        return _Answer(self, choices, self._weigh(choices))

    def pays(self, weight: Weight, place: Place) -> bool:
        """Is there time to copy it out and back between its forward and its backward?"""
        x = self.number[place]
        return weight.used[x] - weight.done[x] >= self.copy[x]


@uncollected()
def solve(
    plain: Sequence[Schedule],
    costs: Costs,
    memory: Memory,
    *,
    tries: int | None = None,
    seed: int = 0,
    most: float = inf,
) -> Solved:
    """The best choices for one of some tables.

    Args:
        memory: in the unit of the costs.
        tries: changes of single choices that are tried, in each of the three best tables; None: as many as take half a
            second, which are more with a C compiler.
        most: a makespan that is no longer of interest.
    Returns: same arguments, same result.
    Raises: ScheduleError if no table fits in that time.
    """
    found: list[_Answer] = []
    # Moving activations only takes time: a table that takes longer without is not looked at.
    for table in sorted((_Table(x, costs, memory) for x in plain), key=lambda table: table.held.weight.makespan):
        if found and table.held.weight.makespan >= min(one.weight.makespan for one in found):
            break
        found += [one for one in _starts(table, most) if one.weight.fits and one.weight.makespan <= most]
    if not found:
        least = min(by_rank(memory, 1))
        raise ScheduleError(
            f"no choice of holding, copying and computing again fits a memory of {least:g}. Allow more, or take a "
            "schedule of more stages for each rank, such as v-min."
        )
    tries = tries if tries is not None else FEW_TRIES if library() is None else TRIES
    first: dict[int, _Answer] = {}
    for one in sorted(found, key=lambda one: one.rank):
        first.setdefault(id(one.table), one)
    dice = Random(seed)
    best = min((_improved(one, dice, tries) for one in list(first.values())[:3]), key=lambda one: one.rank)
    schedule = applied(best.table.plain, best.choices, costs)
    return Solved(best.table.plain, best.choices, schedule, best.weight.makespan, tuple(best.weight.peak))


def _starts(table: _Table, most: float) -> Iterator[_Answer]:
    """First answers for one table: each verb for all, and each first for what does not fit; while they are of
    interest."""
    yield table.held
    if table.held.weight.fits or table.held.weight.makespan > most:
        return
    yield table.answer(dict.fromkeys(table.every, Verb.RECOMPUTE))
    offloaded = table.answer({x: Verb.OFFLOAD for x in table.every if table.pays(table.held.weight, x)})
    yield offloaded
    clock = run_clock(table.plain, table.costs)
    for share in (0.25, 0.5, 0.75):
        yield table.answer(dict.fromkeys(longest(table.plain, clock, share), Verb.OFFLOAD))
    for verbs in ((Verb.OFFLOAD, Verb.RECOMPUTE), (Verb.RECOMPUTE,)):
        yield from _fitted(table.held, verbs, most)
        yield from _fitted(offloaded, verbs, most)


def _fitted(start: _Answer, verbs: Sequence[Verb], most: float) -> Iterator[_Answer]:
    """The table with as many choices as it needs to fit; none if none are enough in that time."""
    now, table = start, start.table
    for _ in range(2 * len(table.every)):
        if now.weight.fits:
            yield now
        if now.weight.fits or now.weight.makespan > most:
            return
        changed = [move for rank in range(len(table.on)) for move in _moved(now, rank, verbs)]
        if not changed:
            return
        now = table.answer({**now.choices, **dict(changed)})


def _moved(now: _Answer, rank: int, verbs: Sequence[Verb]) -> list[tuple[Place, Verb]]:
    """The next move of a rank that is full: of what it has at that moment, what stays longest. Of many places several
    at once."""
    table, weight, at = now.table, now.weight, now.weight.over[rank]
    if at == inf:
        return []
    candidates: list[tuple[bool, float, Place, Verb]] = []
    for place in table.on[rank]:
        x = table.number[place]
        choice = now.choices.get(place, Verb.HOLD)
        if weight.made[x] > at or weight.used[x] <= at or choice is Verb.RECOMPUTE:
            continue
        life = weight.used[x] - weight.done[x]
        if Verb.OFFLOAD in verbs and choice is Verb.HOLD and table.pays(weight, place):
            candidates.append((True, life, place, Verb.OFFLOAD))
        elif Verb.RECOMPUTE in verbs:
            candidates.append((False, life, place, Verb.RECOMPUTE))
    count = -(-len(table.on[rank]) // _FEW)
    return [x[2:] for x in sorted(candidates, reverse=True)[:count]]


def _improved(start: _Answer, dice: Random, tries: int) -> _Answer:
    """The answer after single changes that make it faster, or as fast with fewer passes."""
    best, table = start, start.table
    floor = table.held.weight.makespan * HAIR
    for _ in range(tries):
        if best.weight.makespan <= floor:
            break
        choices = dict(best.choices)
        moved = [place for place in table.every if place in choices]
        # What is computed again takes time of its own: most changes are of these.
        again = [place for place in moved if choices[place] is Verb.RECOMPUTE]
        place = dice.choice(again if again and dice.random() < 0.7 else moved)
        choices[place] = dice.choice([verb for verb in Verb if verb is not choices[place]])
        if dice.random() < 0.5:
            choices[dice.choice(table.every)] = dice.choice(list(Verb))
        tried = table.answer({x: verb for x, verb in choices.items() if verb is not Verb.HOLD})
        if tried.weight.fits and tried.rank < best.rank:
            best = tried
    return best
