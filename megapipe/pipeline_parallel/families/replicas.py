"""Copy the state of a stage to a peer (P), by a function of the trainer, see `Weights`."""

from __future__ import annotations

from megapipe.pipeline_parallel.families.family import Family
from megapipe.pipeline_parallel.passes.begin import Begun, weights_of
from megapipe.schedule import Kind

REPLICAS = Family("replicas", {Kind.P: lambda stage, _, __: Begun(weights_of(stage).copy())})
