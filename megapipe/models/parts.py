"""Classes that a layer is built of: plain torch's, or Transformer Engine's under the same interface."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
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
from megapipe.tensor_parallel.fp8.products import Recipe
from megapipe.tensor_parallel.linear import ColumnParallelLinear, RowParallelLinear

AttentionKernel = Callable[[Tensor, Tensor, Tensor], Tensor]
"""q [s, b, heads/t, d], k and v [s, b, groups/t, d] -> [s, b, heads/t x d]: causal, within the model's window."""


@dataclass(frozen=True)
class Parts:
    """Layers take these instead of naming a class.

    Attributes:
        attention: makes a kernel for whole sequences without dropout; None for torch's.
    """

    column: Callable[..., ColumnParallelLinear]
    row: Callable[..., RowParallelLinear]
    norm: type[Norm]
    attention: Callable[[ModelConfig, Axis], AttentionKernel | None]


_LOCAL = Parts(ColumnParallelLinear, RowParallelLinear, Norm, lambda config, tp: None)
_TRANSFORMER_ENGINE = Parts(TEColumnParallelLinear, TERowParallelLinear, TENorm, attention_kernel)


def parts_of(config: ModelConfig) -> Parts:
    """The parts that --transformer-impl names; `auto` is local until choose_layers has looked for a GPU."""
    parts = _TRANSFORMER_ENGINE if config.transformer_impl == "transformer_engine" else _LOCAL
    fp8, given = recipe_of(config), dict[str, Any]()
    # Delayed scales must be the same in all passes of a step; Transformer Engine's change with each. Nor has it seen
    # weights that come quantised, and its own pieces ask for buffers that it must be given beforehand.
    theirs = (fp8 is None or (knows(fp8) and not config.fp8_param_gather)) and not config.tp_comm_overlap
    linear = parts if theirs else _LOCAL
    if fp8 is not None:
        given["fp8"] = fp8
    if config.tp_comm_overlap:
        given["in_pieces"] = True
    return replace(parts, column=partial(linear.column, **given), row=partial(linear.row, **given)) if given else parts


def recipe_of(config: ModelConfig) -> Recipe | None:
    """The recipe of a layer's products; None without FP8."""
    if config.fp8_format is None:
        return None
    delayed = config.fp8_margin, config.fp8_amax_history_len, config.fp8_amax_compute_algo
    if config.fp8_recipe != "delayed":
        return Recipe(config.fp8_format, config.fp8_recipe, not config.no_fp8_wgrad)
    return Recipe(config.fp8_format, config.fp8_recipe, not config.no_fp8_wgrad, *delayed)
