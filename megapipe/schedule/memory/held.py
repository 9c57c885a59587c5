"""The activation that ranks hold while a table runs, and the weights and gradients that are whole for a while."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Protocol

from megapipe.schedule.costs import Costs
from megapipe.schedule.kinds import Kind, Lane
from megapipe.schedule.passes import Part, Pass, Schedule
from megapipe.schedule.weights.runs import GATHERS, REDUCES, lives

Held = dict[tuple[Kind, Part | None], list[float]]
"""Changes of what a rank holds, by kind and part of a microbatch, of each stage."""


class _Clock(Protocol):
    @property
    def start(self) -> list[list[float]]: ...
    @property
    def end(self) -> list[list[float]]: ...


def memory_steps(
    schedule: Schedule, costs: Costs, clock: _Clock, *, without_gradients: bool = False
) -> list[list[tuple[float, float, int]]]:
    """Rows of (time, activation held from then on, the step that makes it so) for each rank, in order of time.

    without_gradients: of keys, which are held for slices in flight.
    """
    # What a pass holds it takes when it starts, and what it frees is free when it ends: a peak counts both.
    takes, gives = _changes(schedule, costs)
    sharded = not schedule.kinds.isdisjoint(GATHERS | REDUCES)
    beside = sharded or any(kind.traits.lane is not Lane.COMPUTE for kind, _ in (*takes, *gives))
    again, part = computed_again(schedule), schedule.part
    inputs = {of: costs.of_slice(schedule.cuts, of).memory(schedule.placement)[4] for of in (*schedule.parts, None)}
    gradients = None if without_gradients else gradients_of_keys(schedule, costs)
    curves = []
    for rank, steps in enumerate(schedule.ranks):
        moments: list[tuple[float, float, int]] = []
        for i, (step, start, end) in enumerate(zip(steps, clock.start[rank], clock.end[rank], strict=True)):
            for moment, change in ((start, takes), (end, gives)):
                for item in step:
                    kind, stage, _, piece = item
                    key = kind, None if piece is None else part(item)
                    if key in change:
                        less = again and kind.is_forward and (stage, schedule.number(item)) in again
                        moments.append((moment, inputs[key[1]][stage] if less else change[key][stage], i))
                    if gradients and kind.is_backward:
                        moments.append((moment, gradients(item, change is takes), i))
        if sharded:
            moments += _whole(schedule, costs, clock, rank)
        if beside:  # copies end while passes run; of one time the order of the row
            moments.sort(key=lambda moment: (moment[0], moment[2]))
        held, curve = 0.0, list[tuple[float, float, int]]()
        for at, size, i in moments:
            held += size
            curve.append((at, held, i))
        curves.append(curve)
    return curves


def _whole(schedule: Schedule, costs: Costs, clock: _Clock, rank: int) -> Iterator[tuple[float, float, int]]:
    """Times, sizes and steps of the weights and gradients that are whole for a while."""
    place = schedule.placement
    *_, weights, gradients = costs.memory(place)
    end, begun, free = clock.end[rank], list[float](), 0.0
    for step, starts, ends in zip(schedule.ranks[rank], clock.start[rank], end, strict=True):
        computes = step[0].kind.traits.lane is Lane.COMPUTE
        # A step beside is begun where it stands in the row, though its lane may have to end another first.
        begun.append(starts if computes else free)
        free = ends if computes else free
    own = place.stages_on(rank)
    borrow = {stage for stage in own if costs.lent(stage, place)}
    lender = next((stage for stage in own if place.is_first(stage)), -1) if borrow else -1
    of_first = list[tuple[_Moment, _Moment]]()
    for kind, stage, first, last, waits in lives(schedule, rank):
        takes = begun[first], first
        gives = max(end[last], begun[waits] if waits >= 0 else 0.0), max(last, waits)
        first_too = kind is Kind.AF and bool(borrow) and stage in {lender, *borrow}
        if first_too:
            of_first.append((takes, gives))
        if stage != lender or not first_too:
            size = (weights if kind is Kind.AF else gradients)[stage]
            yield takes[0], size, takes[1]
            yield gives[0], -size, gives[1]
    for (taken, first), (given, last) in _united(of_first):
        yield taken, weights[lender], first
        yield given, -weights[lender], last


_Moment = tuple[float, int]
"""A time, and the step of a row."""


def _united(whiles: list[tuple[_Moment, _Moment]]) -> list[tuple[_Moment, _Moment]]:
    """The times in which any of some is."""
    found: list[tuple[_Moment, _Moment]] = []
    for takes, gives in sorted(whiles):
        if found and takes < found[-1][1]:
            found[-1] = found[-1][0], max(found[-1][1], gives)
        else:
            found.append((takes, gives))
    return found


def computed_again(schedule: Schedule) -> frozenset[tuple[int, int]]:
    """Stages and microbatches, or slices among all, whose forward runs twice."""
    again = {kind for kind in schedule.kinds if kind.traits.again}
    if not again:
        return frozenset()
    every = (x for row in schedule.ranks for step in row for x in step)
    return frozenset((x.stage, schedule.number(x)) for x in every if x.kind in again)


def _changes(schedule: Schedule, costs: Costs) -> tuple[Held, Held]:
    """Changes by a pass: what it takes when it starts, and what it gives back when it ends."""
    takes: Held = {}
    gives: Held = {}
    for part in (*schedule.parts, None):  # passes of a stage as a whole are of no part
        by_stage = list(zip(*costs.of_slice(schedule.cuts, part).memory(schedule.placement), strict=True))
        for kind in schedule.kinds:
            counts = kind.traits.memory
            if counts:
                change = [sum(n * size for n, size in zip(counts, sizes, strict=False)) for sizes in by_stage]
                (takes if next(filter(None, counts)) > 0 else gives)[kind, part] = change
    return takes, gives


def gradients_of_keys(schedule: Schedule, costs: Costs) -> Callable[[Pass, bool], float] | None:
    """Gradients of the keys of a document's slices: the backward of the last takes them for all before it, which each
    of theirs gives back. None where they count nothing."""
    place = schedule.placement
    if not schedule.cuts or not any(keys := [costs.keys(s, place) for s in range(place.num_stages)]):
        return None

    def change(item: Pass, starts: bool) -> float:
        document, piece = schedule.document(item), item.slice or 0
        of = (document[:-1] if piece == document[-1] else ()) if starts else (piece,) * (piece != document[-1])
        part = sum(schedule.cuts[n] for n in of) / sum(schedule.cuts) * keys[item.stage]
        return part if starts else -part

    return change
