"""Rotary position embedding (Su et al. 2021, section 3.4).

By default channels i and i + dim/2 form a pair, as in Llama's Hugging Face weights.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import lru_cache

import torch
from torch import Tensor

from megapipe.config import ModelConfig
from megapipe.distributed.tokens import WHOLE, Cut
from megapipe.models.fused import turned
from megapipe.tensor_parallel.eager import eager

# Llama 3.1: the original context length, and two numbers of turns in that length. Pairs that turn
# less often than LOW are slowed down by the factor, pairs that turn more often than HIGH are not,
# and the pairs in between are interpolated.
ORIGINAL = 8192
LOW = 1.0
HIGH = 4.0
# YaRN, with Megatron-LM's defaults: the same three numbers; FAST corresponds to HIGH.
YARN_ORIGINAL = 4096
YARN_FAST = 32
YARN_SLOW = 1


def growth(factor: float, weight: float) -> float:
    """Return YaRN's attention factor, 0.1 weight ln(factor) + 1 (Peng et al. 2023, equation 15).

    Args:
        factor: how many times longer the context has become; 1 or less gives 1.
        weight: 1 in the paper; --mscale or --mscale-all-dim.
    """
    if factor <= 1:
        return 1.0
    return 0.1 * weight * math.log(factor) + 1.0


@dataclass(frozen=True)
class Rotary:
    """The parameters of a rotary embedding.

    `of` and `of_latents` make it from flags. Channels are rotated in pairs. `frequencies` returns
    the angle of each pair for one position.

    Attributes:
        dim: number of channels of a head that are rotated, from the first.
        base: the base of the frequencies base^(-2i/dim).
        interleaved: channels 2i and 2i+1 are a pair; otherwise i and i + dim/2.
        scaling: Llama 3.1's factor for low frequencies; None to leave them.
        high: `scaling` leaves pairs that turn more often than this in the original length.
        share: the share of the pairs, from the first, that are rotated.
        yarn: YaRN's factor; None to leave the frequencies.
        original: the tokens of a sequence before YaRN stretches positions.
        fast, slow: YaRN keeps the frequency of pairs that turn at least `fast` times in `original`
            tokens, and slows pairs that turn at most `slow` times.
        rounded: whether the limits between kept, mixed and slowed pairs are rounded to whole pairs.
        stretch: factor by which all positions are divided.
        length: factor by which rotation changes the length (norm) of the vectors.
        divisors: longrope's two lists of numbers that divide the frequencies, one for each pair.
            The first list is for sequences of at most `original` tokens, the second for longer
            ones. None to leave the frequencies.
    """

    dim: int
    base: float = 10000.0
    interleaved: bool = False
    scaling: float | None = None
    high: float = HIGH
    share: float = 1.0
    yarn: float | None = None
    length: float = 1.0
    original: int = YARN_ORIGINAL
    fast: float = YARN_FAST
    slow: float = YARN_SLOW
    rounded: bool = True
    stretch: float = 1.0
    divisors: tuple[tuple[float, ...], tuple[float, ...]] | None = None

    @staticmethod
    def of(config: ModelConfig) -> Rotary:
        """Return the rotation of self-attention's queries and keys that the flags describe."""
        dim = int(config.head_dim * config.rotary_percent)
        plain = Rotary(dim, config.rotary_base, config.rotary_interleaved)
        if config.rotary_proportional:
            plain = replace(plain, dim=config.head_dim, share=config.rotary_percent)
        if config.position_embedding_type == "yarn":
            factor = config.rotary_scaling_factor
            return replace(
                plain,
                yarn=factor,
                length=growth(factor, config.mscale) / growth(factor, config.mscale_all_dim),
                original=config.yarn_original_max_position_embeddings,
                fast=config.yarn_beta_fast,
                slow=config.yarn_beta_slow,
                rounded=not config.no_yarn_correction_range_round_to_int,
            )
        if config.position_embedding_type == "longrope":
            return replace(
                plain,
                length=config.longrope_attention_factor,
                original=config.longrope_original_max_position_embeddings,
                divisors=(config.longrope_short_factor, config.longrope_long_factor),
            )
        scaling = config.rope_scaling_factor if config.use_rope_scaling else None
        return replace(
            plain,
            scaling=scaling,
            high=config.rope_scaling_high_freq_factor,
            stretch=config.rotary_seq_len_interpolation_factor,
        )

    @staticmethod
    def of_latents(config: ModelConfig) -> Rotary:
        """Return the rotation of latent attention's rotated channels, in pairs of neighbours."""
        dim = config.qk_pos_emb_head_dim
        base = config.rotary_base
        if config.rope_type == "rope":
            return Rotary(int(dim * config.rotary_percent), base, interleaved=True)
        factor = config.rotary_scaling_factor
        # DeepSeek's form of YaRN: the rotated channels grow by this ratio, and LatentAttention
        # scales all scores by the square of the denominator.
        length = growth(factor, config.mscale) / growth(factor, config.mscale_all_dim)
        return Rotary(dim, base, interleaved=True, yarn=factor, length=length)

    def frequencies(self, device: torch.device | None = None, tokens: int = 0) -> Tensor:
        """Return the angle in radians per position of each pair of channels: [dim / 2], float64.

        tokens: length of the whole sequences, by which longrope chooses its divisors. A `device` of
            None is torch's default.
        """
        exponents = torch.arange(0, self.dim, 2, dtype=torch.float64, device=device)
        plain = self.base ** (-exponents / self.dim) / self.stretch
        plain[int(self.share * self.dim / 2) :] = 0
        if self.divisors is not None:
            divisors = self.divisors[tokens > self.original]
            return plain / torch.tensor(divisors, dtype=plain.dtype, device=device)
        if self.yarn is not None:
            keep = self._kept_by_yarn(plain)
            return keep * plain + (1 - keep) * plain / self.yarn
        if self.scaling is None:
            return plain
        wavelength = 2 * math.pi / plain
        # Llama 4 Scout has no pairs in between, as both numbers are 1.
        width = max(self.high - LOW, 1e-9)
        keep = ((ORIGINAL / wavelength - LOW) / width).clamp(0, 1)
        return keep * plain + (1 - keep) * plain / self.scaling

    def _kept_by_yarn(self, plain: Tensor) -> Tensor:
        """Return how much of its plain frequency each pair of channels keeps under YaRN: [dim / 2].

        The number is 1 for fast pairs, and 0 for slow pairs, whose frequency is divided by the
        factor. The number falls linearly in between.

        Args:
            plain: [dim / 2], the frequencies without YaRN.
        """

        def pair(turns: float) -> float:
            """Return the fractional index of the pair that turns this often in the old context."""
            turn_length = self.original / (turns * 2 * math.pi)
            return self.dim * math.log(turn_length) / (2 * math.log(self.base))

        low = pair(self.fast)
        high = pair(self.slow)
        if self.rounded:
            low = math.floor(low)
            high = math.ceil(high)
        low = max(low, 0)
        high = min(high, self.dim - 1)
        pairs = torch.arange(len(plain), dtype=plain.dtype, device=plain.device)
        # 0.001, as in Megatron-LM, where both ends of the ramp fall on one pair.
        ramp = (pairs - low) / max(high - low, 0.001)
        return 1 - ramp.clamp(0, 1)


