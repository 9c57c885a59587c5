"""Times and memory of a table with some of its activations moved, without making the table where there is a C compiler
(`weigh.c`): to the bit what its clock says."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import partial
from itertools import accumulate
from math import inf

from megapipe.schedule.costs import Costs
from megapipe.schedule.kinds import Kind
from megapipe.schedule.passes import Pass, Schedule
from megapipe.schedule.search.compiled import Doubles, Ints, doubles, ints, library
from megapipe.schedule.simulate import Timeline, simulate
from megapipe.schedule.transforms.memory import with_offload, with_recompute

Place = tuple[int, int]
"""A stage and a microbatch."""
Memory = float | tuple[float, ...]
"""Most activation that a rank may hold, the same for all or of each."""
HAIR = 1 + 1e-9
_KINDS = (Kind.F, Kind.B, Kind.W, Kind.BW, Kind.R, Kind.O, Kind.L)


class Verb(StrEnum):
    """Choices for the activations of a stage and microbatch until their backward."""

    HOLD = "hold"
    OFFLOAD = "offload"
    RECOMPUTE = "recompute"


Choices = Mapping[Place, Verb]
"""The verb of each stage and microbatch that is not held."""


@dataclass(frozen=True)
class Weight:
    """Times and memory of a table.

    Attributes:
        made, done, used: when the forward of each place begins and ends, and when its backward begins; a place is its
            stage times the microbatches, and its microbatch.
        peak: most that each rank holds; over: when it first holds more than its limit.
    """

    makespan: float
    made: Sequence[float]
    done: Sequence[float]
    used: Sequence[float]
    peak: Sequence[float]
    over: Sequence[float]

    @property
    def fits(self) -> bool:
        """Does no rank ever hold more than its limit?"""
        return all(time == inf for time in self.over)


Weigh = Callable[[Choices], Weight]


def by_rank(memory: Memory, ranks: int) -> tuple[float, ...]:
    """The limit of each rank."""
    return memory if isinstance(memory, tuple) else (memory,) * ranks


def applied(plain: Schedule, choices: Choices, costs: Costs) -> Schedule:
    """A table with these choices."""
    table = plain
    for verb, transform in ((Verb.RECOMPUTE, with_recompute), (Verb.OFFLOAD, with_offload)):
        if chosen := [place for place, choice in choices.items() if choice is verb]:
            table = transform(table, costs, chosen=chosen)
    return table


def scales(plain: Schedule, costs: Costs, memory: Memory) -> Weigh:
    """A function from choices to times and memory of the table with them."""
    code, limits = library(), by_rank(memory, len(plain.ranks))
    if code is None or not plain.kinds <= set(_KINDS[:4]) or any(len(step) > 1 for row in plain.ranks for step in row):
        return partial(_simulated, plain, costs, limits)
    return _compiled(code, plain, costs, limits)


def _simulated(plain: Schedule, costs: Costs, limits: Sequence[float], choices: Choices) -> Weight:
    time = simulate(applied(plain, choices, costs), costs)
    places = [(s, i) for s in range(plain.placement.num_stages) for i in range(plain.all_microbatches)]
    return Weight(
        time.makespan,
        [time.start[Pass(Kind.F, *place)] for place in places],
        [time.end[Pass(Kind.F, *place)] for place in places],
        [time.start[_user(time, place)] for place in places],
        time.peak,
        [
            next((at for at, held in curve if held > limit * HAIR), inf)
            for curve, limit in zip(time.curves, limits, strict=True)
        ],
    )


def _user(time: Timeline, place: Place) -> Pass:
    b = Pass(Kind.B, *place)
    return b if b in time.start else Pass(Kind.BW, *place)


class _Moved(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_int) for name in ("ranks", "stages", "microbatches")),
        *((name, Ints) for name in ("rank_of", "next", "prev", "row")),
        *((name, Doubles) for name in ("time", "lag_next", "lag_prev", "mem_b", "mem_w", "mem_o", "mem_r")),
        ("limits", Doubles),
    )


def _compiled(code: ctypes.CDLL, plain: Schedule, costs: Costs, limits: Sequence[float]) -> Weigh:
    place, m = plain.placement, plain.all_microbatches
    stages, ranks = range(place.num_stages), place.num_ranks
    n = place.num_stages * m
    after, before = [place.next(s) for s in stages], [place.prev(s) for s in stages]

    def lags(to: Sequence[int | None]) -> list[float]:
        rank_of = place.rank_of
        return [0.0 if t is None else costs.lag(rank_of[s], rank_of[t], ranks) for s, t in zip(stages, to, strict=True)]

    duration, (mem_b, mem_w, _, mem_o, mem_r, *_) = costs.durations(place), costs.memory(place)
    table = _Moved(
        *(ranks, place.num_stages, m, ints(place.rank_of)),
        *(ints([-1 if t is None else t for t in to]) for to in (after, before)),
        ints([0, *accumulate(map(len, plain.ranks))]),
        doubles([time for kind in _KINDS for time in duration[kind]]),
        *map(doubles, (lags(after), lags(before), mem_b, mem_w, mem_o, mem_r)),
        doubles([limit * HAIR for limit in limits]),
    )
    order = ints([_KINDS.index(x.kind) * n + x.stage * m + x.microbatch for row in plain.ranks for (x,) in row])
    seen = doubles([0.0] * (3 * n + 2 * ranks))
    code.weigh.restype = ctypes.c_double
    numbers = {verb: number for number, verb in enumerate(Verb)}

    def weigh(choices: Choices) -> Weight:
        verbs = (ctypes.c_int * n)()
        for (stage, microbatch), verb in choices.items():
            verbs[stage * m + microbatch] = numbers[verb]
        makespan = code.weigh(ctypes.byref(table), order, verbs, seen)
        assert makespan >= 0, f"{plain.name} cannot proceed"
        return Weight(makespan, seen[:n], seen[n : 2 * n], seen[2 * n : 3 * n], *_halves(seen[3 * n :]))

    return weigh


def _halves(both: Sequence[float]) -> tuple[Sequence[float], Sequence[float]]:
    half = len(both) // 2
    return both[:half], both[half:]
