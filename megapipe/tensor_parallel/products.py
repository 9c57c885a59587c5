"""The matrix products of linear layers, each by the kernel that is fast on the device.

torch multiplies float32 matrices on a CPU by MKL. On processors that are not Intel's, MKL uses half
of the vector width; there this file calls oneDNN, which torch includes too, and which uses all of
it. On Intel's processors MKL is faster, and adds a product to a matrix at no cost.
"""

from __future__ import annotations

from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from megapipe.kernels import cpu as kernels
from megapipe.kernels.cpu import has_loops


def _intel(cpuinfo: Path = Path("/proc/cpuinfo")) -> bool:
    return cpuinfo.exists() and "GenuineIntel" in cpuinfo.read_text(errors="replace")


_MKL = torch.backends.mkl.is_available()  # type: ignore[no-untyped-call]
# On the 2-core machine of the measurement MKL had 118 GFLOP/s; oneDNN had 270 forward, and 225 for
# dy^T x.
_ONEDNN = hasattr(torch.ops.mkldnn, "_linear_pointwise") and not (_MKL and _intel())
_TILES = torch.cpu._is_amx_tile_supported()
_ONEDNN_FROM = 1 << 20
"""Multiplications of a product. In a smaller one the look-up of oneDNN's kernel costs too much."""


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return x W^T + b, outside of autograd.

    The gradients of a linear layer are such products, too: linear(dy, weight.t()) is the gradient
    of the input, and linear(dy.t(), x.t()) of the weight, for dy [n, out] and x [n, in].

    Args:
        x: [..., in]. weight: [out, in], of any strides. bias: [out] or None.
    Returns: [..., out].
    """
    if _by_onednn(x, weight):
        return torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")  # type: ignore[no-any-return]
    return F.linear(x, weight, bias)


def linear_into(out: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Write linear(x, weight, bias) to `out`, and return `out`. There is no bias if it is None.

    Args:
        out: [..., out], contiguous and of x's type.
    """
    if not out.is_cuda:
        # Neither oneDNN's operator nor F.linear can write to a given tensor.
        return out.copy_(linear(x, weight, bias))
    rows = x.reshape(-1, x.shape[-1])
    into = out.view(-1, out.shape[-1])
    if bias is None:
        torch.mm(rows, weight.t(), out=into)
    else:
        torch.addmm(bias, rows, weight.t(), out=into)
    return out


def _by_onednn(x: Tensor, weight: Tensor) -> bool:
    is_large = x.numel() * weight.shape[0] >= _ONEDNN_FROM
    return is_large and _ONEDNN and x.dtype == torch.float32 and x.device.type == "cpu"


def add_linear(into: Tensor, x: Tensor, weight: Tensor) -> None:
    """Add x W^T to `into`, in place.

    Args:
        into: [n, out]. x: [n, in]. weight: [out, in]. All of one type.
    """
    if _by_onednn(x, weight):
        into.add_(linear(x, weight))
    else:
        into.addmm_(x, weight.t())


def add_product(main_grad: Tensor, dy: Tensor, x: Tensor) -> None:
    """Add a weight gradient dy^T x to main_grad, in place.

    The sum over microbatches always has main_grad's type. On a GPU the product of one microbatch
    has that type, too. CPU kernels round the product to bf16 first (relative error 2^-9), because
    a float32 product takes four to five times as long.

    Args:
        main_grad: [out, in]. dy: [n, out]. x: [n, in].
    """
    if dy.dtype == main_grad.dtype:
        add_linear(main_grad, dy.t(), x.t())
    elif not dy.is_cuda:
        _add_rounded(main_grad, dy, x)
    else:
        # bf16 operands, float32 sum and result, in one kernel. On a CPU torch has no such operator.
        torch.addmm(main_grad, dy.t(), x, out_dtype=main_grad.dtype, out=main_grad)


def _add_rounded(main_grad: Tensor, dy: Tensor, x: Tensor) -> None:
    """Add a weight gradient dy^T x, in a narrower type than main_grad's, to main_grad on a CPU.

    Args:
        main_grad: [out, in]. dy: [n, out]. x: [n, in].
    """
    if not has_loops(main_grad, dy, x) or main_grad.dtype != torch.float32:
        main_grad.add_(linear(dy.t(), x.t()))
    elif not _TILES:
        kernels.add_bf16_(main_grad, linear(dy.t(), x.t()))
    elif dy.shape[1] <= x.shape[1]:
        # AMX tiles multiply rows. torch's kernels turn columns into rows at half the speed, so the
        # smaller of the two matrices is transposed first.
        kernels.add_bf16_(main_grad, linear(kernels.transposed(dy), x.t()))
    else:
        kernels.add_transposed_(main_grad, linear(kernels.transposed(x), dy.t()))


class Products:
    """The three products of a linear layer, in the type of their operands.

    Subclasses in tensor_parallel.fp8 quantise the operands.

    `forward` computes the output, `input_grad` the gradient of the input, and `weight_grad` the
    gradient of the weight. `add_weight_grad` adds the latter to a main_grad.

    Attributes:
        by_rows: True if each row of `forward` and `input_grad` depends on one row of their first
            operand, so that they may be computed in pieces.
    """

    by_rows = True

    def forward(
        self,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None = None,
        *,
        out: Tensor | None = None,
    ) -> Tensor:
        """Return x W^T + b, written to `out` if it is given.

        Args:
            x: [..., in]. weight: [out, in]. bias: [out] or None.
        Returns: [..., out].
        """
        if out is None:
            return linear(x, weight, bias)
        return linear_into(out, x, weight, bias)

    def input_grad(self, dy: Tensor, weight: Tensor, *, out: Tensor | None = None) -> Tensor:
        """Return dy W, written to `out` unless that is None.

        Args:
            dy: [..., out], the output's gradient. weight: W, [out, in].
        Returns: [..., in].
        """
        if out is None:
            return linear(dy, weight.t())
        return linear_into(out, dy, weight.t())

    def weight_grad(self, dy: Tensor, x: Tensor) -> Tensor:
        """Return dy^T x: dy [n, out] and x [n, in] -> [out, in]."""
        return linear(dy.t(), x.t())

    def add_weight_grad(self, main_grad: Tensor, dy: Tensor, x: Tensor) -> None:
        """Add dy^T x to main_grad [out, in], in place: dy [n, out], x [n, in]."""
        add_product(main_grad, dy, x)


PLAIN = Products()
"""The products without quantisation. They have no state, so all layers share one object."""
