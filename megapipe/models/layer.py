"""One pre-norm transformer layer."""

from __future__ import annotations

from torch import Tensor, nn

from megapipe.config import ModelConfig
from megapipe.mesh import Axis
from megapipe.models.attention import SelfAttention
from megapipe.models.mlp import MLP
from megapipe.models.norm import Norm
from megapipe.tensor_parallel.rng import dropout


class TransformerLayer(nn.Module):
    """x + attention(norm(x)), then x + mlp(norm(x)). `layer` is its number in the whole model, from 0."""

    def __init__(self, config: ModelConfig, tp: Axis, layer: int) -> None:
        super().__init__()
        self.layer = layer
        self.hidden_dropout = config.hidden_dropout
        self.input_layernorm = Norm(config, config.hidden)
        self.self_attention = SelfAttention(config, tp, layer)
        self.pre_mlp_layernorm = Norm(config, config.hidden)
        self.mlp = MLP(config, tp)

    def forward(self, x: Tensor) -> Tensor:
        """[s, b, h] -> [s, b, h]."""
        x = x + self._drop(self.self_attention(self.input_layernorm(x)), "attention_out")
        return x + self._drop(self.mlp(self.pre_mlp_layernorm(x)), "mlp_out")

    def _drop(self, x: Tensor, site: str) -> Tensor:
        return dropout(x, self.hidden_dropout, self.layer, site) if self.training else x
