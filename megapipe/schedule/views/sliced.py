"""A schedule of the catalogue or of a file with its microbatches in slices, and what is said of it."""

from __future__ import annotations

from megapipe.errors import ScheduleError
from megapipe.schedule.catalogue import SCHEDULES, build, is_file
from megapipe.schedule.costs import Costs
from megapipe.schedule.passes import Schedule
from megapipe.schedule.text import load
from megapipe.schedule.transforms.cuts import shares
from megapipe.schedule.transforms.slices import in_place, slices


def in_slices(
    name: str, ranks: int, microbatches: int, costs: Costs, *, count: int, chunks: int | None = None
) -> Schedule:
    """The table in slices of equal work. Raises: ScheduleError as `told_slices`."""
    return told_slices(name, ranks, microbatches, costs, count=count, how="work", chunks=chunks, memory=None)[0]


def told_slices(
    name: str,
    ranks: int | None,
    microbatches: int | None,
    costs: Costs,
    *,
    count: int,
    how: str,
    chunks: int | None,
    memory: float | None,
) -> tuple[Schedule, list[str]]:
    """The table, and the lengths of its slices in words.

    Args:
        count, how: slices of a microbatch, and how they are cut, of `cuts.CUTS`.
    Raises: ScheduleError for a schedule that cannot be cut so, and where none keeps to the memory.
    """
    cuts = shares(count, how, costs)
    said = [f"slices, {how}: {' '.join(f'{cut:.1%}' for cut in cuts)} of the sequence"]
    if is_file(name):
        return in_place(load(name), cuts), said
    if name.lower() in SCHEDULES and SCHEDULES[name.lower()].searched:
        raise ScheduleError(f"{name} is searched for whole microbatches. Cut another, such as zb-h1 --slices {count}")
    if ranks is None or microbatches is None:
        raise ScheduleError(f"show {name} --slices needs --pp and --microbatches, such as --pp 4 --microbatches 8")

    def made_for(number: int) -> Schedule:
        return build(name, ranks, number, chunks=chunks, costs=costs)

    try:
        return slices(made_for, microbatches, cuts, costs, memory=memory), said
    except ScheduleError as error:
        places = f"its {microbatches} microbatches are {count * microbatches} in slices" if count > 1 else ""
        raise ScheduleError(
            f"{error} ({places})" if f"got {count * microbatches}" in str(error) else str(error)
        ) from None
