"""LayerNorm and RMSNorm over the last dimension; every tensor-parallel rank holds all weights."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from megapipe.config import ModelConfig
from megapipe.distributed.layout import Layout, parameter
from megapipe.kernels.region import is_fused
from megapipe.models.fused import add_norm


class Norm(nn.Module):
    """LayerNorm or RMSNorm, as `config.normalization` says, over vectors of `size` elements.

    The weight starts at 1 and LayerNorm's bias, unless --no-norm-bias, at 0. With
    --apply-layernorm-1p the parameter holds the weight minus 1.

    `add_and_norm` adds a tensor before it normalises.

    Args:
        sum_over_tp: True if a rank normalises only some of the vectors: its heads or its tokens.
        The gradients of weight and bias must then be summed over tensor parallelism.
    """

    def __init__(self, config: ModelConfig, size: int, *, sum_over_tp: bool = False) -> None:
        super().__init__()
        self.epsilon = config.norm_epsilon
        self.one_more = config.apply_layernorm_1p
        start = 0.0 if self.one_more else 1.0
        layout = Layout((size,), mean=start, sum_over_tp=sum_over_tp)
        self.weight = parameter(layout)
        self.bias = None
        self.centred = config.normalization == "LayerNorm"
        if self.centred and not config.no_norm_bias:
            self.bias = parameter(Layout((size,), sum_over_tp=sum_over_tp))

    def forward(self, x: Tensor) -> Tensor:
        """Normalise x: [..., size] -> [..., size]."""
        return self._add_norm(x, None)[1]

    def add_and_norm(self, x: Tensor, delta: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return (x + delta, norm(x + delta)), each [..., size]. A delta of None adds nothing.

        On a GPU both are one kernel, but not in a subclass or with a hook on forward. Without
        delta the first result is x or a view of it.
        """
        # A subclass has its own arithmetic, and a hook on forward must see the call.
        if type(self) is Norm and is_fused(x) and not self._forward_hooks:
            return self._add_norm(x, delta)
        if delta is not None:
            x = x + delta
        return x, self(x)

    def _add_norm(self, x: Tensor, delta: Tensor | None) -> tuple[Tensor, Tensor]:
        # Megatron-LM's reason: in 16 bits numbers near 0 are finer than numbers near 1.
        weight = self.weight + 1 if self.one_more else self.weight
        bias: Tensor | None = self.bias
        # Without a bias the functions below compute RMSNorm.
        if bias is None and self.centred:
            bias = torch.zeros_like(weight, requires_grad=False)
        return add_norm(x, delta, weight, bias, self.epsilon)
