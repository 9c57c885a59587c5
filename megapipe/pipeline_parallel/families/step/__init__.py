"""Run the passes of a stage's weights at the end of a step: G, A, U and V.

G reduces gradients, U updates weights, A gathers them, and V validates the update of the step
before. The trainer gives the functions that do so, see `Weights`. Layers may report earlier that
their gradients are complete.
"""

from __future__ import annotations

from megapipe.pipeline_parallel.families.family import Family
from megapipe.pipeline_parallel.families.step.layers import stages_of
from megapipe.pipeline_parallel.passes.begin import AGAIN, Begun, weights_of
from megapipe.schedule import Kind

STEP = Family(
    "step",
    {
        Kind.G: lambda stage, _, __: Begun(weights_of(stage).reduce()),
        Kind.A: lambda stage, _, __: Begun(weights_of(stage).gather()),
        Kind.U: lambda stage, _, __: stage.weights.update(),
        # V is true if the update was wrong: the forwards since then run again on mended weights.
        Kind.V: lambda stage, _, __: AGAIN if stage.weights.validate() else None,
    },
    stages=stages_of,
)
