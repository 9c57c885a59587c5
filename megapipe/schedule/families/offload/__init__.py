"""Activations that leave the device: to the host (O) and back (L), or to be computed again (R)."""

from __future__ import annotations

from dataclasses import dataclass

from megapipe.schedule.families.family import Family, PerStage
from megapipe.schedule.families.offload.parts import of_slice
from megapipe.schedule.families.offload.rules import MOVES, inputs, memory_problems


@dataclass(frozen=True, kw_only=True)
class OffloadCosts:
    """What it takes to move activations, and how much of them moves.

    Attributes:
        o, l: copying what a microbatch left to the host, and back.
        mem_o: the part of mem_b that is copied, mem_k first; None: all of it. Of a slice the part without keys; the
            last of a document takes the keys of all of them with it.
        mem_r: what stays instead of mem_b from a forward to the pass that computes it again, its input; of a slice also
            the keys, for those behind it.
    """

    o: PerStage = 0.0
    l: PerStage = 0.0
    mem_o: PerStage | None = None
    mem_r: PerStage = 0.0


OFFLOAD = Family("offload", MOVES, problems=memory_problems, instead=inputs, of_slice=of_slice)
