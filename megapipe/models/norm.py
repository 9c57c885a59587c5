"""LayerNorm and RMSNorm over the last dimension, the same on every tensor-parallel rank."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megapipe.config import ModelConfig
from megapipe.mesh import Layout, set_layout


class Norm(nn.Module):
    """Norm of `config.normalization` kind over vectors of `size`; the weight starts at 1, LayerNorm's bias at 0."""

    def __init__(self, config: ModelConfig, size: int) -> None:
        super().__init__()
        self.epsilon = config.norm_epsilon
        self.weight = set_layout(nn.Parameter(torch.empty(size)), Layout((size,), mean=1.0))
        self.bias = None
        if config.normalization == "LayerNorm":
            self.bias = set_layout(nn.Parameter(torch.empty(size)), Layout((size,)))

    def forward(self, x: Tensor) -> Tensor:
        """[..., size] -> [..., size]."""
        if self.bias is None:
            return F.rms_norm(x, self.weight.shape, self.weight, self.epsilon)
        return F.layer_norm(x, self.weight.shape, self.weight, self.bias, self.epsilon)
