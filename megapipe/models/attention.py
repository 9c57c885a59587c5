"""Causal self-attention with heads split over tensor-parallel ranks; grouped-query, rotary and head norms as asked."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from megapipe.config import ModelConfig
from megapipe.mesh import Axis
from megapipe.models.norm import Norm
from megapipe.models.recompute import recompute
from megapipe.models.rope import rotate
from megapipe.tensor_parallel.linear import ColumnParallelLinear, RowParallelLinear
from megapipe.tensor_parallel.rng import dropout

_BACKENDS = {
    "flash": [SDPBackend.FLASH_ATTENTION],
    "fused": [SDPBackend.CUDNN_ATTENTION, SDPBackend.EFFICIENT_ATTENTION],
    "unfused": [SDPBackend.MATH],
    "local": [SDPBackend.MATH],
}


class SelfAttention(nn.Module):
    """QKV projection, attention, output projection.

    The rows of linear_qkv are ordered by query group: the group's query heads, its key, its value (Megatron's order,
    checkpoint version 2.0), so that a slice over tp is a set of whole groups.
    """

    def __init__(self, config: ModelConfig, tp: Axis, layer: int) -> None:
        super().__init__()
        self.config, self.tp, self.layer = config, tp, layer
        head, queries, groups = config.head_dim, config.heads, config.query_groups
        self.groups = groups // tp.size
        self.linear_qkv = ColumnParallelLinear(
            config.hidden,
            (queries + 2 * groups) * head,
            tp=tp,
            bias=config.bias or config.add_qkv_bias,
            init_std=config.init_method_std,
        )
        self.q_layernorm = Norm(config, head) if config.qk_layernorm else None
        self.k_layernorm = Norm(config, head) if config.qk_layernorm else None
        self.linear_proj = RowParallelLinear(
            queries * head,
            config.hidden,
            tp=tp,
            bias=config.bias,
            init_std=config.init_method_std / (2 * config.layers) ** 0.5,
        )

    def forward(self, x: Tensor) -> Tensor:
        """[s, b, h] -> [s, b, h]."""
        s, b, _ = x.shape
        config = self.config
        head, per_group = config.head_dim, config.heads // config.query_groups
        qkv = self.linear_qkv(x).view(s, b, self.groups, per_group + 2, head)
        q, k, v = qkv.split((per_group, 1, 1), dim=3)
        q, k, v = (part.reshape(s, b, -1, head) for part in (q, k, v))
        if self.q_layernorm is not None and self.k_layernorm is not None:
            q, k = self.q_layernorm(q), self.k_layernorm(k)
        if config.position_embedding_type == "rope":
            dim = int(head * config.rotary_percent)
            q, k = rotate(q, dim, config.rotary_base), rotate(k, dim, config.rotary_base)
        attended = recompute(self._attend, q, k, v) if config.recompute_attention else self._attend(q, k, v)
        return self.linear_proj(attended)  # type: ignore[no-any-return]

    def _attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """q [s, b, heads/t, d], k and v [s, b, groups/t, d] -> [s, b, heads/t x d]."""
        q, k, v = (part.permute(1, 2, 0, 3) for part in (q, k, v))
        if self.training and self.config.attention_dropout:
            out = self._attend_with_dropout(q, k, v)
        else:
            with _kernel(self.config.attention_backend):
                out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=q.shape[1] != k.shape[1])
        return out.permute(2, 0, 1, 3).flatten(2)

    def _attend_with_dropout(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        # torch's kernels draw their mask from a global generator; ours belongs to layer and sample.
        k, v = (part.repeat_interleave(q.shape[1] // part.shape[1], dim=1) for part in (k, v))
        scores = q @ k.transpose(-1, -2) / q.shape[-1] ** 0.5
        blocked = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).triu(1)
        wide = scores.to(torch.promote_types(scores.dtype, torch.float32))
        probs = wide.masked_fill(blocked, float("-inf")).softmax(-1).to(q.dtype)
        return dropout(probs, self.config.attention_dropout, self.layer, "attention", tp=self.tp, dim=1) @ v


def _kernel(backend: str) -> AbstractContextManager[object]:
    return nullcontext() if backend == "auto" else sdpa_kernel(_BACKENDS[backend])
