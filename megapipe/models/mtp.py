"""One depth of multi-token prediction (DeepSeek-V3 report, section 2.2): a layer that predicts one token further.

From the hidden states of the depth before and the embedding of the token that was predicted there: both normed, the
embedding first, and projected to one width; a transformer layer; a norm; the model's head. Names are Megatron-LM's.
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


class MultiTokenLayer(nn.Module):
    """Hidden states and the embedding of the tokens that follow -> hidden states, normed for the head.

    Args:
        layer: its number, counted on from the model's layers; what it draws and routes is named by that.
        make: builds its transformer layer.
    """

    def __init__(self, config: ModelConfig, tp: Axis, layer: int, make: LayerProvider = TransformerLayer) -> None:
        super().__init__()
        parts, sharded = parts_of(config), config.sequence_parallel
        self.tp, self.shares_sequence = tp, sharded
        self.recomputes = units(config, 1)[0][1]
        self.enorm = parts.norm(config, config.hidden, sum_over_tp=sharded)
        self.hnorm = parts.norm(config, config.hidden, sum_over_tp=sharded)
        self.eh_proj = parts.column(
            2 * config.hidden,
            config.hidden,
            tp=tp,
            bias=False,
            sequence_parallel=sharded,
            init_std=config.linear_std,
        )
        self.mtp_model_layer = make(config, tp, layer)
        self.final_layernorm = parts.norm(config, config.hidden, sum_over_tp=sharded)

    def forward(self, x: Tensor, embedded: Tensor) -> Tensor:
        """[s, b, h] and [s, b, h] -> [s, b, h]; under sequence parallelism [s/t, b, h]."""
        x = self.eh_proj(torch.cat((self.enorm(embedded), self.hnorm(x)), dim=-1))
        x = whole_features(x, self.tp, self.shares_sequence)
        x = recompute(self.mtp_model_layer, x) if self.recomputes else self.mtp_model_layer(x)
        return self.final_layernorm(x)  # type: ignore[no-any-return]


class _WholeFeatures(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, tp: Axis, shares_sequence: bool) -> Tensor:
        ctx.tp, ctx.shares_sequence = tp, shares_sequence
        if shares_sequence:  # rows for features: each rank keeps its own tokens
            return torch.cat(tp.all_to_all(torch.stack(x.chunk(tp.size))).unbind(), dim=-1)
        return torch.cat(tp.all_gather(x[None].contiguous()).unbind(), dim=-1)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        tp = ctx.tp
        pieces = grad.chunk(tp.size, dim=-1)
        if ctx.shares_sequence:
            return torch.cat(tp.all_to_all(torch.stack(pieces)).unbind()), None, None
        return pieces[tp.rank].contiguous(), None, None


_whole_features: Callable[..., Tensor] = _WholeFeatures.apply


def whole_features(x: Tensor, tp: Axis, shares_sequence: bool) -> Tensor:
    """[s, b, h/t] -> [s, b, h], the same on all ranks; under sequence parallelism this rank's [s/t, b, h]."""
    return _whole_features(x, tp, shares_sequence) if tp.size > 1 else x
