"""A schedule of the catalogue or of a file with its microbatches in slices, and what is said of it."""

from __future__ import annotations

from dataclasses import replace

from megapipe.errors import ScheduleError
from megapipe.schedule.catalogue import SCHEDULES, build, is_file
from megapipe.schedule.costs import Costs
from megapipe.schedule.passes import Schedule
from megapipe.schedule.patterns import SLICED
from megapipe.schedule.text import load
from megapipe.schedule.transforms.cuts import Cutting, shares
from megapipe.schedule.transforms.slices import in_place, slices
from megapipe.schedule.verify import verify


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
    if name.lower() in SCHEDULES and SCHEDULES[name.lower()].searched:
        raise ScheduleError(f"{name} is searched for whole microbatches. Cut another, such as zb-h1 --slices {count}")
    if ranks is None or microbatches is None:
        raise ScheduleError(f"show {name} --slices needs --pp and --microbatches, such as --pp 4 --microbatches 8")

    def made_for(number: int) -> Schedule:
        return build(name, ranks, number, chunks=chunks, costs=costs)

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
