"""Causal attention of bf16 by a processor's tiles (attention.c), if Linux lends them to C compiled here."""

from __future__ import annotations

import ctypes
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from megapipe.compiled import compiled
from megapipe.kernels import cpu

_SOURCES = tuple(Path(__file__).with_name(name) for name in ("exp.h", "attention.c"))
_FLAGS = ("-O2", *cpu.FLAGS[1:])
"""The compiler's flags. -O3 compiles for three seconds in place of one, to code that is no faster."""


@cache
def _made() -> ctypes.CDLL | None:
    made = compiled("attention", _SOURCES, _FLAGS) if torch.cpu._is_amx_tile_supported() else None
    return made if made is not None and made.tiles_allowed() else None


def library() -> ctypes.CDLL | None:
    """The compiled attention; None where it cannot be made or run, or is left out."""
    return None if "tiles" in cpu.left_out else _made()


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
        q.dtype == k.dtype == v.dtype == torch.bfloat16
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
    run(ctypes.byref(task))
