"""The settings of offload and recomputation."""

from __future__ import annotations

from dataclasses import dataclass
from math import inf

from megapipe.schedule.families.offload.solve import FEW_TRIES
from megapipe.schedule.passes import Schedule


@dataclass(frozen=True)
class Offload:
    """Settings of activations that are offloaded to the host (O, L) or recomputed (R).

    Attributes:
        when: "all" offloads whatever returns in time. "fits" holds, offloads or recomputes,
            whichever is fastest within the memory. "needed" is "fits" for a table that does
            not fit; any other table stays, unless `any_order` finds a faster one.
        any_order: with "needed", also search other orders of the same stages.
        chunks: with "all", offload only this many first stages of each rank; None for all.
        switch: with "all", this many neighbouring ranks share the copies to the host; None if no
            ranks do.
        tries: number of single choices that "fits" changes; None for as many as take half a second.
        most: with "fits", the longest makespan of interest, in the time unit of the costs.
        other: tables that "fits" may choose instead of the given one.
    """

    # The default takes no time: it offloads only activations that return before their backward.
    when: str = "all"
    any_order: bool = False
    chunks: int | None = None
    switch: int | None = None
    tries: int | None = FEW_TRIES
    most: float = inf
    other: tuple[Schedule, ...] = ()
