"""An identity that brings along the gradient of another tensor, as of a loss that stands next to the output."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


class _Beside(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, other: Tensor, grad: Tensor | Callable[[], Tensor]) -> Tensor:
        ctx.grad = grad
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        return grad, ctx.grad() if callable(ctx.grad) else ctx.grad, None


beside: Callable[[Tensor, Tensor, Tensor | Callable[[], Tensor]], Tensor] = _Beside.apply
"""(x, other, grad) -> x, and where x has a gradient the other tensor has this one, as it is then."""
