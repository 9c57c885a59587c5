"""Tables of drawn cases: with pairs, a shared vocabulary, activations that leave the device or come a second time."""

from __future__ import annotations

from contextlib import suppress
from functools import lru_cache
from typing import Any

from megapipe.schedule import Costs, Schedule, ScheduleError, build
from megapipe.schedule.catalogue import entry_of
from megapipe.schedule.transforms.memory import with_offload, with_recompute
from megapipe.schedule.transforms.pairs import pairs
from megapipe.schedule.transforms.vocabulary import with_vocabulary
from tools.proofs.tables.drawn import drawn_table

# Stages and microbatches, by what is left of their sum when it is divided by 3: on the host meanwhile, computed again.
MOVED: dict[str, tuple[set[int], set[int]]] = {
    "none": (set(), set()),
    "out": ({0, 1, 2}, set()),
    "again": (set(), {0, 1, 2}),
    "some": ({1}, {2}),
}


@lru_cache(maxsize=256)
def moved(schedule: Schedule, memory: str) -> Schedule:
    """The table with O, L and R as MOVED says."""
    out, again = MOVED[memory]
    every = sorted({x[1:3] for row in schedule.ranks for step in row for x in step if x.kind.is_forward})
    if again:
        schedule = with_recompute(schedule, chosen={x for x in every if sum(x) % 3 in again})
    return with_offload(schedule, chosen={x for x in every if sum(x) % 3 in out}) if out else schedule


@lru_cache(maxsize=256)
def built(
    name: str, drawn: int | None, pp: int, microbatches: int, chunks: int | None, vocabulary: bool, paired: bool
) -> Schedule:
    """The table of a case. Raises: ScheduleError if there is none for these numbers."""
    options: dict[str, Any] = {"effort": 0.1} if entry_of(name).searched else {}
    if drawn is None:
        schedule = build(name, pp, microbatches, chunks=chunks, **options)
    else:
        schedule = drawn_table(drawn, pp, microbatches)
    if paired:
        with suppress(ScheduleError):  # no pair would pay
            schedule = pairs(schedule, Costs(1, 1.1, 0.8, link_f=0.3, link_b=0.3, link_w=0.3), tries=6)
    return with_vocabulary(schedule, Costs(s=0.5, t=0.25)) if vocabulary else schedule
