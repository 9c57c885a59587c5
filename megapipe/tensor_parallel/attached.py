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
        # `other` is not read. As an argument it becomes an input of the graph, so that backward can
        # return a gradient for it.
        ctx.grad = grad
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        # A function, where the gradient is not known yet. The loss of a router in slices depends on
        # the choices of later slices.
        if callable(ctx.grad):
            return grad, ctx.grad(), None
        return grad, ctx.grad, None


def attach_gradient(x: Tensor, other: Tensor, grad: Tensor | Callable[[], Tensor]) -> Tensor:
    """Return a view of x. When the view gets its gradient in backward, `other` gets `grad`.

    A loss of a layer can thus be differentiated without being added to the model's loss.

    Args:
        x: any tensor on the path to the model's loss.
        other: the tensor that receives `grad`; its values are not used.
        grad: of other's shape; or a function that returns it, called in the backward pass.
    """
    return _Attached.apply(x, other, grad)  # type: ignore[no-any-return, no-untyped-call]
