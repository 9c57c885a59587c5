"""The matrix products of linear layers, by the kernel that is fast where it runs.

MKL, which torch calls for float32 on a CPU, uses half the vector width of processors that are not Intel's; oneDNN,
which torch is built with too, the whole of it. On Intel's MKL is the faster one, and adds to what is there at no cost.
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
_ONEDNN = hasattr(torch.ops.mkldnn, "_linear_pointwise") and not (_MKL and _intel())
_TILES = torch.cpu._is_amx_tile_supported()
_ONEDNN_FROM = 1 << 20
"""Multiplications: below, finding oneDNN's kernel takes longer than it saves."""


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x W^T + b outside of autograd, with x [..., in], weight [out, in] of any strides and bias [out].

    A linear layer's other two products are this one too: the input's gradient linear(dy, weight.t()) and, of
    dy [n, out] and x [n, in], the weight's linear(dy.t(), x.t()).
    """
    if _by_onednn(x, weight):
        return torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")  # type: ignore[no-any-return]
    return F.linear(x, weight, bias)


def linear_into(out: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """`linear` that leaves its result in out [..., out], which is contiguous and of x's type."""
    if not out.is_cuda:
        return out.copy_(linear(x, weight, bias))
    rows, into = x.reshape(-1, x.shape[-1]), out.view(-1, out.shape[-1])
    if bias is None:
        torch.mm(rows, weight.t(), out=into)
    else:
        torch.addmm(bias, rows, weight.t(), out=into)
    return out


def _by_onednn(x: Tensor, weight: Tensor) -> bool:
    large = x.numel() * weight.shape[0] >= _ONEDNN_FROM
    return large and _ONEDNN and x.dtype == torch.float32 and x.device.type == "cpu"


def add_linear(into: Tensor, x: Tensor, weight: Tensor) -> None:
    """into [n, out] += x W^T, with x [n, in] and weight [out, in] of into's type."""
    if _by_onednn(x, weight):
        into.add_(linear(x, weight))
    else:
        into.addmm_(x, weight.t())


def add_product(main_grad: Tensor, dy: Tensor, x: Tensor) -> None:
    """main_grad [out, in] += dy^T x, with dy [n, out] and x [n, in].

    The sum over microbatches is always in main_grad's type. The product of one microbatch is too on a GPU; CPU kernels
    round a bf16 product once (relative error 2^-9), since the same in float32 takes four to five times as long.
    """
    if dy.dtype == main_grad.dtype:
        add_linear(main_grad, dy.t(), x.t())
    elif not dy.is_cuda:
        _add_rounded(main_grad, dy, x)
    else:
        torch.addmm(main_grad, dy.t(), x, out_dtype=main_grad.dtype, out=main_grad)


def _add_rounded(main_grad: Tensor, dy: Tensor, x: Tensor) -> None:
    """`add_product` on a CPU of what has fewer bits than main_grad."""
    if not has_loops(main_grad, dy, x) or main_grad.dtype != torch.float32:
        main_grad.add_(linear(dy.t(), x.t()))
    elif not _TILES:
        kernels.add_bf16_(main_grad, linear(dy.t(), x.t()))
    elif dy.shape[1] <= x.shape[1]:
        # A processor's tiles multiply rows. Of columns torch's kernels make them, at half the speed, so the smaller
        # one of the two is transposed before.
        kernels.add_bf16_(main_grad, linear(kernels.transposed(dy), x.t()))
    else:
        kernels.add_transposed_(main_grad, linear(kernels.transposed(x), dy.t()))


class Products:
    """The three products of a linear layer, in the type of what is multiplied. `fp8` has others.

    Attributes:
        by_rows: a row of the first two depends on no other, so that they may be made in pieces.
    """

    by_rows = True

    def forward(self, x: Tensor, weight: Tensor, bias: Tensor | None = None, *, out: Tensor | None = None) -> Tensor:
        """x W^T + b, with x [..., in], weight [out, in] and bias [out] -> [..., out]; left in `out` if there is one."""
        return linear(x, weight, bias) if out is None else linear_into(out, x, weight, bias)

    def input_grad(self, dy: Tensor, weight: Tensor, *, out: Tensor | None = None) -> Tensor:
        """dy W, with dy [..., out] -> [..., in]; left in `out` if there is one."""
        return linear(dy, weight.t()) if out is None else linear_into(out, dy, weight.t())

    def weight_grad(self, dy: Tensor, x: Tensor) -> Tensor:
        """dy^T x, with dy [n, out] and x [n, in] -> [out, in]."""
        return linear(dy.t(), x.t())

    def add_weight_grad(self, main_grad: Tensor, dy: Tensor, x: Tensor) -> None:
        """main_grad [out, in] += dy^T x, with dy [n, out] and x [n, in]."""
        add_product(main_grad, dy, x)


PLAIN = Products()
