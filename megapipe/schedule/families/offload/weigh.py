"""Time and memory of a table with offload and recomputation, without building that table.

With a C compiler `weigh.c` computes them, bitwise equal to the clock. The table is built and
simulated without a compiler, or if it has overlapped pairs or other passes than F, B, W and BW. The
solver asks for thousands of choices, and building each table would take most of its time.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import partial
from itertools import accumulate
from math import inf

from megapipe.compiled import c_fields
from megapipe.errors import ScheduleError
from megapipe.schedule.core.compiled import doubles, ints, library
from megapipe.schedule.costs import Costs
from megapipe.schedule.families.offload.copies import with_offload, with_recompute
from megapipe.schedule.kinds import LAYERS, Kind
from megapipe.schedule.memory.held import gradients_of_keys
from megapipe.schedule.memory.limits import by_rank
from megapipe.schedule.passes import Pass, Schedule
from megapipe.schedule.simulate import Timeline, simulate

Place = tuple[int, int]
"""(stage, microbatch), or (stage, number of the slice among all slices)."""
Memory = float | tuple[float, ...]
"""Most activation that a rank may hold: the same for all, or one for each."""
HAIR = 1 + 1e-9
_KINDS = (*LAYERS, Kind.R, Kind.O, Kind.L)


class Verb(StrEnum):
    """A choice for activations of one stage and microbatch between forward and backward.

    The activations are held on the device, offloaded to the host, or recomputed.
    """

    HOLD = "hold"
    OFFLOAD = "offload"
    RECOMPUTE = "recompute"


Choices = Mapping[Place, Verb]
"""The verb of each stage and microbatch that is not held."""


@dataclass(frozen=True)
class Weight:
    """The time and memory of a table under some choices, in the units of the costs.

    A choice offloads or recomputes the activations of one (stage, microbatch or slice), called a
    place. Lists with a value for each place are in the order of `places`. `fits` returns whether
    all ranks keep to their memory limits.

    Attributes:
        makespan: the end of the last pass.
        made, done: for each place, start and end of its forward.
        used: for each place, start of its backward.
        peak: for each rank, the most memory that it holds.
        over: for each rank, when it first exceeds its memory limit; inf if never.
    """

    makespan: float
    made: Sequence[float]
    done: Sequence[float]
    used: Sequence[float]
    peak: Sequence[float]
    over: Sequence[float]

    @property
    def fits(self) -> bool:
        """Return whether no rank ever exceeds its memory limit."""
        return all(time == inf for time in self.over)


Weigh = Callable[[Choices], Weight]


def places(plain: Schedule) -> list[Place]:
    """Return every (stage, microbatch) or (stage, number of the slice), called a place.

    The places are ordered stage by stage. Each of DualPipe's two copies of the model has its own
    microbatches. `plain` is the table without offload and recomputation.
    """
    place = plain.placement
    per = len(plain.slices)
    found = []
    for stage in range(place.num_stages):
        for number in range(plain.all_microbatches * per):
            # With all microbatches on all stages, DualPipe's tables ended in a KeyError.
            if plain.chain_of(number // per) == stage // place.chain:
                found.append((stage, number))
    return found


def forward_of(plain: Schedule, place: Place) -> Pass:
    """Return the forward of a place, a stage with a microbatch or slice.

    `plain` is the table without offload and recomputation.

    Args:
        place: (stage, microbatch) or (stage, number of the slice).
    """
    stage, number = place
    if not plain.cuts:
        return Pass(Kind.F, stage, number)
    return Pass(Kind.F, stage, *divmod(number, len(plain.cuts)))


def applied(plain: Schedule, choices: Choices, costs: Costs) -> Schedule:
    """Return the table with the passes for these choices: copies (O, L) and recomputations (R).

    Args:
        plain: the table without offload and recomputation.
        choices: {(stage, microbatch or slice): offload or recompute}.
        costs: costs that decide where copies stand in the rows.
    """
    # R before O and L: it takes compute time, and copies are put where the clock leaves them time.
    table = plain
    for verb, transform in ((Verb.RECOMPUTE, with_recompute), (Verb.OFFLOAD, with_offload)):
        chosen = [place for place, choice in choices.items() if choice is verb]
        if chosen:
            table = transform(table, costs, chosen=chosen)
    return table


def scales(plain: Schedule, costs: Costs, memory: Memory) -> Weigh:
    """Return a function that takes choices and returns the table's `Weight` under them.

    Choices are {(stage, microbatch or slice): offload or recompute}. Other activations are held.

    Args:
        plain: the table without offload and recomputation.
        costs: times and activation memory of the passes.
        memory: limit on the activation of a rank, in the unit of `costs`: one number for all ranks,
            or one for each.
    """
    code = library()
    limits = by_rank(memory, len(plain.ranks))
    # The C code knows F, B, W and BW in steps of one pass. Other tables go by the clock.
    paired = any(len(step) > 1 for step in plain.steps())
    if code is None or not plain.kinds <= {*LAYERS} or paired:
        return partial(_simulated, plain, costs, limits)
    return _compiled(code, plain, costs, limits)


def _simulated(plain: Schedule, costs: Costs, limits: Sequence[float], choices: Choices) -> Weight:
    """Return time and memory of the table with these choices, by building the table.

    Args:
        plain: the table without offload and recomputation.
        limits: limit on each rank's activation.
        choices: {(stage, microbatch or slice): offload or recompute}.
    """
    time = simulate(applied(plain, choices, costs), costs)
    forwards = [forward_of(plain, place) for place in places(plain)]
    over = []
    for curve, limit in zip(time.curves, limits, strict=True):
        over.append(next((at for at, held in curve if held > limit * HAIR), inf))
    return Weight(
        time.makespan,
        [time.start[f] for f in forwards],
        [time.end[f] for f in forwards],
        [time.start[_user(time, f)] for f in forwards],
        time.peak,
        over,
    )


def _user(time: Timeline, f: Pass) -> Pass:
    """Return the backward of the forward `f`: B if the table has it split, else BW.

    `time` has the passes of the table.
    """
    b = f._replace(kind=Kind.B)
    if b in time.start:
        return b
    return f._replace(kind=Kind.BW)


class _Moved(ctypes.Structure):
    # The same fields in the same order as in weigh.c.
    _fields_ = c_fields(
        "int ranks places",
        "int* row next prev earlier later last",
        "double* time lag_next lag_prev mem_b mem_w mem_o mem_r before own limits",
    )


class _Places:
    """The places of a table as lists for the C code. A place is a (stage, microbatch or slice).

    `every` lists the places, and `number` has the index of each in it. Each method returns a list
    with one value for each place, in the same order. If a value is itself a place, it is the index
    of that place.

    Args:
        plain: the table without offload and recomputation.
        costs: the costs of the passes.
    """

    def __init__(self, plain: Schedule, costs: Costs) -> None:
        self.plain = plain
        self.costs = costs
        self.every = places(plain)
        self.number = {one: x for x, one in enumerate(self.every)}
        self.forwards = [forward_of(plain, one) for one in self.every]
        self.by_part = {}
        for part in (*plain.parts, None):
            self.by_part[part] = costs.of_slice(plain.cuts, part)

    def near(self, step: Callable[[int], int | None]) -> list[int]:
        """Return, for each place, the index in `every` of its neighbour; -1 if it has none.

        The neighbour is the same microbatch or slice on the stage that `step` returns.

        Args:
            step: takes a stage and returns its neighbour; None if it has none.
        """
        found = []
        for f in self.forwards:
            to = step(f.stage)
            place = -1
            if to is not None:
                place = self.number[to, self.plain.number(f)]
            found.append(place)
        return found

    def lags(self, to: Sequence[int]) -> list[float]:
        """Return, for each place, the time of its message to another place; 0 for no message.

        Args:
            to: for each place, the index of the other place in `every`; -1 for no message.
        """
        rank_of = self.plain.placement.rank_of
        found = []
        for f, x in zip(self.forwards, to, strict=True):
            lag = 0.0
            if x >= 0:
                there = rank_of[self.every[x][0]]
                lag = self.costs.lag(rank_of[f.stage], there, len(self.plain.ranks))
            found.append(lag)
        return found

    def slice_at(self, by: int) -> list[int]:
        """Return, for each place, the place `by` slices later in its document; -1 if none."""
        found = []
        for x, f in enumerate(self.forwards):
            there = -1
            # Slices of a microbatch are consecutive places.
            if self.plain.cuts and (f.slice or 0) + by in self.plain.document(f):
                there = x + by
            found.append(there)
        return found

    def last_slices(self) -> list[int]:
        """Return, for each (stage, slice), the index in `every` of the last slice of its document.

        Without slices it is the index of the (stage, microbatch) itself.
        """
        if not self.plain.cuts:
            return [*range(len(self.every))]
        ends = [self.plain.document(f)[-1] - (f.slice or 0) for f in self.forwards]
        return [x + left for x, left in enumerate(ends)]

    def durations(self) -> list[float]:
        """Return the durations of the passes at all places, kind after kind of `_KINDS`."""
        place = self.plain.placement
        duration = {part: costs.durations(place) for part, costs in self.by_part.items()}
        parts = [self.plain.part(f) for f in self.forwards]
        both = [*zip(parts, self.forwards, strict=True)]
        return [duration[part][kind][f.stage] for kind in _KINDS for part, f in both]

    def memory(self, letter: str) -> list[float]:
        """Return, for each place, the value of the costs field `mem_<letter>`."""
        place = self.plain.placement
        fields = {p: costs.by_stage(f"mem_{letter}", place) for p, costs in self.by_part.items()}
        return [fields[self.plain.part(f)][f.stage] for f in self.forwards]


def _compiled(code: ctypes.CDLL, plain: Schedule, costs: Costs, limits: Sequence[float]) -> Weigh:
    """Return the function that `scales` returns, with the C code in it.

    Args:
        code: the compiled library.
        plain: the table without offload and recomputation.
        limits: limit on each rank's activation.
    """
    of = _Places(plain, costs)
    place = plain.placement
    n = len(of.every)
    ranks = len(plain.ranks)
    gradients = gradients_of_keys(plain, costs)

    def of_keys(starts: bool) -> Sequence[float]:
        """Return, for each place, the change of memory of the gradients of keys in its backward.

        Args:
            starts: the change at the start of the backward; otherwise the change at its end.
        """
        if gradients is None:
            return [0.0] * n
        return [abs(gradients(f, starts)) for f in of.forwards]

    after = of.near(place.next)
    before = of.near(place.prev)
    table = _Moved(
        ranks,
        n,
        ints([0, *accumulate(map(len, plain.ranks))]),
        *map(ints, (after, before, of.slice_at(-1), of.slice_at(1), of.last_slices())),
        *map(doubles, (of.durations(), of.lags(after), of.lags(before))),
        *(doubles(of.memory(letter)) for letter in "bwor"),
        *map(doubles, (of_keys(True), of_keys(False))),
        doubles([limit * HAIR for limit in limits]),
    )
    # Kind and place in one number, as the C code reads them.
    passes = [item for row in plain.ranks for (item,) in row]
    order = ints([_KINDS.index(x.kind) * n + of.number[x.stage, plain.number(x)] for x in passes])
    # The C code writes made, done and used of each place, then peak and over of each rank.
    seen = doubles([0.0] * (3 * n + 2 * ranks))
    code.weigh.restype = ctypes.c_double
    # Verbs have numbers in the order of `Verb`; hold is 0, what a new array has.
    numbers = {verb: number for number, verb in enumerate(Verb)}

    def weigh(choices: Choices) -> Weight:
        verbs = (ctypes.c_int * n)()
        for one, verb in choices.items():
            verbs[of.number[one]] = numbers[verb]
        makespan = code.weigh(ctypes.byref(table), order, verbs, seen)
        if makespan < 0:
            raise ScheduleError(
                f"{plain.name} cannot proceed with its copies. Take another schedule."
            )
        by_place = seen[:n], seen[n : 2 * n], seen[2 * n : 3 * n]
        of_ranks = seen[3 * n :]
        return Weight(makespan, *by_place, of_ranks[:ranks], of_ranks[ranks:])

    return weigh
