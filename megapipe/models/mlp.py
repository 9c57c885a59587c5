"""The feed-forward half of a layer.

Activations: GELU, squared ReLU (So et al. 2021), or a gated unit (Shazeer 2020) whose gate and up
projections are one column-parallel weight.
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
    """Two linear layers with an activation between them: h -> ffn -> h.

    The rows of a gated MLP's linear_fc1 are [gate; up]; tensor parallelism splits each of the two
    separately.

    Args:
        ffn: width between the layers; --ffn-hidden-size by default.
    """

    def __init__(self, config: ModelConfig, tp: Axis, ffn: int | None = None) -> None:
        super().__init__()
        self.config = config
        parts = parts_of(config)
        ffn = ffn or config.ffn
        blocks = 2 if config.gated else 1
        self.linear_fc1 = parts.column(
            config.hidden,
            blocks * ffn,
            tp=tp,
            bias=config.bias,
            sequence_parallel=config.sequence_parallel,
            blocks=blocks,
            init_std=config.linear_std,
        )
        # Two projections of each layer add to the residual stream. Their deviation is divided by
        # sqrt(2 layers), so that the sum does not grow with the depth (Radford et al. 2019, section
        # 2.3).
        self.linear_fc2 = parts.row(
            ffn,
            config.hidden,
            tp=tp,
            bias=config.bias,
            sequence_parallel=config.sequence_parallel,
            init_std=config.residual_std,
        )

    def forward(self, x: Tensor) -> Tensor:
        """Apply the MLP: [s, b, h] -> [s, b, h]; under sequence parallelism [s/t, b, h]."""
        return self.linear_fc2(activate(self.linear_fc1(x), self.config))  # type: ignore[no-any-return]


def activate(x: Tensor, config: ModelConfig) -> Tensor:
    """Apply the configured activation to linear_fc1's output.

    Args:
        x: [..., ffn], or [..., 2 ffn] = [gate, up] of a gated MLP.
    Returns: [..., ffn].
    """
    if config.gated:
        # torch.compile fuses plain operations itself.
        if config.swiglu and not torch.compiler.is_compiling():
            return swiglu(x)
        gate, up = x.chunk(2, dim=-1)
        if config.swiglu:
            return F.silu(gate) * up
        # x sigmoid(1.702 x) approximates GELU (Hendrycks and Gimpel 2016): "quick GELU".
        return gate * torch.sigmoid(1.702 * gate) * up
    if config.squared_relu:
        return F.relu(x).square()
    if config.erf_gelu:
        return F.gelu(x)
    return gelu(x)
