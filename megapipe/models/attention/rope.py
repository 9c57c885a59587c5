"""Rotary position embedding (Su et al. 2021, section 3.4), half-split as in Llama's Hugging Face weights by default."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from megapipe.config import ModelConfig
from megapipe.distributed.tokens import WHOLE, Cut
from megapipe.models.fused import turned
from megapipe.tensor_parallel.eager import eager

# Llama 3.1: wavelengths above ORIGINAL / LOW turn slower, those below ORIGINAL / HIGH as ever, the others in between.
ORIGINAL, LOW, HIGH = 8192, 1.0, 4.0
# YaRN, with Megatron-LM's numbers: from so many positions; pairs that turn as often in these, or more, turn as ever,
# those below the second number so much slower, the others in between.
YARN_ORIGINAL, YARN_FAST, YARN_SLOW = 4096, 32, 1


def growth(factor: float, weight: float) -> float:
    """YaRN's attention factor for positions stretched so far (Peng et al. 2023, equation 15)."""
    return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0


@dataclass(frozen=True)
class Rotary:
    """A rotation.

    Attributes:
        dim: channels of a head that are rotated, from the first.
        base: of the frequencies base^(-2i/dim).
        interleaved: channels 2i and 2i+1 are a pair; otherwise i and i + dim/2.
        scaling: Llama 3.1's factor for low frequencies; None for none.
        yarn: YaRN's factor; None for none.
        length: of what is rotated, in times of what it was.
    """

    dim: int
    base: float = 10000.0
    interleaved: bool = False
    scaling: float | None = None
    yarn: float | None = None
    length: float = 1.0

    @staticmethod
    def of(config: ModelConfig) -> Rotary:
        """The rotation that the flags describe."""
        return Rotary(
            int(config.head_dim * config.rotary_percent),
            config.rotary_base,
            config.rotary_interleaved,
            config.rope_scaling_factor if config.use_rope_scaling else None,
        )

    @staticmethod
    def of_latents(config: ModelConfig) -> Rotary:
        """That of the channels beside attention's latents, whose pairs are neighbours."""
        dim, base = config.qk_pos_emb_head_dim, config.rotary_base
        if config.rope_type == "rope":
            return Rotary(int(dim * config.rotary_percent), base, interleaved=True)
        factor = config.rotary_scaling_factor
        length = growth(factor, config.mscale) / growth(factor, config.mscale_all_dim)
        return Rotary(dim, base, interleaved=True, yarn=factor, length=length)

    def frequencies(self, device: torch.device | None = None) -> Tensor:
        """Radians per position of each pair, [dim / 2] in float64."""
        plain = self.base ** (-torch.arange(0, self.dim, 2, dtype=torch.float64, device=device) / self.dim)
        if self.yarn is not None:
            keep = self._kept_by_yarn(plain)
            return keep * plain + (1 - keep) * plain / self.yarn
        if self.scaling is None:
            return plain
        wavelength = 2 * math.pi / plain
        keep = ((ORIGINAL / wavelength - LOW) / (HIGH - LOW)).clamp(0, 1)
        return keep * plain + (1 - keep) * plain / self.scaling

    def _kept_by_yarn(self, plain: Tensor) -> Tensor:
        """1 for pairs that turn as ever, 0 for those that turn slower: a ramp between two pairs."""

        def pair(turns: float) -> float:
            """Whose frequency turns so often in the original length."""
            return self.dim * math.log(YARN_ORIGINAL / (turns * 2 * math.pi)) / (2 * math.log(self.base))

        low, high = max(math.floor(pair(YARN_FAST)), 0), min(math.ceil(pair(YARN_SLOW)), self.dim - 1)
        ramp = (torch.arange(len(plain), dtype=plain.dtype, device=plain.device) - low) / max(high - low, 0.001)
        return 1 - ramp.clamp(0, 1)


@eager  # a compiler does not see the cache
@lru_cache(maxsize=64)  # of each slice
def rotary_table(
    length: int, rotary: Rotary, device: torch.device, dtype: torch.dtype, cut: Cut = WHOLE
) -> tuple[Tensor, Tensor]:
    """cos and sin of position x frequency, each [rows, 1, 1, dim]; computed in float64, kept in `dtype`."""
    rows = cut.take(torch.arange(length, dtype=torch.float64, device=device), 0)
    angle = rows.outer(rotary.frequencies(device))
    angle = torch.cat((angle, angle), dim=-1)[:, None, None, :]
    return (angle.cos() * rotary.length).to(dtype), (angle.sin() * rotary.length).to(dtype)


def rotate(x: Tensor, rotary: Rotary, positions: Tensor | None = None, cut: Cut = WHOLE) -> Tensor:
    """Rotate the first channels of every head by its position.

    Args:
        x: [s/c, b, heads, head_dim], the tokens of the cut.
        positions: [s/c, b], below s; default: the index in s.
    """
    wide = torch.promote_types(x.dtype, torch.float32)
    cos, sin = rotary_table(cut.whole(x.shape[0]), rotary, x.device, wide, cut if positions is None else WHOLE)
    if positions is not None:
        cos, sin = cos[positions, 0], sin[positions, 0]
    return turned(x, cos, sin, rotary.interleaved)
