"""Activations that wait for their backward in the host's memory."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from megapipe.config.notes import ABOVE_0, FROM_1, UP_TO_1, excludes, needs

Module = Literal[
    "attn_norm", "qkv_linear", "core_attn", "attn_proj", "mlp_norm", "expert_fc1", "moe_act"
]
"""A part of a layer, by Megatron-LM's name."""
NOT_SEARCHED = excludes("reschedule_after", "{}: {} searches tables without copies")
COPIES = needs(
    "fine_grained_activation_offloading cpu_offload memory_limit_gib", "nothing is copied"
)


@dataclass(frozen=True)
class OffloadConfig:
    """Copies of saved activations to the host and back. Default: none."""

    fine_grained_activation_offloading: Annotated[bool, NOT_SEARCHED] = False
    """Copy saved activations to the host until their backward (passes O and L), where they are back
    in time. With --memory-limit-gib copy only what does not fit, or recompute it (R) where that
    is faster."""
    # Saved first means needed last: backward goes the other way, which leaves most time for the way
    # back.
    activation_offload_fraction: Annotated[float, UP_TO_1, COPIES] = 1.0
    """Fraction of each microbatch's saved bytes that is copied to the host, those saved first in
    its forward."""
    offload_modules: Annotated[
        tuple[Module, ...],
        COPIES,
        excludes("compile", "{} names parts of a layer, and {} makes one of several"),
    ] = ()
    """Parts of a layer whose saved inputs are copied. Default: everything that a forward saves."""
    cpu_offload: Annotated[bool, NOT_SEARCHED] = False
    """The same as --fine-grained-activation-offloading, by its name in sail-sg's zero-bubble fork.
    Not in Megatron-LM."""
    offload_chunk_num: Annotated[int | None, FROM_1, needs("cpu_offload", "all stages copy")] = None
    """Number of stages of each rank that copy, the first ones. Default: all. Not in
    Megatron-LM."""
    offload_time: Annotated[float | None, ABOVE_0, COPIES] = None
    """Time of a copy in one direction, in units of a microbatch's forward and backward on a stage.
    Default: its bytes at 62.5 GB/s, against FLOPs at 500 TFLOP/s. Not in Megatron-LM."""
