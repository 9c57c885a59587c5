"""A GPT whose layers mix tokens by gated causal convolutions instead of attention."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megapipe.config import ModelConfig
from megapipe.distributed.axis import Axis
from megapipe.distributed.layout import Layout, set_layout
from megapipe.models.gpt import GPTModel
from megapipe.models.mlp import MLP
from megapipe.models.norm import Norm
from megapipe.partition.spans import LayerSpan
from megapipe.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from megapipe.tensor_parallel.rng import dropout

WIDTH = 4  # tokens that a convolution sees, itself included


class GatedConv(nn.Module):
    """A gated causal convolution: out(gate * conv(value)).

    Each channel has a filter of its own, so tensor parallelism can split the channels.
    """

    def __init__(self, config: ModelConfig, tp: Axis) -> None:
        super().__init__()
        h, std, parallel = config.hidden, config.init_method_std, config.sequence_parallel
        self.gate_value = ColumnParallelLinear(
            h, 2 * h, tp=tp, bias=config.bias, sequence_parallel=parallel, blocks=2, init_std=std
        )
        # The layout is all that initialisation, checkpoints and optimizer need to know: shape of the whole, split dim.
        layout = Layout((h, WIDTH), dim=0, std=WIDTH**-0.5)
        self.filters = set_layout(nn.Parameter(torch.empty(h // tp.size, WIDTH)), layout)
        std = std / (2 * config.layers) ** 0.5
        self.out = RowParallelLinear(h, h, tp=tp, bias=config.bias, sequence_parallel=parallel, init_std=std)

    def forward(self, x: Tensor) -> Tensor:
        """Return the output [s, b, h] for the input x [s, b, h]."""
        gate, value = self.gate_value(x).chunk(2, dim=-1)
        past = F.pad(value.permute(1, 2, 0), (WIDTH - 1, 0))  # [b, h/t, WIDTH - 1 + s]
        mixed = F.conv1d(past, self.filters[:, None], groups=len(self.filters)).permute(2, 0, 1)
        y: Tensor = self.out(torch.sigmoid(gate) * mixed)
        return y


class Layer(nn.Module):
    """A layer with parallel branches, as in GPT-J: x + conv(norm(x)) + mlp(norm(x)) for input x."""

    def __init__(self, config: ModelConfig, tp: Axis, number: int) -> None:
        super().__init__()
        self.number, self.hidden_dropout = number, config.hidden_dropout
        self.shares_sequence = tp if config.sequence_parallel else None
        self.norm = Norm(config, config.hidden, sum_over_tp=config.sequence_parallel)
        self.conv = GatedConv(config, tp)
        self.mlp = MLP(config, tp)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.norm(x)
        y = self.conv(y) + self.mlp(y)
        if self.training:  # named by layer and place: the same mask under every layout
            y = dropout(y, self.hidden_dropout, self.number, "out", tp=self.shares_sequence, dim=0)
        return x + y


def provider(config: ModelConfig, span: LayerSpan, tp: Axis) -> nn.Module:
    return GPTModel(config, span, tp, layer=Layer)
