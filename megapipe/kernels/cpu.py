"""Loops between the products on a CPU (cpu.c), where the machine has a C compiler; callers have torch's else.

Each takes contiguous bf16 or float32 and computes in float32.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from megapipe.compiled import compiled

SOURCES = tuple(Path(__file__).with_name(name) for name in ("exp.h", "cpu.c"))
FLAGS = (
    "-O3",
    "-march=native",
    "-ffp-contract=off",
    "-fno-math-errno",
    "-fno-trapping-math",
    "-fopenmp",
    "-fPIC",
    "-shared",
)


left_out: frozenset[str] = frozenset()
"""Libraries that another rank has not, see alike.py."""


@cache
def _made() -> ctypes.CDLL | None:
    return compiled("kernels", SOURCES, FLAGS)


def library() -> ctypes.CDLL | None:
    """The compiled loops; None where they cannot be made, or are left out."""
    return None if "loops" in left_out else _made()


def has_loops(*tensors: Tensor) -> bool:
    """Can the functions below take these? Not where a subclass of torch's tensors looks on, as in a plan."""
    return (
        all(
            x.device.type == "cpu"
            and x.dtype in (torch.bfloat16, torch.float32)
            and type(x) in (Tensor, torch.nn.Parameter)
            and x.is_contiguous()
            for x in tensors
        )
        and not torch.compiler.is_compiling()
        and library() is not None
    )


_Argument = Tensor | int | float | ctypes.Array[ctypes.c_float] | None


def _run_over_all(name: str, first: Tensor, *arguments: _Argument) -> None:
    """Run a loop over all elements of a tensor, whatever its shape, and of others like it."""
    _run(name, first.numel(), first, *arguments)


def _run(name: str, *arguments: _Argument) -> None:
    given: list[object] = []
    for x in arguments:
        if isinstance(x, Tensor):
            given.append(ctypes.c_void_p(x.data_ptr()))
        else:
            given.append(ctypes.c_int64(x) if isinstance(x, int) else ctypes.c_float(x) if isinstance(x, float) else x)
    getattr(library(), name)(*given)


def _half(x: Tensor) -> int:
    return int(x.dtype == torch.bfloat16)


def gelu(x: Tensor, linear: float, cubic: float) -> Tensor:
    """x sigmoid(x (linear + cubic x^2))."""
    y = torch.empty_like(x)
    _run_over_all("gelu", x, y, linear, cubic, _half(x))
    return y


def gelu_backward(x: Tensor, dy: Tensor, linear: float, cubic: float) -> Tensor:
    """The gradient of x from that of `gelu`."""
    dx = torch.empty_like(x)
    _run_over_all("gelu_backward", x, dy, dx, linear, cubic, _half(x))
    return dx


def add_bf16_(into: Tensor, x: Tensor) -> None:
    """into += x, of float32 and bf16."""
    _run_over_all("add_bf16", into, x)


def add_transposed_(into: Tensor, x: Tensor) -> None:
    """into [columns, rows] += x [rows, columns]^T, of float32 and bf16."""
    _run("add_transposed", into, x, *x.shape)


def transposed(x: Tensor) -> Tensor:
    """x [rows, columns] of 16 bits -> [columns, rows], contiguous; torch takes two to seventeen times as long."""
    y = x.new_empty(x.shape[::-1])
    _run("transpose16", x, *x.shape, y)
    return y


def with_block_(logits: Tensor, highest: Tensor, total: Tensor) -> None:
    """Maximum and sum of exponentials below it, each [n], with the logits [n, block] of one block more."""
    _run("with_block", logits, *logits.shape, highest, total, _half(logits))


def to_gradient_(logits: Tensor, log_sum: Tensor, scale: Tensor, labels: Tensor) -> None:
    """(e^(logits - log_sum) - is_label) scale in the place of logits [n, block]; all others are [n].

    Labels may be any integers, in any stride; C reads 64 bits of each."""
    _run("to_gradient", logits, *logits.shape, log_sum, scale, labels.long().contiguous(), _half(logits))


def causal_softmax_(scores: Tensor, tokens: int) -> None:
    """Probabilities in the place of the scores [n, rows, end] of queries, rows / tokens for each of the last tokens of
    the keys, which see those up to their own."""
    n, rows, end = scores.shape
    _run("causal_softmax", scores, n * rows, tokens, rows // tokens, end, _half(scores))


def softmax_backward_(p: Tensor, dp: Tensor, scale: float) -> None:
    """p (dp - sum p dp) scale in the place of dp [..., end]."""
    _run("softmax_backward", p, dp, dp.numel() // dp.shape[-1], dp.shape[-1], scale, _half(p))


def adamw_(
    value: Tensor,
    grad: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    model: Tensor | None,
    scale: Tensor,
    rates: Sequence[float],
) -> None:
    """One update of float32, see optim/adamw.py."""
    array = (ctypes.c_float * len(rates))(*rates)
    _run_over_all("adamw", value, grad, exp_avg, exp_avg_sq, model, scale, array)
