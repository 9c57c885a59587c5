"""Attention through latents (DeepSeek-V2, Liu et al. 2024, section 2.1; DeepSeek-V3, section 2.1.1).

Every tensor-parallel rank has the projections down to the latents and computes them of its tokens; those up to its
heads are split. Up-projections are not absorbed into each other: that saves where keys are cached, not in training.
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
    """Projections down, norms, projections up, attention, output projection; layers of plain torch.

    A query head is [not rotated; rotated], a key head too, and all heads of a token share the key's rotated channels.
    Rows of linear_kv_up_proj are ordered by head: its key, its value.
    """

    def __init__(self, config: ModelConfig, tp: Axis, layer: int) -> None:
        super().__init__(config, tp, layer)
        heads, split, std = config.heads, config.sequence_parallel, config.linear_std
        fp8 = recipe_of(config)
        kv_rank, q_rank = config.kv_lora_rank, config.q_lora_rank

        def up(inputs: int, outputs: int) -> ColumnParallelLinear:
            return ColumnParallelLinear(
                inputs, outputs, tp=tp, bias=False, sequence_parallel=split, init_std=std, fp8=fp8
            )

        def down(outputs: int) -> ColumnParallelLinear:
            made = ColumnParallelLinear(config.hidden, outputs, tp=ALONE, bias=False, init_std=std, fp8=fp8)
            set_layout(made.weight, replace(layout_of(made.weight), dim=None, sum_over_tp=split))
            return made

        self.linear_q_proj = self.linear_q_down_proj = self.linear_q_up_proj = self.q_layernorm = None
        if q_rank is None:
            self.linear_q_proj = up(config.hidden, heads * config.qk_dim)
        else:
            self.linear_q_down_proj, self.linear_q_up_proj = down(q_rank), up(q_rank, heads * config.qk_dim)
            self.q_layernorm = Norm(config, q_rank, sum_over_tp=split) if config.qk_layernorm else None
        self.linear_kv_down_proj = down(kv_rank + config.qk_pos_emb_head_dim)
        self.linear_kv_up_proj = up(kv_rank, heads * (config.qk_head_dim + config.v_head_dim))
        self.kv_layernorm = Norm(config, kv_rank, sum_over_tp=split) if config.qk_layernorm else None
        self.linear_proj = RowParallelLinear(
            heads * config.v_head_dim,
            config.hidden,
            tp=tp,
            bias=config.bias,
            sequence_parallel=split,
            init_std=config.residual_std,
            fp8=fp8,
        )
        self._opens = opening(tp, split)

    def forward(self, x: Tensor) -> Tensor:
        """[s, b, h] -> [s, b, h], the tokens that are here; under sequence parallelism [s/t, b, h]."""
        config, q = self.config, x
        if self.linear_q_down_proj is not None:
            q = self.linear_q_down_proj(x)
            q = q if self.q_layernorm is None else self.q_layernorm(q)
        kv, rotated = torch.split(self.linear_kv_down_proj(x), [config.kv_lora_rank, config.qk_pos_emb_head_dim], -1)
        kv = kv if self.kv_layernorm is None else self.kv_layernorm(kv)
        latents = q, kv, across(rotated, self._opens)  # each rank's heads use them: gradients are summed
        out = recompute(self._heads, *latents) if config.recompute_mla_up_proj else self._heads(*latents)
        return self.linear_proj(out)  # type: ignore[no-any-return]

    def _heads(self, q: Tensor, kv: Tensor, rotated: Tensor) -> Tensor:
        """The queries' latent or the input, the latent of keys and values, and the keys' rotated channels [s, b, r] ->
        [s, b, heads/t x v]."""
        config, heads = self.config, self.config.heads // self.tp.size
        up = self.linear_q_up_proj if self.linear_q_proj is None else self.linear_q_proj
        assert up is not None
        q = up(q).unflatten(-1, (heads, config.qk_dim))
        kv = self.linear_kv_up_proj(kv).unflatten(-1, (heads, config.qk_head_dim + config.v_head_dim))
        k, v = torch.split(kv, [config.qk_head_dim, config.v_head_dim], -1)
        rotary, here = Rotary.of_latents(config), positions_here(len(q), q.device)
        plain, turned = torch.split(q, [config.qk_head_dim, config.qk_pos_emb_head_dim], -1)
        turned, shared = (rotate(part.contiguous(), rotary, *here) for part in (turned, rotated[:, :, None]))
        # Attention is of one width, and divides by its root: zeros fill the rest, and the scale is the queries'.
        width = max(config.qk_dim, config.v_head_dim)
        scale = growth(config.rotary_scaling_factor, config.mscale_all_dim) ** 2 * math.sqrt(width / config.qk_dim)
        q = torch.cat((plain, turned), -1)
        q, k, v = (
            F.pad(part, (0, width - part.shape[-1])) if part.shape[-1] < width else part
            for part in (
                q if scale == 1 else q * scale,
                torch.cat((k, shared.expand(-1, -1, heads, -1)), -1),
                v,
            )
        )
        out: Tensor = self.attend(q, k, v)
        return out.view(*out.shape[:2], heads, width)[..., : config.v_head_dim].flatten(-2)
