"""Tables of drawn cases: with pairs, a shared vocabulary, activations that leave the device or come a second time."""

from __future__ import annotations

from functools import lru_cache

from megapipe.schedule import Schedule
from megapipe.schedule.transforms.memory import with_offload, with_recompute

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
