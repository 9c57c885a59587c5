"""One depth of multi-token prediction (DeepSeek-V3 report, section 2.2).

A depth predicts one token further ahead than the depth before it. Its inputs are the hidden states
of that depth and the embedding of the token that those predict. Both are normed, concatenated with
the embedding first, and projected to the hidden size. A transformer layer, a norm and the model's
head follow. Parameter names are Megatron-LM's.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from megapipe.config import ModelConfig
from megapipe.distributed.axis import Axis
from megapipe.models.layer import TransformerLayer
from megapipe.models.parts import parts_of
from megapipe.models.recompute import recompute, units

LayerProvider = Callable[[ModelConfig, Axis, int], nn.Module]
"""(model configuration, tensor-parallel axis, the layer's number in the whole model) -> a layer."""


class MultiTokenLayer(nn.Module):
    """Combine hidden states with the next token's embedding, and apply a transformer layer.

    Args:
        layer: number of the module's layer, counted on from the model's last layer. This number is
            part of the keys of random streams and routing.
        make: builds the transformer layer.
    """

    def __init__(
        self,
        config: ModelConfig,
        tp: Axis,
        layer: int,
        make: LayerProvider = TransformerLayer,
    ) -> None:
        super().__init__()
        parts = parts_of(config, tp)
        self.tp = tp
        self.shares_sequence = config.sequence_parallel
        self.recomputes = units(config, 1)[0][1]
        self.enorm = parts.norm(config.hidden)
        self.hnorm = parts.norm(config.hidden)
        self.eh_proj = parts.column(2 * config.hidden, config.hidden, bias=False)
        self.mtp_model_layer = make(config, tp, layer)
        self.final_layernorm = parts.norm(config.hidden)

    def forward(self, x: Tensor, embedded: Tensor) -> Tensor:
        """Return the hidden states of this prediction module, normed for the head.

        Args:
            x: hidden states of the module before, or of the model: [s, b, h].
            embedded: embedding of the tokens that x predicts, [s, b, h].
        Returns: [s, b, h]. All three are [s/t, b, h] under sequence parallelism.
        """
        x = self.eh_proj(torch.cat((self.enorm(embedded), self.hnorm(x)), dim=-1))
        # The projection's outputs are split over tp, as in Megatron-LM, and the next layer reads
        # all features of a token.
        x = whole_features(x, self.tp, self.shares_sequence)
        x = recompute(self.mtp_model_layer, x) if self.recomputes else self.mtp_model_layer(x)
        return self.final_layernorm(x)  # type: ignore[no-any-return]


class _WholeFeatures(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, tp: Axis, shares_sequence: bool) -> Tensor:
        ctx.tp = tp
        ctx.shares_sequence = shares_sequence
        if shares_sequence:
            # All-to-all: a rank gives away its features of other ranks' tokens, and receives all
            # features of its own tokens. An all-gather would bring all tokens to every rank.
            return torch.cat(tp.all_to_all(torch.stack(x.chunk(tp.size))).unbind(), dim=-1)
        return torch.cat(tp.all_gather(x[None].contiguous()).unbind(), dim=-1)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        tp = ctx.tp
        pieces = grad.chunk(tp.size, dim=-1)
        if ctx.shares_sequence:
            return torch.cat(tp.all_to_all(torch.stack(pieces)).unbind()), None, None
        # Every rank has the same gradient, so a rank keeps its features and sums nothing.
        return pieces[tp.rank].contiguous(), None, None


_whole_features: Callable[..., Tensor] = _WholeFeatures.apply


def whole_features(x: Tensor, tp: Axis, shares_sequence: bool) -> Tensor:
    """Gather the features of a column-parallel output over tensor parallelism.

    Args:
        x: [s, b, h/t], this rank's features of all tokens.
    Returns: [s, b, h], the same on all ranks; if shares_sequence, this rank's tokens [s/t, b, h].
    """
    if tp.size > 1:
        return _whole_features(x, tp, shares_sequence)
    return x
