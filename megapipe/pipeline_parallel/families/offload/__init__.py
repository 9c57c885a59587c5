"""Activations that leave the device: O and L copy what a forward saved, R runs the forward again."""

from __future__ import annotations

from megapipe.pipeline_parallel.families.family import Family
from megapipe.pipeline_parallel.families.offload.activations import moves_of
from megapipe.pipeline_parallel.families.offload.host import Copy, Host
from megapipe.pipeline_parallel.passes.begin import Begun
from megapipe.schedule import Kind

NAME = "offload"


def _copying(wait: Copy) -> Begun:
    return Begun(wait, wait.span if isinstance(wait, Copy) else None)  # an emulated lane only says when it is over


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
