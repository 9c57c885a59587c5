"""The rest of a step: G, A, U and V of a stage as a whole, which whoever trains it does."""

from __future__ import annotations

from megapipe.pipeline_parallel.families.family import Family
from megapipe.pipeline_parallel.passes.begin import AGAIN, Begun, weights_of
from megapipe.schedule import Kind

STEP = Family(
    "step",
    {
        Kind.G: lambda stage, _, __: Begun(weights_of(stage).reduce()),
        Kind.A: lambda stage, _, __: Begun(weights_of(stage).gather()),
        Kind.U: lambda stage, _, __: stage.weights.update(),
        Kind.V: lambda stage, _, __: AGAIN if stage.weights.validate() else None,
    },
)
