"""Choose the classes that a layer is built of: plain torch, or Transformer Engine.

Both sets have the same interface, so a layer asks for its classes here and names neither.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import Tensor

from megapipe.config import ModelConfig
from megapipe.distributed.axis import Axis
from megapipe.models.norm import Norm
from megapipe.models.transformer_engine import (
    TEColumnParallelLinear,
    TENorm,
    TERowParallelLinear,
    attention_kernel,
    knows,
)
from megapipe.tensor_parallel.fp8.products import FP8Recipe
from megapipe.tensor_parallel.linear import ColumnParallelLinear, RowParallelLinear

AttentionKernel = Callable[[Tensor, Tensor, Tensor], Tensor]
"""(q, k, v) -> attention output, causal and within the model's window.

Shapes: q [s, b, heads/t, d], k and v [s, b, groups/t, d], output [s, b, heads/t x d].
"""


@dataclass(frozen=True)
class Parts:
    """The functions that build the parts of a transformer layer.

    Attributes:
        column, row: (inputs, outputs, bias=...) -> a linear layer. The weights of a row-parallel
            layer start with the smaller deviation of projections into the residual stream.
        norm: size -> LayerNorm or RMSNorm, as the configuration says. Under sequence parallelism
            each rank norms its own tokens only, so its gradients of the weights are summands.
        attention: (config, tp) -> a kernel for uncut sequences without dropout, or None to use
            torch's attention.
    """

    column: Callable[..., ColumnParallelLinear]
    row: Callable[..., RowParallelLinear]
    norm: Callable[..., Norm]
    attention: Callable[[ModelConfig, Axis], AttentionKernel | None]


_LOCAL = Parts(ColumnParallelLinear, RowParallelLinear, Norm, lambda config, tp: None)
_TRANSFORMER_ENGINE = Parts(TEColumnParallelLinear, TERowParallelLinear, TENorm, attention_kernel)


def parts_of(config: ModelConfig, tp: Axis) -> Parts:
    """Return the parts that --transformer-impl names, with their settings of the configuration.

    The value `auto` counts as local: `choose_layers` replaces it once the device is known.
    """
    parts = _LOCAL
    if config.transformer_impl == "transformer_engine":
        parts = _TRANSFORMER_ENGINE
    # Transformer Engine's LayerNorm always has a bias.
    norm = Norm if config.no_norm_bias else parts.norm
    linear = parts
    fp8 = recipe_of(config)
    # Delayed scales must be the same in every pass of a step; Transformer Engine changes them in
    # each pass. It does not know the form in which quantised weights arrive here. Its own overlap
    # of products and messages needs buffers that have to be allocated beforehand.
    fp8_fits = fp8 is None or (knows(fp8) and not config.fp8_param_gather)
    if not fp8_fits or config.tp_comm_overlap:
        linear = _LOCAL
    split = config.sequence_parallel
    options: dict[str, Any] = {"tp": tp, "sequence_parallel": split}
    if fp8 is not None:
        options["fp8"] = fp8
    if config.tp_comm_overlap:
        options["in_pieces"] = True
    return Parts(
        partial(linear.column, init_std=config.linear_std, **options),
        partial(linear.row, init_std=config.residual_std, **options),
        partial(norm, config, sum_over_tp=split),
        parts.attention,
    )


def recipe_of(config: ModelConfig) -> FP8Recipe | None:
    """Return how the operands of linear layers are quantised; None without --fp8-format."""
    if config.fp8_format is None:
        return None
    # Only delayed scaling has a margin and a history; other recipes keep the defaults.
    recipe = FP8Recipe(config.fp8_format, config.fp8_recipe, not config.no_fp8_wgrad)
    if config.fp8_recipe != "delayed":
        return recipe
    return recipe._replace(
        margin=config.fp8_margin,
        history=config.fp8_amax_history_len,
        algorithm=config.fp8_amax_compute_algo,
    )
