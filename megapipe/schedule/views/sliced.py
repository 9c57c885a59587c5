"""A schedule of the catalogue or of a file with its microbatches in slices, and what is said of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial

from megapipe.errors import ScheduleError
from megapipe.schedule.catalogue import SCHEDULES, build, is_file
from megapipe.schedule.costs import Costs
from megapipe.schedule.memory.held import memory_steps
from megapipe.schedule.passes import Schedule
from megapipe.schedule.patterns import SLICED
from megapipe.schedule.search.auto import Candidate, placements
from megapipe.schedule.search.sliced import fastest_slices
from megapipe.schedule.simulate import run_clock, simulate
from megapipe.schedule.text import load
from megapipe.schedule.transforms.cuts import Cutting, shares
from megapipe.schedule.transforms.slices import in_place, slices
from megapipe.schedule.verify import verify
from megapipe.schedule.views.draw import short

_EFFORT = 4.0
"""The effort of a search, about seconds of a core."""


def most_keys(schedule: Schedule, costs: Costs) -> tuple[float, float]:
    """The most that a rank holds of keys and values, and of them and their gradients, in those of a microbatch."""
    # Numbers of stages and plain ones do not mix, so all that say what moves are plain here.
    counted = replace(
        costs,
        mem_b=1.0,
        mem_w=0.0,
        mem_s=0.0,
        mem_k=1.0,
        wide_k=1.0,
        mem_o=None,
        mem_r=0.0,
        mem_a=0.0,
        mem_g=0.0,
        o=0.0,
        l=0.0,
    )
    clock = run_clock(schedule, costs)

    def most(*, without_gradients: bool) -> float:
        curves = memory_steps(schedule, counted, clock, without_gradients=without_gradients)
        return max(held for curve in curves for _, held, _ in curve)

    return most(without_gradients=True), most(without_gradients=False)


def references(
    name: str, ranks: int | None, microbatches: int | None, costs: Costs, *, cutting: Cutting, chunks: int | None = None
) -> dict[str, Schedule]:
    """Tables that one in slices is measured against: of one document, if it has several, and of no slices. None of one
    that was searched."""
    if name.lower() in SCHEDULES and SCHEDULES[name.lower()].searched:
        return {}
    size = ranks, microbatches, costs
    one = whole = None
    if cutting.documents > 1:
        one, _ = told_slices(name, *size, cutting=replace(cutting, documents=1), chunks=chunks)
    if is_file(name):
        whole = load(name)
    elif name.lower() not in SLICED and ranks and microbatches:
        whole = build(name, ranks, microbatches, chunks=chunks, costs=costs)
    return {what: table for what, table in (("in one document", one), ("undivided", whole)) if table}


def told_keys(table: Schedule, others: Mapping[str, Schedule], costs: Costs) -> str:
    """A line on the keys and values that a table in slices holds, and on those of others, by what they are."""
    alone, both = most_keys(table, costs)
    line = f"keys and values: a rank holds at most {short(alone)} of a microbatch, with their gradients {short(both)}"
    for what, other in others.items():
        its = most_keys(other, costs)
        parts = " and ".join(f"{x / y:.2f}" for x, y in zip((alone, both), its, strict=True))
        line += f"; {what} {short(its[0])} and {short(its[1])}, of which this is {parts}"
    return line


def told_slices(
    name: str,
    ranks: int | None,
    microbatches: int | None,
    costs: Costs,
    *,
    cutting: Cutting,
    chunks: int | None = None,
    memory: float | None = None,
) -> tuple[Schedule, list[str]]:
    """The table, and the lengths of its slices in words.

    Raises: ScheduleError for a schedule that cannot be cut so, and where none keeps to the memory.
    """
    count, how, documents = cutting.count, cutting.how, cutting.documents
    begins, cuts = cutting.begins, shares(count, how, costs, documents)
    said = [f"slices, {how}: {' '.join(f'{cut:.1%}' for cut in cuts)} of the sequence"]
    said[0] += f", {documents} documents" if documents > 1 else ""
    if is_file(name):
        return in_place(load(name), cuts, begins), said
    if ranks is None or microbatches is None:
        raise ScheduleError(f"show {name} --slices needs --pp and --microbatches, such as --pp 4 --microbatches 8")

    def made_for(number: int) -> Schedule:
        return build(name, ranks, number, chunks=chunks, costs=costs)

    if name.lower() in SCHEDULES and SCHEDULES[name.lower()].searched:
        size = microbatches, cuts
        room = memory or max(
            simulate(slices(partial(build, "1f1b", ranks), *size, costs, documents=begins), costs).peak
        )
        shapes = placements(ranks, microbatches, None, chunks, costs, "makespan")
        candidates = [Candidate(place, costs, (room,) * ranks) for place in shapes]
        return fastest_slices(candidates, *size, documents=begins, effort=_EFFORT), said
    if name.lower() in SLICED:
        if begins:
            raise ScheduleError(f"{name} has slices of its own. Leave out --documents, or take 1f1b or interleaved.")
        table = replace(build(name, ranks, microbatches, chunks=chunks, slices=count), cuts=cuts)
        verify(table, memory=memory, costs=costs)
        return table, said
    try:
        return slices(made_for, microbatches, cuts, costs, memory=memory, documents=begins), said
    except ScheduleError as error:
        places = f"its {microbatches} microbatches are {count * microbatches} in slices" if count > 1 else ""
        raise ScheduleError(
            f"{error} ({places})" if f"got {count * microbatches}" in str(error) else str(error)
        ) from None
