"""List the families of passes that run. A new one is a file here and a place in the list."""

from __future__ import annotations

from megapipe.pipeline_parallel.families.offload import OFFLOAD
from megapipe.pipeline_parallel.families.replicas import REPLICAS
from megapipe.pipeline_parallel.families.sharding import SHARDING
from megapipe.pipeline_parallel.families.step import STEP
from megapipe.pipeline_parallel.families.vocabulary import VOCABULARY
from megapipe.pipeline_parallel.passes.begin import LAYERS, Begin
from megapipe.schedule import Kind

FAMILIES = STEP, OFFLOAD, SHARDING, VOCABULARY, REPLICAS
_BEGINS = LAYERS, *(family.begin for family in FAMILIES)
PASSES: dict[Kind, Begin] = {kind: begin[kind] for begin in _BEGINS for kind in begin}
"""How a pass of each kind begins."""
