"""LayerNorm and RMSNorm over the last dimension, the same on every tensor-parallel rank."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from megapipe.config import ModelConfig
from megapipe.distributed.layout import Layout, set_layout
from megapipe.kernels.region import is_fused
from megapipe.models.fused import add_norm


class Norm(nn.Module):
    """Norm of `config.normalization` kind over vectors of `size`; the weight starts at 1, LayerNorm's bias at 0.

    With --apply-layernorm-1p the parameter is the weight minus 1.

    Args:
        sum_over_tp: this rank's vectors are a part of those that share the weight, see Layout.
    """

    def __init__(self, config: ModelConfig, size: int, *, sum_over_tp: bool = False) -> None:
        super().__init__()
        self.epsilon = config.norm_epsilon
        self.one_more = config.apply_layernorm_1p
        start = 0.0 if self.one_more else 1.0
        self.weight = set_layout(nn.Parameter(torch.empty(size)), Layout((size,), mean=start, sum_over_tp=sum_over_tp))
        self.bias = None
        if config.normalization == "LayerNorm":
            self.bias = set_layout(nn.Parameter(torch.empty(size)), Layout((size,), sum_over_tp=sum_over_tp))

    def forward(self, x: Tensor) -> Tensor:
        """[..., size] -> [..., size]."""
        return self._behind(x, None)[1]

    def behind(self, x: Tensor, delta: Tensor | None) -> tuple[Tensor, Tensor]:
        """x, with delta if there is one added to it, and the norm of that."""
        if type(self) is Norm and is_fused(x) and not self._forward_hooks:
            return self._behind(x, delta)
        x = x if delta is None else x + delta
        return x, self(x)

    def _behind(self, x: Tensor, delta: Tensor | None) -> tuple[Tensor, Tensor]:
        weight = self.weight + 1 if self.one_more else self.weight
        return add_norm(x, delta, weight, self.bias, self.epsilon)
