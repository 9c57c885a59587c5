"""Types of numbers and the loss scale."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from megapipe.config.notes import ABOVE_0, FREE, NAMED, Idle, at_least, demands, excludes
from megapipe.config.parallel import REPLICAS

SCALE_MOVES = Idle(
    lambda c: not c.precision.dynamic_loss_scale,
    "the scale does not move, without a dynamic loss scale (--fp16 without --loss-scale)",
)


@dataclass(frozen=True)
class PrecisionConfig:
    """Types of numbers, loss scale. For FP8 see the model's flags, for the types of moments the optimizer's."""

    # The tensors of a checkpoint say their types.
    bf16: Annotated[bool, FREE, excludes("fp16", "{} and {} are two types for the same weights")] = False
    """Compute in bfloat16; gradients, main parameters and optimizer state stay float32."""
    fp16: Annotated[bool, FREE] = False
    """Compute in float16 with a loss scale; gradients, main parameters and optimizer state stay float32."""
    loss_scale: Annotated[float | None, ABOVE_0, NAMED] = None
    """Multiply the loss by this before backward, and divide the gradient. Default: with --fp16 dynamic, else 1."""
    initial_loss_scale: Annotated[float, ABOVE_0, FREE, SCALE_MOVES] = 2.0**32
    """First dynamic loss scale."""
    min_loss_scale: Annotated[float, ABOVE_0, NAMED, SCALE_MOVES] = 1.0
    """Least dynamic loss scale."""
    loss_scale_window: Annotated[float, at_least(1), NAMED, SCALE_MOVES] = 1000.0
    """Steps without overflow after which the dynamic loss scale is doubled."""
    hysteresis: Annotated[int, at_least(1), NAMED, SCALE_MOVES] = 2
    """Overflows between two increases at which the dynamic loss scale begins to be halved."""
    grad_reduce_in_bf16: Annotated[bool, NAMED, REPLICAS, demands("bf16")] = False
    """Sum gradients over data-parallel ranks in bfloat16: half the bytes, three digits less. Added up in float32."""
    deterministic_mode: Annotated[bool, FREE] = False
    """Refuse kernels whose results differ from run to run."""

    @property
    def half(self) -> bool:
        """Weights and activations have 16 bits."""
        return self.bf16 or self.fp16

    @property
    def element_bytes(self) -> int:
        """Bytes of a weight or an activation."""
        return 2 if self.half else 4

    @property
    def dynamic_loss_scale(self) -> bool:
        return self.fp16 and self.loss_scale is None
