"""The table of a case: of the catalogue or drawn, in slices, with pairs."""

from __future__ import annotations

from contextlib import suppress
from functools import lru_cache
from typing import Any

from megapipe.schedule import Costs, Schedule, ScheduleError, build
from megapipe.schedule.catalogue import entry_of
from megapipe.schedule.shapes.pairs.pairs import pairs
from megapipe.schedule.shapes.slices.slices import in_place
from megapipe.schedule.shapes.slices.slices import slices as in_slices
from tools.proofs.tables.drawn import drawn_table


@lru_cache(maxsize=256)
def built(
    name: str,
    pp: int,
    microbatches: int,
    *,
    chunks: int | None,
    drawn: int | None,
    paired: bool,
    slices: tuple[int, ...],
) -> Schedule:
    """The table that a case's fields of these names say. Raises: ScheduleError if there is none for
    these numbers.
    """
    options: dict[str, Any] = {"effort": 0.1} if entry_of(name).searched else {}

    def whole(count: int) -> Schedule:
        return (
            build(name, pp, count, chunks=chunks, **options)
            if drawn is None
            else drawn_table(drawn, pp, count)
        )

    if slices:
        in_places = drawn is not None or options
        return (
            in_place(whole(microbatches), slices)
            if in_places
            else in_slices(whole, microbatches, slices)
        )
    schedule = whole(microbatches)
    if paired:
        with suppress(ScheduleError):  # no pair would pay
            schedule = pairs(
                schedule, Costs(1, 1.1, 0.8, link_f=0.3, link_b=0.3, link_w=0.3), tries=6
            )
    return schedule
