"""What is asked of activations that leave the device."""

from __future__ import annotations

from dataclasses import dataclass
from math import inf

from megapipe.schedule.families.offload.solve import FEW_TRIES
from megapipe.schedule.passes import Schedule


@dataclass(frozen=True)
class Offload:
    """Activations that leave the device, to the host (O, L) or to be computed again (R).

    Attributes:
        when: "all" copies whatever is back in time. "fits" holds, copies or recomputes, whichever is fastest in the
            room. "needed" does so only where the table does not fit, or any order is allowed and it is faster.
        any_order: with "needed": search other orders of the same stages too.
        chunks: with "all": copy for the first stages of each rank alone, this many.
        switch: with "all": this many neighbouring ranks share the way to the host.
        tries: changes of single choices that "fits" tries; most: a makespan that is too long to be of interest.
        other: tables that "fits" may choose in place of the one that was made.
    """

    when: str = "all"
    any_order: bool = False
    chunks: int | None = None
    switch: int | None = None
    tries: int | None = FEW_TRIES
    most: float = inf
    other: tuple[Schedule, ...] = ()
