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


@dataclass(frozen=True)
class Rotary:
    """A rotation.

    Attributes:
        dim: channels of a head that are rotated, from the first.
        base: of the frequencies base^(-2i/dim).
        interleaved: channels 2i and 2i+1 are a pair; otherwise i and i + dim/2.
        scaling: Llama 3.1's factor for low frequencies; None for none.
    """

    dim: int
    base: float = 10000.0
    interleaved: bool = False
    scaling: float | None = None

    @staticmethod
    def of(config: ModelConfig) -> Rotary:
        """The rotation that the flags describe."""
        return Rotary(
            int(config.head_dim * config.rotary_percent),
            config.rotary_base,
            config.rotary_interleaved,
            config.rope_scaling_factor if config.use_rope_scaling else None,
        )

    def frequencies(self, device: torch.device | None = None) -> Tensor:
        """Radians per position of each pair, [dim / 2] in float64."""
        plain = self.base ** (-torch.arange(0, self.dim, 2, dtype=torch.float64, device=device) / self.dim)
        if self.scaling is None:
            return plain
        wavelength = 2 * math.pi / plain
        keep = ((ORIGINAL / wavelength - LOW) / (HIGH - LOW)).clamp(0, 1)
        return keep * plain + (1 - keep) * plain / self.scaling


@eager  # a compiler does not see the cache
@lru_cache(maxsize=8)
def rotary_table(
    length: int, rotary: Rotary, device: torch.device, dtype: torch.dtype, cut: Cut = WHOLE
) -> tuple[Tensor, Tensor]:
    """cos and sin of position x frequency, each [length/c, 1, 1, dim]; computed in float64, kept in `dtype`."""
    rows = cut.take(torch.arange(length, dtype=torch.float64, device=device), 0)
    angle = rows.outer(rotary.frequencies(device))
    angle = torch.cat((angle, angle), dim=-1)[:, None, None, :]
    return angle.cos().to(dtype), angle.sin().to(dtype)


def rotate(x: Tensor, rotary: Rotary, positions: Tensor | None = None, cut: Cut = WHOLE) -> Tensor:
    """Rotate the first channels of every head by its position.

    Args:
        x: [s/c, b, heads, head_dim], the tokens of the cut.
        positions: [s/c, b], below s; default: the index in s.
    """
    wide = torch.promote_types(x.dtype, torch.float32)
    cos, sin = rotary_table(x.shape[0] * cut.size, rotary, x.device, wide, cut if positions is None else WHOLE)
    if positions is not None:
        cos, sin = cos[positions, 0], sin[positions, 0]
    return turned(x, cos, sin, rotary.interleaved)
