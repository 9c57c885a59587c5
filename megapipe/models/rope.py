"""Rotary position embedding (Su et al. 2021, section 3.4), half-split as in Llama's Hugging Face weights."""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor


@lru_cache(maxsize=8)
def rotary_table(length: int, dim: int, base: float, device: torch.device, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """cos and sin of position x frequency, each [length, 1, 1, dim]; computed in float64, kept in `dtype`."""
    frequency = base ** (-torch.arange(0, dim, 2, dtype=torch.float64, device=device) / dim)
    angle = torch.arange(length, dtype=torch.float64, device=device).outer(frequency)
    angle = torch.cat((angle, angle), dim=-1)[:, None, None, :]
    return angle.cos().to(dtype), angle.sin().to(dtype)


def rotate(x: Tensor, dim: int, base: float) -> Tensor:
    """Rotate the first `dim` channels of every head by its position.

    Args:
        x: [s, b, heads, head_dim]; position is the index in s.
    """
    wide = torch.promote_types(x.dtype, torch.float32)
    cos, sin = rotary_table(x.shape[0], dim, base, x.device, wide)
    turn, rest = x[..., :dim].to(wide), x[..., dim:]
    half = dim // 2
    swapped = torch.cat((-turn[..., half:], turn[..., :half]), dim=-1)
    turned = (turn * cos + swapped * sin).to(x.dtype)
    return torch.cat((turned, rest), dim=-1) if rest.shape[-1] else turned
