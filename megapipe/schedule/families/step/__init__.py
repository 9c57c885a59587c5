"""The rest of a training step: reduce gradients (G), update (U), gather weights (A), validate (V).

V belongs to the next step, where it checks the update of the step before (post-validation, Qi et
al. 2023, "Zero Bubble Pipeline Parallelism", sec. 4).
"""

from __future__ import annotations

from dataclasses import dataclass

from megapipe.schedule.families.family import Family, PerStage
from megapipe.schedule.kinds import Kind


@dataclass(frozen=True, kw_only=True)
class StepCosts:
    """Durations of the passes that run once per step and stage, in the time unit of the costs.

    One number is for a device share, 1/p of the model on p ranks. A tuple has the value of each
    stage.

    Attributes:
        g: reducing the gradients over data parallelism.
        u: updating the weights.
        a: gathering the updated weights.
        v: validating the update.
    """

    # By default the clock knows the passes of microbatches alone.
    g: PerStage = 0.0
    u: PerStage = 0.0
    a: PerStage = 0.0
    v: PerStage = 0.0


STEP = Family("step", frozenset({Kind.G, Kind.U, Kind.A, Kind.V}))
