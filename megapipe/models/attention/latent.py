"""Multi-head latent attention (DeepSeek-V2, Liu et al. 2024, section 2.1; DeepSeek-V3, 2.1.1).

Every tensor-parallel rank holds the down-projections to the latents, and computes the latents of
its tokens. The up-projections to heads are split over the ranks. The up-projections are not
absorbed into one another: that saves time where keys are cached, not in training.
"""

from __future__ import annotations

import math
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor

from megapipe.config import ModelConfig
from megapipe.distributed.axis import ALONE, Axis
from megapipe.distributed.layout import layout_of, set_layout
from megapipe.models.attention.layer import Attention, positions_here
from megapipe.models.attention.rope import Rotary, growth, rotate
from megapipe.models.norm import Norm
from megapipe.models.parts import recipe_of
from megapipe.models.recompute import recompute
from megapipe.tensor_parallel.collectives import across, opening
from megapipe.tensor_parallel.linear import ColumnParallelLinear, RowParallelLinear


class LatentAttention(Attention):
    """Down-projections, norms, up-projections, attention, output projection, in plain torch.

    The channels of a query head, and of a key head, are [not rotated, rotated]. All heads of a
    token share the rotated channels of the key. The rows of linear_kv_up_proj are ordered by head:
    the head's key, then its value.

    Args:
        layer: the layer's number in the whole model, from 0.
    """

    def __init__(self, config: ModelConfig, tp: Axis, layer: int) -> None:
        super().__init__(config, tp, layer)
        heads = config.heads
        split = config.sequence_parallel
        std = config.linear_std
        fp8 = recipe_of(config)
        kv_rank = config.kv_lora_rank
        q_rank = config.q_lora_rank

        def up(inputs: int, outputs: int) -> ColumnParallelLinear:
            return ColumnParallelLinear(
                inputs, outputs, tp=tp, bias=False, sequence_parallel=split, init_std=std, fp8=fp8
            )

        def down(outputs: int) -> ColumnParallelLinear:
            made = ColumnParallelLinear(
                config.hidden, outputs, tp=ALONE, bias=False, init_std=std, fp8=fp8
            )
            # Whole on every rank; under sequence parallelism a rank sees only its tokens.
            layout = replace(layout_of(made.weight), dim=None, sum_over_tp=split)
            set_layout(made.weight, layout)
            return made

        def norm(size: int) -> Norm | None:
            if config.qk_layernorm:
                epsilon = config.latent_norm_epsilon or config.norm_epsilon
                own = replace(config, norm_epsilon=epsilon)
                return Norm(own, size, sum_over_tp=split)
            return None

        self.linear_q_proj: ColumnParallelLinear | None = None
        self.linear_q_down_proj: ColumnParallelLinear | None = None
        self.linear_q_up_proj: ColumnParallelLinear | None = None
        self.q_layernorm: Norm | None = None
        if q_rank is None:
            self.linear_q_proj = up(config.hidden, heads * config.qk_dim)
        else:
            self.linear_q_down_proj = down(q_rank)
            self.linear_q_up_proj = up(q_rank, heads * config.qk_dim)
            self.q_layernorm = norm(q_rank)
        self.linear_kv_down_proj = down(kv_rank + config.qk_pos_emb_head_dim)
        self.linear_kv_up_proj = up(kv_rank, heads * (config.qk_head_dim + config.v_head_dim))
        self.kv_layernorm = norm(kv_rank)
        self.linear_proj = RowParallelLinear(
            heads * config.v_head_dim,
            config.hidden,
            tp=tp,
            bias=config.has_bias("proj"),
            sequence_parallel=split,
            init_std=config.residual_std,
            fp8=fp8,
        )
        self._opens = opening(tp, split)

    def forward(self, x: Tensor) -> Tensor:
        """Apply latent attention to this rank's tokens.

        Args:
            x: [s, b, h]; under sequence parallelism [s/t, b, h].
        Returns: the same shape.
        """
        config = self.config
        q = x
        if self.linear_q_down_proj is not None:
            q = self.linear_q_down_proj(x)
            if self.q_layernorm is not None:
                q = self.q_layernorm(q)
        sizes = [config.kv_lora_rank, config.qk_pos_emb_head_dim]
        # Only the latents are normed. The rotated channels go straight to the heads.
        kv, rotated = torch.split(self.linear_kv_down_proj(x), sizes, -1)
        if self.kv_layernorm is not None:
            kv = self.kv_layernorm(kv)
        # The heads of every rank use the rotated channels, so their gradients are summed over tp.
        rotated = across(rotated, self._opens)
        if config.recompute_mla_up_proj:
            out = recompute(self._heads, q, kv, rotated)
        else:
            out = self._heads(q, kv, rotated)
        return self.linear_proj(out)  # type: ignore[no-any-return]

    def _heads(self, q: Tensor, kv: Tensor, rotated: Tensor) -> Tensor:
        """Return the attention output of this rank's heads.

        Args:
            q: the queries' latents [s, b, q_rank], or the layer's input if queries have none.
            kv: the latents of keys and values, [s, b, kv_rank].
            rotated: the key channels that are rotated, shared by all heads: [s, b, r].
        Returns: [s, b, heads/t x v], with v channels of each value.
        """
        config = self.config
        heads = config.heads // self.tp.size
        up = self.linear_q_up_proj if self.linear_q_proj is None else self.linear_q_proj
        assert up is not None
        q = up(q).unflatten(-1, (heads, config.qk_dim))
        key_value = config.qk_head_dim + config.v_head_dim
        kv = self.linear_kv_up_proj(kv).unflatten(-1, (heads, key_value))
        k, v = torch.split(kv, [config.qk_head_dim, config.v_head_dim], -1)
        rotary = Rotary.of_latents(config)
        positions, cut = positions_here(len(q), q.device)
        plain, turned = torch.split(q, [config.qk_head_dim, config.qk_pos_emb_head_dim], -1)
        turned = rotate(turned.contiguous(), rotary, positions, cut)
        shared = rotate(rotated[:, :, None].contiguous(), rotary, positions, cut)
        q = torch.cat((plain, turned), -1)
        k = torch.cat((k, shared.expand(-1, -1, heads, -1)), -1)
        # The attention kernels take queries, keys and values of one width, and divide scores by
        # its root. Zeros fill the narrower ones up, and the queries carry the correction of the
        # scale: the true width is qk_dim, and YaRN adds a factor.
        width = max(config.qk_dim, config.v_head_dim)
        yarn = growth(config.rotary_scaling_factor, config.mscale_all_dim)
        scale = yarn**2 * math.sqrt(width / config.qk_dim)
        if scale != 1:
            q = q * scale
        out: Tensor = self.attend(_padded(q, width), _padded(k, width), _padded(v, width))
        out = out.view(*out.shape[:2], heads, width)
        return out[..., : config.v_head_dim].flatten(-2)


def _padded(x: Tensor, width: int) -> Tensor:
    """Return x with its last dimension filled up with zeros to `width` elements."""
    if x.shape[-1] == width:
        return x
    return F.pad(x, (0, width - x.shape[-1]))
