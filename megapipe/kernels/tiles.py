"""Products and causal attention by a processor's tiles (tiles.c, attention.c), if Linux lends them to C compiled here.

Those of float32, which --float32-by-tiles asks for, take 0.64 to 0.84 of MKL's time and lie nearer to the exact product
of numbers of usual size. Their bits are not MKL's, numbers below 1e-31 are held less exactly (to 4e-7 at 1e-32, 2e-3 at
1e-36), and infinities and what is above 3.39e38 become NaN.
"""

from __future__ import annotations

import ctypes
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from megapipe.compiled import compiled
from megapipe.kernels import cpu

_SOURCES = tuple(Path(__file__).with_name(name) for name in ("exp.h", "tiles.h", "tiles.c", "attention.c"))
_FLAGS = ("-O2", *cpu.FLAGS[1:])
"""The compiler's flags. -O3 compiles for three seconds in place of one, to code that is no faster."""
_FROM = 1 << 20
"""The multiplications of a product from which tiles pay: below, laying the operands out takes longer than it saves."""


@cache
def _made() -> ctypes.CDLL | None:
    made = compiled("tiles", _SOURCES, _FLAGS) if torch.cpu._is_amx_tile_supported() else None
    if made is None or not made.tiles_allowed():
        return None
    p, n = ctypes.c_void_p, ctypes.c_int64
    made.product.argtypes = (p, n, n, p, n, n, p, n, n, n, n, p, n)
    return made


def library() -> ctypes.CDLL | None:
    """The compiled products; None where they cannot be made or run, or are left out."""
    return None if "tiles" in cpu.left_out else _made()


def has_tiles(x: Tensor, weight: Tensor) -> bool:
    """Can `product` take x [..., in] and weight [out, in], and does it pay?"""
    return (
        x.dtype == weight.dtype == torch.float32
        and "float32" not in cpu.left_out
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


class _Place(ctypes.Structure):
    """A tensor [b, heads, s, d] whose last dimension lies in a row."""

    _fields_ = [("x", ctypes.c_void_p), *((name, ctypes.c_int64) for name in ("batch", "head", "token"))]


class _Task(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_int64) for name in ("batch", "groups", "per_group", "tokens", "dim")),
        ("of", _Place * 7),
        ("scale", ctypes.c_float),
    ]


def has_attention(q: Tensor, k: Tensor, v: Tensor) -> bool:
    """Can `attention_` take these? See `causal_attention`."""
    return (
        q.dtype == k.dtype == v.dtype
        and (q.dtype == torch.bfloat16 or (q.dtype == torch.float32 and "float32" not in cpu.left_out))
        and q.shape[-1] == v.shape[-1]
        and all(x.device.type == "cpu" and type(x) is Tensor and x.stride(-1) == 1 for x in (q, k, v))
        and library() is not None
    )


def attention_(*tensors: Tensor, backward: bool = False) -> None:
    """Attention of q, k, v into out; backward, of these and the gradient of out into the gradients of the three."""
    b, heads, s, d = tensors[0].shape
    groups = tensors[1].shape[1]
    places = (_Place * 7)(*(_Place(x.data_ptr(), *x.stride()[:3]) for x in tensors))
    task = _Task(b, groups, heads // groups, s, d, places, d**-0.5)
    made = library()
    assert made is not None
    run = made.attention_backward if backward else made.attention
    run(ctypes.byref(task), ctypes.c_int64(tensors[0].dtype == torch.bfloat16))
