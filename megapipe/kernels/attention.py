"""Run the compiled bf16 causal attention of attention.c, which needs a CPU with AMX tiles.

Linux grants tiles to a process on request. Where it refuses, or without a C compiler, callers use
torch's operations.
"""

from __future__ import annotations

import ctypes
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from megapipe.compiled import c_fields, compiled
from megapipe.kernels import cpu

_SOURCES = tuple(Path(__file__).with_name(name) for name in ("exp.h", "attention.c"))
# -O3 takes three seconds to compile instead of one, and its code is no faster.
_FLAGS = ("-O2", *cpu.FLAGS[1:])


@cache
def _compiled_attention() -> ctypes.CDLL | None:
    # Before the compiler: on a processor without tiles nothing is compiled.
    if not torch.cpu._is_amx_tile_supported():
        return None
    loaded = compiled("attention", _SOURCES, _FLAGS)
    if loaded is None or not loaded.tiles_allowed():
        return None
    return loaded


def library() -> ctypes.CDLL | None:
    """Return the library of the compiled attention, which needs AMX tiles and a C compiler.

    Returns None without these, or if it was disabled.
    """
    return None if "tiles" in cpu.left_out else _compiled_attention()


class _Operand(ctypes.Structure):
    """A tensor [b, heads, s, d] as C reads it: address, and strides of batch, head and token.

    The last dimension is contiguous.
    """

    _fields_ = c_fields("void_p x", "int64 batch head token")


class _Task(ctypes.Structure):
    """The arguments of attention and attention_backward, with the fields in attention.c's order."""

    _fields_ = [
        *c_fields("int64 batch groups per_group tokens dim"),
        ("of", _Operand * 7),
        *c_fields("float scale"),
    ]


def has_attention(q: Tensor, k: Tensor, v: Tensor) -> bool:
    """Return whether `attention_` accepts these tensors.

    q is [b, heads, s, d]; k and v are [b, groups, s, d].

    All must be plain bf16 tensors on the CPU, with a contiguous last dimension of one length. The
    compiled library must exist.
    """
    return (
        # A subclass of Tensor, such as a plan's fake tensor, has no memory that C could read.
        q.dtype == k.dtype == v.dtype == torch.bfloat16
        and q.shape[-1] == v.shape[-1]
        and all(
            x.device.type == "cpu" and type(x) is Tensor and x.stride(-1) == 1 for x in (q, k, v)
        )
        and library() is not None
    )


def attention_(*tensors: Tensor, backward: bool = False) -> None:
    """Compute causal attention, or its gradients, and write them to the last of the tensors.

    Args:
        tensors: for forward q, k, v, out. For backward q, k, v, the gradient of out, then the
            gradients of q, k and v. Queries are [b, heads, s, d], keys and values [b, groups, s,
            d]. The last tensor (forward) or the last three (backward) are overwritten.
        backward: compute the gradients.
    """
    b, heads, s, d = tensors[0].shape
    groups = tensors[1].shape[1]
    # C reads strides, so a slice of a fused qkv projection needs no copy.
    operands = (_Operand * 7)(*(_Operand(x.data_ptr(), *x.stride()[:3]) for x in tensors))
    # Forward fills four of the seven operands; ctypes leaves zeros in the rest.
    task = _Task(b, groups, heads // groups, s, d, operands, d**-0.5)
    loaded = library()
    assert loaded is not None
    run = loaded.attention_backward if backward else loaded.attention
    run(ctypes.byref(task))
