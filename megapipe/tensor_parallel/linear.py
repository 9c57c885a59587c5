"""Linear layers split over tensor-parallel ranks (Shoeybi et al. 2019, section 3).

Column: each rank computes its slice of the output. Row: each rank takes its slice of the input and the partial outputs
are summed. Weight gradients go straight into the weight's `main_grad` and can be put off to a W pass.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megapipe.mesh import Axis, Layout, set_layout
from megapipe.tensor_parallel.collectives import gather_from_tensor_parallel, reduce_from_tensor_parallel
from megapipe.tensor_parallel.weight_grad import accumulate_weight_grad, current_weight_grads


class _Linear(torch.autograd.Function):
    """y = x W^T + b; backward sums the input's gradient over tp (if asked) and hands on the weight's."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, reduce_grad: Axis | None) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.bias = bias
        ctx.reduce_grad = reduce_grad
        ctx.weight_grads = current_weight_grads()
        return F.linear(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None, None]:
        x, weight = ctx.saved_tensors
        grad_x = grad_weight = grad_bias = None
        if ctx.needs_input_grad[0]:
            grad_x = grad @ weight
            if ctx.reduce_grad is not None:
                grad_x = ctx.reduce_grad.all_reduce(grad_x)
        if ctx.needs_input_grad[1]:
            grad_weight = accumulate_weight_grad(weight, grad, x, ctx.weight_grads)
        if ctx.needs_input_grad[2]:
            grad_bias = _bias_grad(ctx.bias, grad)
        return grad_x, grad_weight, grad_bias, None


_linear: Callable[..., Tensor] = _Linear.apply


def _bias_grad(bias: Tensor, grad: Tensor) -> Tensor | None:
    rows = grad.reshape(-1, grad.shape[-1])
    main_grad: Tensor | None = getattr(bias, "main_grad", None)
    if main_grad is None:
        return rows.sum(0)
    main_grad.add_(rows.sum(0, dtype=main_grad.dtype))
    return None


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None, *, reduce_grad: Axis | None = None) -> Tensor:
    """x [..., in], weight [out, in], bias [out] -> [..., out]; the input's gradient is summed over `reduce_grad`."""
    return _linear(x, weight, bias, reduce_grad)


class ColumnParallelLinear(nn.Module):
    """Output split over tp: weight [out/t, in], bias [out/t].

    Args:
        input_size, output_size: of the whole layer; output_size must divide by tp.
        gather_output: return the whole output instead of this rank's slice.
        blocks: the output is this many equal parts, each split over tp on its own (2 for gate and up of SwiGLU).
        init_std: standard deviation of the initial weight.
    """

    def __init__(
        self,
        input_size: int,
        output_size: int,
        *,
        tp: Axis,
        bias: bool,
        gather_output: bool = False,
        blocks: int = 1,
        init_std: float = 0.02,
        tied_to: str | None = None,
    ) -> None:
        super().__init__()
        assert output_size % (blocks * tp.size) == 0, f"{output_size} outputs do not divide over {tp.size} ranks"
        self.tp = tp
        self.gather_output = gather_output
        rows = output_size // tp.size
        shape = (output_size,) if blocks == 1 else (blocks, output_size // blocks)
        dim = len(shape) - 1
        self.weight = set_layout(
            nn.Parameter(torch.empty(rows, input_size)), Layout((*shape, input_size), dim, tied_to, std=init_std)
        )
        self.bias = set_layout(nn.Parameter(torch.empty(rows)), Layout(shape, dim)) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        """x [..., in], the same on all tp ranks -> [..., out/t], or [..., out] with gather_output."""
        y = linear(x, self.weight, self.bias, reduce_grad=self.tp)
        return gather_from_tensor_parallel(y, self.tp) if self.gather_output else y


class RowParallelLinear(nn.Module):
    """Input split over tp: weight [out, in/t], bias [out], added once after the sum.

    Args:
        input_size, output_size: of the whole layer; input_size must divide by tp.
        init_std: standard deviation of the initial weight.
    """

    def __init__(self, input_size: int, output_size: int, *, tp: Axis, bias: bool, init_std: float = 0.02) -> None:
        super().__init__()
        assert input_size % tp.size == 0, f"{input_size} inputs do not divide over {tp.size} ranks"
        self.tp = tp
        self.weight = set_layout(
            nn.Parameter(torch.empty(output_size, input_size // tp.size)),
            Layout((output_size, input_size), 1, std=init_std),
        )
        self.bias = set_layout(nn.Parameter(torch.empty(output_size)), Layout((output_size,))) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        """x [..., in/t] -> [..., out], the same on all tp ranks."""
        if self.tp.size == 1:
            return linear(x, self.weight, self.bias)
        y = reduce_from_tensor_parallel(linear(x, self.weight), self.tp)
        return y if self.bias is None else y + self.bias
