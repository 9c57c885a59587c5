"""Activations that leave the device: offloaded to the host (O) and back (L), or recomputed (R)."""

from __future__ import annotations

from dataclasses import dataclass

from megapipe.schedule.families.family import Family, PerStage
from megapipe.schedule.families.offload.parts import of_slice
from megapipe.schedule.families.offload.rules import MOVES, inputs, memory_problems


@dataclass(frozen=True, kw_only=True)
class OffloadCosts:
    """Time and memory of offloaded and recomputed activations, in the units of the costs.

    A value is for one microbatch. One number is for a device share, 1/p of the model on p ranks. A
    tuple has the value of each stage.

    Attributes:
        o: time of copying the activations to the host.
        l: time of copying them back.
        mem_o: the part of mem_b that is copied; None for all of it. The keys and values (mem_k) are
            copied before other activations. A slice copies its part without keys. The last slice of
            a document also copies the keys of all its slices.
        mem_r: held in place of mem_b from a forward to its recomputation: the input. A slice also
            holds its keys, for later slices.
    """

    # R has no field: it takes as long as F.
    o: PerStage = 0.0
    l: PerStage = 0.0
    mem_o: PerStage | None = None
    mem_r: PerStage = 0.0


OFFLOAD = Family("offload", MOVES, problems=memory_problems, instead=inputs, of_slice=of_slice)
