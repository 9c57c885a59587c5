"""float32 products by a processor's tiles (tiles.c): where it has them, Linux lends them and there is a C compiler.

They take 0.6 to 0.7 of MKL's time and lie nearer to the exact product: 32 numbers of a sum are added before they meet
its other parts. Two things differ from it: numbers below 1e-33 lose their last bits, and infinities become NaN.
"""

from __future__ import annotations

import ctypes
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from megapipe.compiled import compiled
from megapipe.kernels.cpu import FLAGS

_SOURCES = (Path(__file__).with_name("tiles.c"),)
_FROM = 1 << 20
"""Multiplications: below, laying the operands out takes longer than it saves."""


@cache
def library() -> ctypes.CDLL | None:
    """The compiled product; None where it cannot be made or run."""
    made = compiled("tiles", _SOURCES, FLAGS) if torch.cpu._is_amx_tile_supported() else None
    if made is None or not made.tiles_allowed():
        return None
    p, n = ctypes.c_void_p, ctypes.c_int64
    made.product.argtypes = (p, n, n, p, n, n, p, n, n, n, n, p, n)
    return made


def has_tiles(x: Tensor, weight: Tensor) -> bool:
    """Can `product` take x [..., in] and weight [out, in], and does it pay?"""
    return (
        x.dtype == weight.dtype == torch.float32
        and x.device.type == "cpu"
        and x.numel() * weight.shape[0] >= _FROM
        and type(x) is Tensor
        and type(weight) in (Tensor, torch.nn.Parameter)
        and 1 in weight.stride()
        and not torch.compiler.is_compiling()
        and library() is not None
    )


def product(x: Tensor, weight: Tensor, bias: Tensor | None = None, into: Tensor | None = None) -> Tensor:
    """x W^T + b of x [..., in], weight [out, in] and bias [out], all float32; or into [n, out] += x W^T."""
    rows = x if x.dim() == 2 and 1 in x.stride() else x.reshape(-1, x.shape[-1]).contiguous()
    out = x.new_empty(len(rows), len(weight)) if into is None else into
    given = [part for t in (rows, weight) for part in (t.data_ptr(), *t.stride())]
    sizes = (out.data_ptr(), out.stride(0), len(rows), *weight.shape)
    made = library()
    assert made is not None
    made.product(*given, *sizes, None if bias is None else bias.data_ptr(), into is not None)
    return out.view(*x.shape[:-1], len(weight)) if into is None else into
