"""The matrix product of linear layers, by the kernel that is fast where it runs.

MKL, which torch calls for float32 on a CPU, uses half the vector width of processors that are not Intel's; oneDNN,
which torch is built with too, the whole of it.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

_ONEDNN = hasattr(torch.ops.mkldnn, "_linear_pointwise")
_ONEDNN_FROM = 1 << 20
"""Multiplications: below, finding oneDNN's kernel takes longer than it saves."""


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x W^T + b outside of autograd, with x [..., in], weight [out, in] of any strides and bias [out].

    A linear layer's other two products are this one too: the input's gradient linear(dy, weight.t()) and, of
    dy [n, out] and x [n, in], the weight's linear(dy.t(), x.t()).
    """
    large = x.numel() * weight.shape[0] >= _ONEDNN_FROM
    if large and _ONEDNN and x.dtype == torch.float32 and x.device.type == "cpu":
        return torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")  # type: ignore[no-any-return]
    return F.linear(x, weight, bias)
