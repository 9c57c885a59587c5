"""The rest of a step: reduce gradients (G), update (U), gather weights (A), validate it in the next step (V)."""

from __future__ import annotations

from dataclasses import dataclass

from megapipe.schedule.families.family import Family, PerStage
from megapipe.schedule.kinds import Kind


@dataclass(frozen=True, kw_only=True)
class StepCosts:
    """What the passes of a stage as a whole take.

    Attributes:
        g, u, a, v: reduce gradients, update, gather weights, validate the update.
    """

    g: PerStage = 0.0
    u: PerStage = 0.0
    a: PerStage = 0.0
    v: PerStage = 0.0


STEP = Family("step", frozenset({Kind.G, Kind.U, Kind.A, Kind.V}))
