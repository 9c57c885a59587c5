"""The feed-forward half of a layer: GELU, or SwiGLU (Shazeer 2020) with gate and up in one column-parallel weight."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from megapipe.config import ModelConfig
from megapipe.mesh import Axis
from megapipe.tensor_parallel.linear import ColumnParallelLinear, RowParallelLinear


class MLP(nn.Module):
    """h -> ffn -> h. linear_fc1 of SwiGLU holds [gate; up], each split over tp on its own."""

    def __init__(self, config: ModelConfig, tp: Axis) -> None:
        super().__init__()
        self.gated = config.swiglu
        blocks = 2 if self.gated else 1
        self.linear_fc1 = ColumnParallelLinear(
            config.hidden,
            blocks * config.ffn,
            tp=tp,
            bias=config.bias,
            blocks=blocks,
            init_std=config.init_method_std,
        )
        self.linear_fc2 = RowParallelLinear(
            config.ffn,
            config.hidden,
            tp=tp,
            bias=config.bias,
            init_std=config.init_method_std / (2 * config.layers) ** 0.5,
        )

    def forward(self, x: Tensor) -> Tensor:
        """[s, b, h] -> [s, b, h]."""
        x = self.linear_fc1(x)
        if self.gated:
            gate, up = x.chunk(2, dim=-1)
            x = F.silu(gate) * up
        else:
            x = F.gelu(x, approximate="tanh")
        return self.linear_fc2(x)  # type: ignore[no-any-return]
