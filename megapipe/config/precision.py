"""Number types of a run, and the loss scale."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from megapipe.config.notes import ABOVE_0, FREE, FROM_1, NAMED, Idle, demands, excludes
from megapipe.config.parallel.ranks import REPLICAS

SCALE_MOVES = Idle(
    lambda c: not c.precision.dynamic_loss_scale,
    "the scale does not move, without a dynamic loss scale (--fp16 without --loss-scale)",
)


@dataclass(frozen=True)
class PrecisionConfig:
    """Number types and the loss scale. FP8 is among the model's flags, types of the optimizer's
    state among the optimizer's."""

    # FREE on --load: the tensors of a checkpoint say their types.
    bf16: Annotated[
        bool, FREE, excludes("fp16", "{} and {} are two types for the same weights")
    ] = False
    """Compute in bfloat16. Gradients, main parameters and optimizer state stay float32. Default:
    compute in float32."""
    fp16: Annotated[bool, FREE] = False
    """Compute in float16 with a loss scale. Gradients, main parameters and optimizer state stay
    float32."""
    loss_scale: Annotated[float | None, ABOVE_0, NAMED] = None
    """Factor on the loss before backward, by which the gradient is divided again. Default: dynamic
    with --fp16, else 1."""
    # High on purpose: overflows of the first steps halve it to the largest scale that fits.
    initial_loss_scale: Annotated[float, ABOVE_0, FREE, SCALE_MOVES] = 2.0**32
    """Dynamic loss scale at the start."""
    min_loss_scale: Annotated[float, ABOVE_0, NAMED, SCALE_MOVES] = 1.0
    """Smallest dynamic loss scale."""
    loss_scale_window: Annotated[float, FROM_1, NAMED, SCALE_MOVES] = 1000.0
    """Number of steps without overflow after which the dynamic loss scale is doubled."""
    hysteresis: Annotated[int, FROM_1, NAMED, SCALE_MOVES] = 2
    """Overflow, counted from the last doubling, from which on every overflow halves the dynamic
    loss scale. 1: every overflow does."""
    # NAMED on --load: other sums, and so other numbers.
    grad_reduce_in_bf16: Annotated[bool, NAMED, REPLICAS, demands("bf16")] = False
    """Sum gradients over data-parallel ranks in bfloat16, which halves the bytes and loses three
    digits. Microbatches are still added in float32."""
    deterministic_mode: Annotated[bool, FREE] = False
    """Refuse kernels whose results differ from run to run."""

    @property
    def half(self) -> bool:
        """Return whether weights and activations have 16 bits."""
        return self.bf16 or self.fp16

    @property
    def element_bytes(self) -> int:
        """Bytes of a weight or an activation."""
        return 2 if self.half else 4

    @property
    def dynamic_loss_scale(self) -> bool:
        """Return whether the loss scale falls after overflows and rises again."""
        return self.fp16 and self.loss_scale is None
