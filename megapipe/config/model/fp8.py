"""Matrix products of linear layers in eight bits: in which layers, and with which scales."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from megapipe.config.notes import FREE, FROM_0, LISTED, Idle, Range, needs

FP8 = needs("fp8_format", "products have the type of the weights")
DELAYED = needs("fp8_recipe", "scales follow from the step itself", "delayed")
SHARED_SCALES = Idle(
    lambda c: c.model.fp8_format is not None and c.model.fp8_recipe in ("delayed", "tensorwise"),
    "rows of a layer in FP8 share a scale and are multiplied at once, "
    "with --fp8-recipe delayed or tensorwise",
)
ENDS = needs("first_last_layers_bf16", "FP8 is used in all layers")
MARGIN = Range("at least 0 and at most 16", lambda v: 0 <= v <= 16)


@dataclass(frozen=True)
class FP8Config:
    """Linear layers that quantise their operands to eight bits.

    Without --fp8-format these flags do nothing.
    """

    # FREE on --load: the weights of a checkpoint are not quantised.
    fp8_format: Annotated[Literal["e4m3", "hybrid"] | None, FREE] = None
    """Multiply in FP8 in the linear layers of attention, MLP and experts. e4m3: all operands.
    hybrid: gradients in e5m2, the rest in e4m3. Default: no FP8."""
    fp8_recipe: Annotated[Literal["delayed", "tensorwise", "blockwise", "mxfp8"], FREE, FP8] = (
        "delayed"
    )
    """What shares one scale, and where it comes from. tensorwise: a tensor, by its largest value.
    delayed: a tensor, by its largest values in earlier steps. blockwise: 128 numbers, in weights
    128 x 128. mxfp8: 32 numbers."""
    fp8_margin: Annotated[int, MARGIN, FREE, FP8, DELAYED] = 0
    """Room above the largest value that is expected: scales are divided by 2 to this power."""
    fp8_amax_history_len: Annotated[int, LISTED, FREE, FP8, DELAYED] = 1
    """Number of recent steps whose largest values are remembered."""
    fp8_amax_compute_algo: Annotated[Literal["most_recent", "max"], FREE, FP8, DELAYED] = (
        "most_recent"
    )
    """Which remembered value sets the scale. most_recent: that step's. max: the largest one."""
    no_fp8_wgrad: Annotated[bool, FREE, FP8] = False
    """Compute weight gradients in the type of the weights instead of FP8."""
    fp8_param_gather: Annotated[
        bool,
        FREE,
        FP8,
        Idle(
            lambda c: not c.parallel.splits_optimizer or c.weight_replicas == 1,
            "no weights are gathered, "
            "without --use-distributed-optimizer on several data-parallel ranks",
        ),
        # A block of mxfp8 lies along the dimension that a product sums over. The forward and the
        # input's gradient sum over different ones, so a weight needs two sets of blocks.
        Idle(
            lambda c: c.model.fp8_recipe == "mxfp8",
            "weights are gathered in their own type, "
            "as blocks of 32 lie along the sum of each of two products, with --fp8-recipe mxfp8",
        ),
    ] = False
    """Gather FP8 weights over data-parallel ranks in eight bits, half the bytes of bf16, and keep
    them so. Results are bitwise equal."""
    first_last_layers_bf16: Annotated[bool, FREE, FP8] = False
    """Leave FP8 out of the first and last layers, see --num-layers-at-start-in-bf16."""
    num_layers_at_start_in_bf16: Annotated[int, FROM_0, FREE, FP8, ENDS] = 1
    """Number of first layers without FP8, with --first-last-layers-bf16."""
    num_layers_at_end_in_bf16: Annotated[int, FROM_0, FREE, FP8, ENDS] = 1
    """Number of last layers without FP8, with --first-last-layers-bf16."""

    def has_fp8_in(self, layer: int, layers: int) -> bool:
        """Return whether the linear layers of a transformer layer multiply in FP8.

        Args:
            layer: the layer's number, from 0.
            layers: the number of layers of the model.
        """
        if self.fp8_format is None:
            return False
        # The numbers of layers may overlap in a small model; a layer is then left out once.
        at_start = layer < self.num_layers_at_start_in_bf16
        at_end = layer >= layers - self.num_layers_at_end_in_bf16
        return not (self.first_last_layers_bf16 and (at_start or at_end))
