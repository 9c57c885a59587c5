"""Give a tensor a gradient during the backward pass of another tensor.

A loss that is not on the path to the output, such as a router's, gets its gradient in this way.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


class _Attached(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, other: Tensor, grad: Tensor | Callable[[], Tensor]) -> Tensor:
        ctx.grad = grad
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        if callable(ctx.grad):
            return grad, ctx.grad(), None
        return grad, ctx.grad, None


def attach_gradient(x: Tensor, other: Tensor, grad: Tensor | Callable[[], Tensor]) -> Tensor:
    """Return x; when x receives its gradient, `other` receives the gradient `grad`.

    Args:
        grad: of other's shape; or a function that returns it, called in the backward pass.
    """
    return _Attached.apply(x, other, grad)  # type: ignore[no-any-return, no-untyped-call]
