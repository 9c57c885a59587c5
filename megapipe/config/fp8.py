"""Products of linear layers in eight bits: which layers, and where their scales come from."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from megapipe.config.notes import FREE, LISTED, Idle, Range, at_least, needs

FP8 = needs("fp8_format", "products have the type of the weights")
DELAYED = needs("fp8_recipe", "scales follow from the step itself", "delayed")
SHARED_SCALES = Idle(
    lambda c: c.model.fp8_format is not None and c.model.fp8_recipe in ("delayed", "tensorwise"),
    "rows of a layer in FP8 share a scale and are multiplied at once, with --fp8-recipe delayed or tensorwise",
)
ENDS = needs("first_last_layers_bf16", "all layers are alike")


@dataclass(frozen=True)
class FP8Config:
    """Linear layers whose operands are quantised to eight bits. Without --fp8-format none is."""

    fp8_format: Annotated[Literal["e4m3", "hybrid"] | None, FREE] = None
    """Multiply in FP8 in the linear layers of attention, MLP and experts: all e4m3, or gradients in e5m2 (hybrid)."""
    fp8_recipe: Annotated[Literal["delayed", "tensorwise", "blockwise", "mxfp8"], FREE, FP8] = "delayed"
    """Scales: of a tensor, by its largest value (tensorwise) or that of earlier steps (delayed); of 128 numbers, of
    weights 128 x 128 (blockwise); of 32 (mxfp8)."""
    fp8_margin: Annotated[int, Range("at least 0 and at most 16", lambda v: 0 <= v <= 16), FREE, FP8, DELAYED] = 0
    """Room above the expected largest value: a scale is divided by 2 to this power."""
    fp8_amax_history_len: Annotated[int, LISTED, FREE, FP8, DELAYED] = 1
    """Steps whose largest values are remembered."""
    fp8_amax_compute_algo: Annotated[Literal["most_recent", "max"], FREE, FP8, DELAYED] = "most_recent"
    """Which of them counts: that of the last step, or the largest."""
    no_fp8_wgrad: Annotated[bool, FREE, FP8] = False
    """Compute weight gradients in the type of the weights."""
    fp8_param_gather: Annotated[
        bool,
        FREE,
        FP8,
        Idle(
            lambda c: not c.parallel.splits_optimizer or c.weight_replicas == 1,
            "no weights are gathered, without --use-distributed-optimizer on several data-parallel ranks",
        ),
        Idle(
            lambda c: c.model.fp8_recipe == "mxfp8",
            "weights are gathered in their own type, as blocks of 32 lie along the sum of each of two products, with "
            "--fp8-recipe mxfp8",
        ),
    ] = False
    """Gather the weights that are quantised in eight bits, half the bytes of bf16, and keep them so. Same bits."""
    first_last_layers_bf16: Annotated[bool, FREE, FP8] = False
    """Leave FP8 out of the first and last layers."""
    num_layers_at_start_in_bf16: Annotated[int, at_least(0), FREE, FP8, ENDS] = 1
    """How many first layers, with --first-last-layers-bf16."""
    num_layers_at_end_in_bf16: Annotated[int, at_least(0), FREE, FP8, ENDS] = 1
    """How many last layers, with --first-last-layers-bf16."""

    def has_fp8_in(self, layer: int, layers: int) -> bool:
        """Does a layer of so many multiply in FP8?"""
        ends = self.first_last_layers_bf16
        start, end = self.num_layers_at_start_in_bf16, self.num_layers_at_end_in_bf16
        return self.fp8_format is not None and not (ends and (layer < start or layer >= layers - end))
