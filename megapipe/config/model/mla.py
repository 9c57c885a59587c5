"""Multi-head latent attention: the widths of its latents and heads, and how heads are rotated.

Liu et al., DeepSeek-V2 (2024), section 2.1.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from megapipe.config.notes import ABOVE_0, FROM_0, FROM_1, MUST, at_least, excludes, of_no_layer

LATENT = of_no_layer(
    lambda m: not m.multi_latent_attention,
    "heads are --kv-channels wide, without --multi-latent-attention",
)
ROPE = of_no_layer(
    lambda m: not m.rotates and not m.multi_latent_attention,
    "nothing is rotated, without --position-embedding-type rope",
)
HEADS = of_no_layer(
    lambda m: m.multi_latent_attention,
    "heads come from latents, with --multi-latent-attention",
)
STRETCHED = of_no_layer(
    lambda m: m.multi_latent_attention and m.rope_type != "rope",
    "all channels of --qk-pos-emb-head-dim are rotated, without --rope-type rope",
)
PLAIN_ROPE = of_no_layer(
    lambda m: m.position_embedding_type in ("yarn", "longrope"),
    "yarn and longrope have rules of their own for low frequencies",
)
FACTOR = of_no_layer(
    lambda m: not m.multi_latent_attention and m.position_embedding_type != "yarn",
    "positions are not stretched, without --position-embedding-type yarn",
)
YARN = of_no_layer(
    lambda m: m.multi_latent_attention and m.rope_type == "rope",
    "positions are not stretched, with --rope-type rope",
)


@dataclass(frozen=True)
class MLAConfig:
    """Attention from latents that all heads share.

    Without --multi-latent-attention these flags do nothing.
    """

    multi_latent_attention: Annotated[
        bool,
        MUST,
        excludes(
            "group_query_attention", "{} has a key and a value for each head", "Leave {} out."
        ),
    ] = False
    """Compute the keys and values of all heads from one latent per token (DeepSeek-V2). With
    --q-lora-rank queries have a latent too."""
    # Defaults are taken from Megatron-LM's flags.
    q_lora_rank: Annotated[int | None, FROM_1, MUST, LATENT] = None
    """Width of the queries' latent. Default: queries are projected from the hidden state."""
    kv_lora_rank: Annotated[int, FROM_1, MUST, LATENT] = 32
    """Width of the latent of keys and values."""
    qk_head_dim: Annotated[int, FROM_1, MUST, LATENT] = 128
    """Channels of each query and key head that are not rotated."""
    qk_pos_emb_head_dim: Annotated[int, at_least(2), MUST, LATENT] = 64
    """Rotated channels of each query and key head. All heads share the rotated part of the key."""
    v_head_dim: Annotated[int, FROM_1, MUST, LATENT] = 128
    """Channels of each value head."""
    rope_type: Annotated[Literal["rope", "yarn"] | None, MUST, LATENT] = None
    """How the rotated channels turn. rope: plain rotary embedding. yarn: stretched from 4096
    positions (Peng et al. 2023). Default: yarn."""
    rotary_scaling_factor: Annotated[float, ABOVE_0, MUST, FACTOR] = 1.0
    """Factor by which yarn stretches the positions. It scales attention scores under rope too,
    see --mscale-all-dim."""
    mscale: Annotated[float, FROM_0, MUST, FACTOR, YARN] = 1.0
    """Coefficient in yarn's factor on rotated channels,
    (0.1 mscale ln(factor) + 1) / (0.1 mscale-all-dim ln(factor) + 1)."""
    mscale_all_dim: Annotated[float, FROM_0, MUST, FACTOR] = 0.0
    """Coefficient in the factor on attention scores, the square of
    0.1 mscale-all-dim ln(factor) + 1, with --multi-latent-attention."""

    latent_norm_epsilon: Annotated[float | None, ABOVE_0, MUST, LATENT] = None
    """Number that norms of latents add to the variance. Default: --norm-epsilon. Not in
    Megatron-LM."""

    @property
    def qk_dim(self) -> int:
        """Channels of a query or key head, with and without rotary positions."""
        return self.qk_head_dim + self.qk_pos_emb_head_dim
