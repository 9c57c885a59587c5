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

from megapipe.errors import ScheduleError
from megapipe.schedule.costs import Costs
from megapipe.schedule.families.offload.copies import with_offload, with_recompute
from megapipe.schedule.kinds import Kind
from megapipe.schedule.memory.held import gradients_of_keys
from megapipe.schedule.passes import Pass, Schedule
from megapipe.schedule.search.compiled import Doubles, Ints, doubles, ints, library
from megapipe.schedule.simulate import Timeline, simulate

Place = tuple[int, int]
"""A stage and a microbatch, or where these are cut a slice by its number among all."""
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
        made, done, used: when the forward of each place begins and ends, and when its backward begins, in the order of
            `places`.
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


def places(plain: Schedule) -> list[Place]:
    """All places, in order. Of two copies of the model each has its own microbatches."""
    place, per = plain.placement, len(plain.slices)
    count = plain.all_microbatches * per
    return [
        (stage, number)
        for stage in range(place.num_stages)
        for number in range(count)
        if plain.chain_of(number // per) == stage // place.chain
    ]


def forward_of(plain: Schedule, place: Place) -> Pass:
    """Its forward."""
    stage, number = place
    return Pass(Kind.F, stage, *(divmod(number, len(plain.cuts)) if plain.cuts else (number,)))


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
    if code is None or not plain.kinds <= set(_KINDS[:4]) or any(len(step) > 1 for step in plain.steps()):
        return partial(_simulated, plain, costs, limits)
    return _compiled(code, plain, costs, limits)


def _simulated(plain: Schedule, costs: Costs, limits: Sequence[float], choices: Choices) -> Weight:
    time = simulate(applied(plain, choices, costs), costs)
    forwards = [forward_of(plain, place) for place in places(plain)]
    return Weight(
        time.makespan,
        [time.start[f] for f in forwards],
        [time.end[f] for f in forwards],
        [time.start[_user(time, f)] for f in forwards],
        time.peak,
        [
            next((at for at, held in curve if held > limit * HAIR), inf)
            for curve, limit in zip(time.curves, limits, strict=True)
        ],
    )


def _user(time: Timeline, f: Pass) -> Pass:
    b = f._replace(kind=Kind.B)
    return b if b in time.start else f._replace(kind=Kind.BW)


class _Moved(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_int) for name in ("ranks", "places")),
        *((name, Ints) for name in ("row", "next", "prev", "earlier", "later", "last")),
        *((name, Doubles) for name in ("time", "lag_next", "lag_prev", "mem_b", "mem_w", "mem_o", "mem_r")),
        *((name, Doubles) for name in ("before", "own", "limits")),
    )


def _compiled(code: ctypes.CDLL, plain: Schedule, costs: Costs, limits: Sequence[float]) -> Weigh:
    place, ranks, every = plain.placement, len(plain.ranks), places(plain)
    number, forwards = {one: x for x, one in enumerate(every)}, [forward_of(plain, one) for one in every]
    parts = [plain.part(f) for f in forwards]
    by_part = {part: costs.of_slice(plain.cuts, part) for part in (*plain.parts, None)}
    duration = {part: one.durations(place) for part, one in by_part.items()}
    memory = {
        (part, letter): one.by_stage(f"mem_{letter}", place) for part, one in by_part.items() for letter in "bwor"
    }
    gradients = gradients_of_keys(plain, costs)

    def near(step: Callable[[int], int | None]) -> list[int]:
        return [-1 if (to := step(f.stage)) is None else number[to, plain.number(f)] for f in forwards]

    def lags(to: Sequence[int]) -> list[float]:
        rank_of = place.rank_of
        there = [-1 if x < 0 else every[x][0] for x in to]
        return [
            0.0 if s < 0 else costs.lag(rank_of[f.stage], rank_of[s], ranks)
            for f, s in zip(forwards, there, strict=True)
        ]

    def beside(by: int) -> list[int]:
        there = (plain.document(f) if plain.cuts else () for f in forwards)
        return [
            x + by if (f.slice or 0) + by in of else -1 for x, (f, of) in enumerate(zip(forwards, there, strict=True))
        ]

    after, before = near(place.next), near(place.prev)
    table = _Moved(
        *(ranks, len(every), ints([0, *accumulate(map(len, plain.ranks))])),
        *(ints(to) for to in (after, before, beside(-1), beside(1))),
        ints([x + (plain.document(f)[-1] - (f.slice or 0) if plain.cuts else 0) for x, f in enumerate(forwards)]),
        doubles([duration[part][kind][f.stage] for kind in _KINDS for part, f in zip(parts, forwards, strict=True)]),
        *map(doubles, (lags(after), lags(before))),
        *(
            doubles([memory[part, letter][f.stage] for part, f in zip(parts, forwards, strict=True)])
            for letter in "bwor"
        ),
        *(doubles([abs(gradients(f, way)) if gradients else 0.0 for f in forwards]) for way in (True, False)),
        doubles([limit * HAIR for limit in limits]),
    )
    order = ints(
        [_KINDS.index(x.kind) * len(every) + number[x.stage, plain.number(x)] for row in plain.ranks for (x,) in row]
    )
    n = len(every)
    seen = doubles([0.0] * (3 * n + 2 * ranks))
    code.weigh.restype = ctypes.c_double
    numbers = {verb: number for number, verb in enumerate(Verb)}

    def weigh(choices: Choices) -> Weight:
        verbs = (ctypes.c_int * n)()
        for one, verb in choices.items():
            verbs[number[one]] = numbers[verb]
        makespan = code.weigh(ctypes.byref(table), order, verbs, seen)
        if makespan < 0:
            raise ScheduleError(f"{plain.name} cannot proceed with its copies. Take another schedule.")
        return Weight(makespan, seen[:n], seen[n : 2 * n], seen[2 * n : 3 * n], *_halves(seen[3 * n :]))

    return weigh


def _halves(both: Sequence[float]) -> tuple[Sequence[float], Sequence[float]]:
    half = len(both) // 2
    return both[:half], both[half:]
