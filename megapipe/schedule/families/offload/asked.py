"""The settings of offload and recomputation."""

from __future__ import annotations

from dataclasses import dataclass
from math import inf

from megapipe.schedule.families.offload.solve import FEW_TRIES
from megapipe.schedule.passes import Schedule


@dataclass(frozen=True)
class Offload:
    """Settings for activations that are offloaded to the host (O, L) or recomputed (R).

    Attributes:
        when: "all" offloads every activation that can be back in time. "fits" holds, offloads or
            recomputes each, whichever is fastest within the memory. "needed" leaves a table that
            fits the memory as it is, and does the same as "fits" for any other.
        any_order: with "needed", also search other orders of the same stages. One of them may then
            replace a table that fits, if it is faster.
        chunks: with "all", offload only for the first `chunks` stages of each rank; None for all.
        switch: with "all", the number of neighbouring ranks that share one connection to the host,
            such as a PCIe switch; None for no sharing.
        tries: number of random changes that "fits" tries, each of one or two activations' choices;
            None for as many as take half a second.
        most: with "fits", the longest makespan that is allowed, in the time unit of the costs.
        other: tables with other orders that "fits" may choose instead of the given one.
    """

    # The default takes no time: it offloads only activations that return before their backward.
    when: str = "all"
    any_order: bool = False
    chunks: int | None = None
    switch: int | None = None
    tries: int | None = FEW_TRIES
    most: float = inf
    other: tuple[Schedule, ...] = ()
