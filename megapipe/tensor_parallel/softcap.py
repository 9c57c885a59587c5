"""Soft caps of logits, c tanh(x / c) (Gemma 2 report, section 2), with their derivative."""

from __future__ import annotations

import torch
from torch import Tensor


def capped(x: Tensor, cap: float | None) -> Tensor:
    """Return c tanh(x / c), or x itself if the cap c is None. Autograd keeps one tensor like x."""
    return x if cap is None else torch.tanh(x / cap) * cap


def cap_(x: Tensor, cap: float | None) -> Tensor:
    """Replace x by c tanh(x / c) in place and return it; a cap of None changes nothing."""
    return x if cap is None else x.div_(cap).tanh_().mul_(cap)


def slope_of(x: Tensor, cap: float) -> Tensor:
    """Return the derivative of the cap where its value is x: 1 - (x / c)^2."""
    return 1 - (x / cap).square_()
