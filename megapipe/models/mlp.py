"""The feed-forward half of a layer: GELU, squared ReLU (So et al. 2021), or gated (Shazeer 2020) with gate and up in
one column-parallel weight.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megapipe.config import ModelConfig
from megapipe.distributed.axis import Axis
from megapipe.models.fused import swiglu
from megapipe.models.gelu import gelu
from megapipe.models.parts import parts_of


class MLP(nn.Module):
    """h -> ffn -> h. linear_fc1 of a gated MLP holds [gate; up], each split over tp on its own.

    ffn: its width. Default: --ffn-hidden-size.
    """

    def __init__(self, config: ModelConfig, tp: Axis, ffn: int | None = None) -> None:
        super().__init__()
        self.config = config
        parts, blocks, ffn = parts_of(config), 2 if config.gated else 1, ffn or config.ffn
        self.linear_fc1 = parts.column(
            config.hidden,
            blocks * ffn,
            tp=tp,
            bias=config.bias,
            sequence_parallel=config.sequence_parallel,
            blocks=blocks,
            init_std=config.linear_std,
        )
        self.linear_fc2 = parts.row(
            ffn,
            config.hidden,
            tp=tp,
            bias=config.bias,
            sequence_parallel=config.sequence_parallel,
            init_std=config.residual_std,
        )

    def forward(self, x: Tensor) -> Tensor:
        """[s, b, h] -> [s, b, h]; under sequence parallelism [s/t, b, h]."""
        return self.linear_fc2(activate(self.linear_fc1(x), self.config))  # type: ignore[no-any-return]


def activate(x: Tensor, config: ModelConfig) -> Tensor:
    """linear_fc1's output [..., ffn], of a gated MLP [..., 2 ffn], -> [..., ffn]."""
    if config.gated:
        if config.swiglu and not torch.compiler.is_compiling():
            return swiglu(x)
        gate, up = x.chunk(2, dim=-1)
        return (F.silu(gate) if config.swiglu else gate * torch.sigmoid(1.702 * gate)) * up
    if config.squared_relu:
        return F.relu(x).square()
    return F.gelu(x) if config.erf_gelu else gelu(x)
