"""The norm of all heads' queries together, and of all keys, with heads split over ranks.

Its mean of squares is over the heads of all tensor-parallel ranks. Ranks sum their parts, one
number for each token, and never gather the heads.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from megapipe.config import ModelConfig
from megapipe.distributed.axis import Axis
from megapipe.distributed.layout import Layout, parameter
from megapipe.models.recompute import from_inputs
from megapipe.tensor_parallel.collectives import across, closing, opening
from megapipe.tensor_parallel.eager import eager


class HeadsNorm(nn.Module):
    """The weight [heads x d] of an RMSNorm over all heads; each rank has its own heads' part.

    `norm_heads` applies the norms of queries and keys.

    Args:
        heads: the number of heads on all ranks.
    """

    def __init__(self, config: ModelConfig, heads: int, tp: Axis) -> None:
        super().__init__()
        size = heads * config.head_dim
        self.epsilon = config.norm_epsilon
        self.one_more = config.apply_layernorm_1p
        self.tp = tp
        start = 0.0 if self.one_more else 1.0
        self.weight = parameter(Layout((size,), 0, mean=start), size // tp.size)


@eager
def norm_heads(q: Tensor, k: Tensor, q_norm: HeadsNorm, k_norm: HeadsNorm) -> tuple[Tensor, Tensor]:
    """Norm the queries of all heads of a token together, and the keys; return both.

    Costs an all-reduce of two numbers for each token over tp, and two in backward, which computes
    the norm again.

    Args:
        q: [s, b, heads/t, d], of this rank's heads. k: [s, b, groups/t, d].
        q_norm, k_norm: the weights, and the axis tp.
    """
    tp = q_norm.tp

    def normed(q: Tensor, k: Tensor, *weights: Tensor) -> tuple[Tensor, ...]:
        wide = torch.promote_types(q.dtype, torch.float32)
        heads = [x.to(wide) for x in (q, k)]
        # One message for both: [2, s, b]. Each rank's results depend on all ranks' sums, so that
        # the gradients of the sums are added up as well.
        squares = torch.stack([x.square().sum((-2, -1)) for x in heads])
        squares = across(across(squares, closing(tp, False)), opening(tp, False))
        outs = []
        for x, weight, total in zip(heads, weights, squares, strict=True):
            scale = (total / (weight.numel() * tp.size) + q_norm.epsilon).rsqrt()
            outs.append((x * scale[..., None, None] * _by_head(weight, x)).to(q.dtype))
        return tuple(outs)

    weights = [norm.weight + 1 if norm.one_more else norm.weight for norm in (q_norm, k_norm)]
    q, k = from_inputs(normed, q, k, *weights)
    return q, k


def _by_head(weight: Tensor, x: Tensor) -> Tensor:
    """Return a weight [heads x d] as [heads, d] like x [.., heads, d], in at least float32."""
    return weight.view(x.shape[-2:]).to(torch.promote_types(weight.dtype, torch.float32))
