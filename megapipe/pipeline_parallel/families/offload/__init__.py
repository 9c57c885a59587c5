"""Run the passes that move activations: O copies them to the host, L back, R runs a forward again.

O and L copy the tensors that a forward saved for its backward.
"""

from __future__ import annotations

from collections.abc import Callable

from megapipe.pipeline_parallel.families.family import Family
from megapipe.pipeline_parallel.families.offload.activations import moves_of
from megapipe.pipeline_parallel.families.offload.host import Host
from megapipe.pipeline_parallel.passes.begin import Begun
from megapipe.schedule import Kind

NAME = "offload"


def _copying(copy: Callable[[], None]) -> Begun:
    # An emulated copy has no times: it is a function that waits, and no `Copy`.
    return Begun(copy, getattr(copy, "span", None))


OFFLOAD = Family(
    NAME,
    {
        Kind.O: lambda stage, microbatch, _: _copying(stage.own[NAME].offload(microbatch)),
        Kind.L: lambda stage, microbatch, _: _copying(stage.own[NAME].load(microbatch)),
        Kind.R: lambda stage, microbatch, _: stage.own[NAME].repeat(stage, microbatch),
    },
    keeps=Host,
    stages=moves_of,
)