@eager  # a compiler does not see the cache
@lru_cache(maxsize=64)  # one entry for each slice and device
def rotary_table(
    length: int, rotary: Rotary, device: torch.device, dtype: torch.dtype, cut: Cut = WHOLE
) -> tuple[Tensor, Tensor]:
    """Return cos and sin of position x frequency, computed in float64 and kept in `dtype`.

    Args:
        length: tokens of the whole sequences.
        rotary: the frequencies.
        cut: selects the positions of one rank and slice; by default all.
    Returns: (cos, sin), each [number of positions, 1, 1, dim]. They are cached: do not change them.
    """
    rows = cut.take(torch.arange(length, dtype=torch.float64, device=device), 0)
    angle = rows.outer(rotary.frequencies(device, length))
    # Both channels of a pair turn by one angle.
    angle = torch.cat((angle, angle), dim=-1)[:, None, None, :]
    # Float64 up to here: a float32 angle at position 131,071 may be wrong by 0.003.
    cos = angle.cos() * rotary.length
    sin = angle.sin() * rotary.length
    return cos.to(dtype), sin.to(dtype)


def rotate(x: Tensor, rotary: Rotary, positions: Tensor | None = None, cut: Cut = WHOLE) -> Tensor:
    """Rotate the first channels of every head by the token's position.

    Args:
        x: [s/c, b, heads, head_dim], the tokens that the cut selects.
        rotary: says which channels rotate, and how fast.
        positions: [s/c, b], each below s; by default the index in the whole sequence.
        cut: which tokens of the whole sequence are in x; by default all.
    Returns: the shape and type of x.
    """
    wide = torch.promote_types(x.dtype, torch.float32)
    length = cut.whole(x.shape[0])
    if positions is None:
        cos, sin = rotary_table(length, rotary, x.device, wide, cut)
    else:
        # Positions restart in documents: any row of the whole table may be needed.
        table = rotary_table(length, rotary, x.device, wide, WHOLE)
        cos = table[0][positions, 0]
        sin = table[1][positions, 0]
    return turned(x, cos, sin, rotary.interleaved)


@eager
def temperature(
    x: Tensor, beta: float, length: int, first: int, positions: Tensor | None, cut: Cut
) -> Tensor:
    """Return the factor 1 + beta ln(1 + floor(position / length)) of each query.

    Args:
        x: [s/c, b, heads, d], the queries; their numbers are not read.
        beta, length: as in the formula.
        first: the position of a sequence's first token, 0 or 1.
        positions: [s/c, b]; None for the index in the whole sequence.
        cut: which tokens of the whole sequence are in x.
    Returns: [s/c, 1 or b, 1, 1], in the type of x.
    """
    if positions is None:
        rows = torch.arange(cut.whole(x.shape[0]), device=x.device)
        positions = cut.take(rows, 0)[:, None]
    turns = (positions + first).div(length, rounding_mode="floor")
    factor = 1 + beta * turns.double().log1p()
    return factor[..., None, None].to(x.dtype)
