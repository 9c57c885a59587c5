"""Rotary positions, stretched for sequences longer than in the first training."""

from __future__ import annotations

from dataclasses import dataclass
from math import inf
from typing import Annotated

from megapipe.config.notes import ABOVE_0, FROM_0, FROM_1, MUST, Range, of_no_layer

TURNED = of_no_layer(
    lambda m: m.position_embedding_type != "rope" or m.multi_latent_attention,
    "rotary positions are not interpolated, without --position-embedding-type rope",
)
SCALED = of_no_layer(
    lambda m: not m.use_rope_scaling,
    "low frequencies are not scaled, without --use-rope-scaling",
)
ROTATED_HEADS = of_no_layer(
    lambda m: not m.rotates or m.multi_latent_attention or m.rotary_percent == 1,
    "all channels of a head are rotated, or none",
)
YARN_ALONE = of_no_layer(
    lambda m: m.position_embedding_type != "yarn" or m.multi_latent_attention,
    "heads are not rotated by yarn, without --position-embedding-type yarn",
)

LONGROPE_ALONE = of_no_layer(
    lambda m: m.position_embedding_type != "longrope" or m.multi_latent_attention,
    "heads are not rotated by longrope, without --position-embedding-type longrope",
)

FACTORS = Range("above 0 and finite", lambda v: all(0 < x < inf for x in v))


@dataclass(frozen=True)
class LongRopeConfig:
    """The settings of longrope (Ding et al. 2024), which divides each rotary frequency by a number.

    All layers have the same numbers.
    """

    longrope_short_factor: Annotated[tuple[float, ...], FACTORS, MUST, LONGROPE_ALONE] = ()
    """Divisors of the frequencies of rotated pairs in sequences of the original length or less.
    Not in Megatron-LM."""
    longrope_long_factor: Annotated[tuple[float, ...], FACTORS, MUST, LONGROPE_ALONE] = ()
    """The same for longer sequences, whose tokens all have these. Not in Megatron-LM."""
    longrope_original_max_position_embeddings: Annotated[int, FROM_1, MUST, LONGROPE_ALONE] = 4096
    """The longest sequence with the short factors. Not in Megatron-LM."""
    longrope_attention_factor: Annotated[float, ABOVE_0, MUST, LONGROPE_ALONE] = 1.0
    """Factor on the length of rotated queries and keys. Not in Megatron-LM."""


@dataclass(frozen=True)
class RotaryConfig:
    """Settings that stretch rotary positions to longer sequences, such as yarn's."""

    rope_scaling_high_freq_factor: Annotated[float, FROM_1, MUST, SCALED] = 4.0
    """--use-rope-scaling leaves pairs of channels that turn more often than this in 8192 tokens.
    Llama 4 Scout has 1. Not in Megatron-LM."""
    rotary_proportional: Annotated[bool, MUST, ROTATED_HEADS] = False
    """Choose the channels of --rotary-percent among the pairs of a whole head, fast ones first, as
    Gemma 4. Not in Megatron-LM."""
    rotary_seq_len_interpolation_factor: Annotated[float, ABOVE_0, MUST, TURNED] = 1.0
    """Divide rotary positions by this factor (Chen et al. 2023)."""
    yarn_original_max_position_embeddings: Annotated[int, FROM_1, MUST, YARN_ALONE] = 4096
    """Sequence length of the training before yarn stretched the positions."""
    yarn_beta_fast: Annotated[float, ABOVE_0, MUST, YARN_ALONE] = 32.0
    """Yarn leaves pairs of channels that turn at least this often in the original length."""
    yarn_beta_slow: Annotated[float, ABOVE_0, MUST, YARN_ALONE] = 1.0
    """Yarn slows down fully the pairs that turn at most this often in the original length."""
    no_yarn_correction_range_round_to_int: Annotated[bool, MUST, YARN_ALONE] = False
    """Do not round both ends of yarn's range of pairs to whole pairs, as gpt-oss."""
    yarn_temperature_beta: Annotated[float, FROM_0, MUST, YARN_ALONE] = 0.0
    """Multiply queries by 1 + beta ln(1 + floor(position / original length)) with this beta, as
    Ministral 3. Not in Megatron-LM."""
