"""The solver for offload and recomputation: hold, offload or recompute each stage and microbatch.

It minimises the makespan within the memory. First it moves activations until all ranks fit, one
microbatch of each full rank at a time. They go to the host if the copy returns without anyone
waiting, else they are recomputed. Then it changes one or two choices at a time. The order of passes
comes from given tables. `tables` returns such tables from the catalogue, and
`search.offloaded.searched` returns tables made for offload.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import inf
from random import Random

from megapipe.errors import ScheduleError
from megapipe.schedule.core.compiled import library
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
    forward_of,
    places,
    scales,
)
from megapipe.schedule.kinds import Kind
from megapipe.schedule.memory.limits import by_rank
from megapipe.schedule.passes import Schedule
from megapipe.schedule.patterns import PATTERNS, make
from megapipe.schedule.simulate import run_clock, uncollected

TRIES = 2000
FEW_TRIES = 60
"""Changes of single choices, with a C compiler and without one.

They take half a second for 8 ranks and 16 microbatches.
"""
_FEW = 128
"""Most places of a rank that are moved one at a time."""


@dataclass(frozen=True)
class Solved:
    """The best table found, and what it does with each stage's and microbatch's activations.

    Attributes:
        plain: the table before offload and recomputation.
        choices: {(stage, microbatch or slice): offload or recompute}. Activations that are not in
            it stay on the device.
        schedule: the table with the passes for these choices: copies out (O) and back (L),
            recomputation (R).
        makespan: the makespan of `schedule`, in the time unit of the costs.
        peak: most activation that each rank holds in `schedule`, in the unit of the costs.
    """

    plain: Schedule
    choices: Choices
    schedule: Schedule
    makespan: float
    peak: tuple[float, ...]


def tables(ranks: int, microbatches: int, costs: Costs) -> list[Schedule]:
    """Return the table of each built-in schedule that exists for these ranks and microbatches.

    Schedules with two copies of the weights or with overlapped pairs are left out.

    Args:
        costs: costs under which some schedules choose their order.
    """
    found = []
    for name, entry in PATTERNS.items():
        # Two copies of the weights take the memory that is to be saved.
        if entry.copies == 1 and not entry.pairs:
            # A schedule without a number of chunks of its own takes the fewest.
            chunks = None if entry.chunks else 2
            try:
                found.append(make(name, entry, ranks, microbatches, chunks=chunks, costs=costs))
            except ScheduleError:
                continue
    return found


@dataclass(frozen=True)
class _Answer:
    """A candidate: choices for one table, with their time and memory.

    `rank` is the value by which candidates are sorted, best first.

    Attributes:
        table: the table before these choices.
        choices: {(stage, microbatch or slice): offload or recompute}.
        weight: time and memory of the table with the choices.
    """

    table: _Table
    choices: Choices
    weight: Weight

    @property
    def rank(self) -> tuple[float, int]:
        """Return (makespan, number of activations that are not held); smaller is better."""
        return self.weight.makespan, len(self.choices)


class _Table:
    """A table before offload and recomputation, for which many choices are evaluated.

    `answer` returns the candidate with given choices. `pays` returns whether an activation can be
    copied to the host and back in time.

    Args:
        plain: the table.
        memory: limit on a rank's activation, or one limit for each rank, in the unit of the costs.
    """

    def __init__(self, plain: Schedule, costs: Costs, memory: Memory) -> None:
        self.plain = plain
        self.costs = costs
        self._weigh: Weigh = scales(plain, costs, memory)
        self.held = self.answer({})
        place = plain.placement
        self.every = places(plain)
        self.number = {one: x for x, one in enumerate(self.every)}
        took = {}
        for part in (*plain.parts, None):
            took[part] = costs.of_slice(plain.cuts, part).durations(place)
        self.copy = []
        self.on: list[list[Place]] = [[] for _ in range(place.num_ranks)]
        for one in self.every:
            of_part = took[plain.part(forward_of(plain, one))]
            self.copy.append(sum(of_part[kind][one[0]] for kind in (Kind.O, Kind.L)))
            self.on[place.rank_of[one[0]]].append(one)

    def answer(self, choices: Choices) -> _Answer:
        """Return the candidate that has these choices, with the time and memory it leads to.

        Args:
            choices: {(stage, microbatch or slice): offload or recompute}.
        """
        return _Answer(self, choices, self._weigh(choices))

    def pays(self, weight: Weight, place: Place) -> bool:
        """Return whether an activation can be copied out and back between its forward and backward.

        Args:
            weight: the times of all forwards and backwards, under the choices so far.
            place: the (stage, microbatch or slice) of the activation.
        """
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
    """Return the best table and choices within the memory.

    Equal arguments give equal results. A choice holds, offloads or recomputes the activations of a
    stage and microbatch.

    Args:
        plain: tables without offload and recomputation; the best one is taken.
        memory: limit on a rank's activation, or one limit for each rank, in the unit of the costs.
        tries: number of random changes, of one or two choices each, for each of the three best
            tables. None takes TRIES with a C compiler and FEW_TRIES without one: about half a
            second.
        seed: the seed of the random changes.
        most: longest makespan of interest, in the time unit of the costs.
    Raises: ScheduleError if no table fits the memory within that makespan.
    """
    found: list[_Answer] = []
    # Offload and recomputation never save time. So a table that is slower than the best found
    # cannot win.
    of_plain = [_Table(one, costs, memory) for one in plain]
    for table in sorted(of_plain, key=lambda table: table.held.weight.makespan):
        if found and table.held.weight.makespan >= min(one.weight.makespan for one in found):
            break
        for one in _starts(table, most):
            if one.weight.fits and one.weight.makespan <= most:
                found.append(one)
    if not found:
        least = min(by_rank(memory, 1))
        raise ScheduleError(
            f"no choice of holding, copying and computing again fits a memory of {least:g}. "
            "Allow more, or take a schedule of more stages for each rank, such as v-min."
        )
    if tries is None:
        tries = TRIES
        if library() is None:
            tries = FEW_TRIES

    # The three best tables, each with its best candidate: after single changes another table may
    # be the best.
    first: dict[int, _Answer] = {}
    for one in sorted(found, key=lambda one: one.rank):
        first.setdefault(id(one.table), one)
    dice = Random(seed)
    improved = [_improved(one, dice, tries) for one in list(first.values())[:3]]
    best = min(improved, key=lambda one: one.rank)
    table = best.table
    schedule = applied(table.plain, best.choices, costs)
    peak = tuple(best.weight.peak)
    return Solved(table.plain, best.choices, schedule, best.weight.makespan, peak)


def _starts(table: _Table, most: float) -> Iterator[_Answer]:
    """Yield candidates for one table, from which the random changes begin.

    First all activations are held. If that does not fit, some or all are offloaded or recomputed.

    Args:
        table: the table.
        most: longest makespan of interest. A table that exceeds it with all activations held has no
            further candidates.
    """
    # Holding everything takes least time, so nothing else is of interest if it fits.
    yield table.held
    if table.held.weight.fits or table.held.weight.makespan > most:
        return
    yield table.answer(dict.fromkeys(table.every, Verb.RECOMPUTE))
    # Copies that fit between forward and backward. A stream may still be too busy for all of them.
    offloaded = table.answer(
        {x: Verb.OFFLOAD for x in table.every if table.pays(table.held.weight, x)}
    )
    yield offloaded
    clock = run_clock(table.plain, table.costs)
    for share in (0.25, 0.5, 0.75):
        yield table.answer(dict.fromkeys(longest(table.plain, clock, share), Verb.OFFLOAD))
    for verbs in ((Verb.OFFLOAD, Verb.RECOMPUTE), (Verb.RECOMPUTE,)):
        yield from _fitted(table.held, verbs, most)
        yield from _fitted(offloaded, verbs, most)


def _fitted(start: _Answer, verbs: Sequence[Verb], most: float) -> Iterator[_Answer]:
    """Yield a candidate that fits the memory, or nothing if none fits.

    Activations are offloaded or recomputed one at a time until the memory suffices.

    Args:
        start: the candidate to begin with.
        verbs: which of the choices may be used: offload, recompute or both.
        most: longest makespan of interest. The attempt ends when it is exceeded.
    """
    # A place changes at most twice: from hold to offload, then to recompute.
    now = start
    table = start.table
    for _ in range(2 * len(table.every)):
        if now.weight.fits:
            yield now
        if now.weight.fits or now.weight.makespan > most:
            return
        changed: list[tuple[Place, Verb]] = []
        for rank in range(len(table.on)):
            changed += _moved(now, rank, verbs)
        if not changed:
            return
        now = table.answer({**now.choices, **dict(changed)})


def _moved(now: _Answer, rank: int, verbs: Sequence[Verb]) -> list[tuple[Place, Verb]]:
    """Return what to offload or recompute next on a rank; [] if it is within its memory limit.

    The items are ((stage, microbatch or slice), offload or recompute). The candidates are the
    activations held when the limit is first exceeded. Offloads come before recomputations, and
    activations that are held longer before others. One item is returned, or a few if the rank has
    more than 128 activations in the table.

    Args:
        now: the choices so far, with the times and memory that follow from them.
        rank: the number of the rank.
        verbs: what may be chosen: to offload, to recompute, or either.
    """
    table = now.table
    weight = now.weight
    at = weight.over[rank]
    if at == inf:
        return []
    candidates: list[tuple[bool, float, Place, Verb]] = []
    for place in table.on[rank]:
        x = table.number[place]
        choice = now.choices.get(place, Verb.HOLD)
        # Held at that moment, and not moved as far as it can be.
        if weight.made[x] > at or weight.used[x] <= at or choice is Verb.RECOMPUTE:
            continue
        life = weight.used[x] - weight.done[x]
        if Verb.OFFLOAD in verbs and choice is Verb.HOLD and table.pays(weight, place):
            candidates.append((True, life, place, Verb.OFFLOAD))
        elif Verb.RECOMPUTE in verbs:
            candidates.append((False, life, place, Verb.RECOMPUTE))
    # Copies first, because they take no compute time; then the longest lives.
    count = -(-len(table.on[rank]) // _FEW)
    return [x[2:] for x in sorted(candidates, reverse=True)[:count]]


def _improved(start: _Answer, dice: Random, tries: int) -> _Answer:
    """Return the best candidate after random changes of one or two choices of `start`.

    A change is kept if the result fits and is faster, or as fast with fewer activations offloaded
    or recomputed.

    Args:
        start: the candidate to begin with.
        dice: the source of random numbers.
        tries: number of changes.
    """
    best = start
    table = start.table
    # No choice is faster than holding everything.
    floor = table.held.weight.makespan * HAIR
    for _ in range(tries):
        if best.weight.makespan <= floor:
            break
        choices = dict(best.choices)
        moved = [place for place in table.every if place in choices]
        # Recomputation takes compute time, so most changes are of recomputed places.
        again = [place for place in moved if choices[place] is Verb.RECOMPUTE]
        place = dice.choice(again if again and dice.random() < 0.7 else moved)
        choices[place] = dice.choice([verb for verb in Verb if verb is not choices[place]])
        # A single change often exceeds the memory, where a second one makes room for it.
        if dice.random() < 0.5:
            choices[dice.choice(table.every)] = dice.choice(list(Verb))
        tried = table.answer({x: verb for x, verb in choices.items() if verb is not Verb.HOLD})
        if tried.weight.fits and tried.rank < best.rank:
            best = tried
    return best
