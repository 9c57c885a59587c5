"""Classes that a layer is built of: plain torch's, or Transformer Engine's under the same interface."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from megapipe.config import ModelConfig
from megapipe.distributed.axis import Axis
from megapipe.models.norm import Norm
from megapipe.models.transformer_engine import TEColumnParallelLinear, TENorm, TERowParallelLinear, attention_kernel
from megapipe.tensor_parallel.linear import ColumnParallelLinear, RowParallelLinear

AttentionKernel = Callable[[Tensor, Tensor, Tensor], Tensor]
"""q [s, b, heads/t, d], k and v [s, b, groups/t, d] -> [s, b, heads/t x d]: causal, within the model's window."""


@dataclass(frozen=True)
class Parts:
    """Layers take these instead of naming a class.

    Attributes:
        attention: makes a kernel for whole sequences without dropout; None for torch's.
    """

    column: type[ColumnParallelLinear]
    row: type[RowParallelLinear]
    norm: type[Norm]
    attention: Callable[[ModelConfig, Axis], AttentionKernel | None]


_LOCAL = Parts(ColumnParallelLinear, RowParallelLinear, Norm, lambda config, tp: None)
_TRANSFORMER_ENGINE = Parts(TEColumnParallelLinear, TERowParallelLinear, TENorm, attention_kernel)


def parts_of(config: ModelConfig) -> Parts:
    """The parts that --transformer-impl names; `auto` is local until choose_layers has looked for a GPU."""
    return _TRANSFORMER_ENGINE if config.transformer_impl == "transformer_engine" else _LOCAL
