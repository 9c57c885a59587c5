"""Run the compiled C loops of cpu.c, which do the work between matrix products on a CPU.

They exist only where the machine has a C compiler, so callers keep torch's operations as the other
way. Every function takes contiguous bf16 or float32 tensors and computes in float32. A function
whose name ends in an underscore overwrites one of its arguments.
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
    # Rounding must not depend on which multiply-adds a compiler chooses to fuse.
    "-ffp-contract=off",
    "-fno-math-errno",
    "-fno-trapping-math",
    "-fopenmp",
    "-fPIC",
    "-shared",
)


# A module attribute, replaced as a whole: the ranks agree on it before the first step.
left_out: frozenset[str] = frozenset()
"""Names of the libraries that another rank of this run lacks, see available.py."""


# Cached: a failed compilation is not tried again for every layer.
@cache
def _compiled_loops() -> ctypes.CDLL | None:
    return compiled("kernels", SOURCES, FLAGS)


def library() -> ctypes.CDLL | None:
    """Return the library of the compiled loops; None if it cannot be compiled or is disabled."""
    return None if "loops" in left_out else _compiled_loops()


def has_loops(*tensors: Tensor) -> bool:
    """Return whether this module's C loops accept these tensors.

    The loops read raw memory. So they refuse subclasses of Tensor that have none, such as fake
    tensors and the tensors of torch.compile.
    """
    # The library comes last: only tensors that can use it make this machine compile it.
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


def _run_elementwise(name: str, first: Tensor, *arguments: _Argument) -> None:
    """Call a C loop over all elements of tensors of one shape.

    Args:
        name: the name of the function in cpu.c. The C function's first parameter is the number of
            elements.
        first: the first tensor.
        arguments: the function's other parameters, in order.
    """
    _run(name, first.numel(), first, *arguments)


def _run(name: str, *arguments: _Argument) -> None:
    """Call a C function. Tensors are passed as pointers, integers in 64 bits, floats in 32 bits.

    Args:
        name: the name of the function in cpu.c.
        arguments: the arguments of the function, in the order of its parameters.
    """
    values: list[object] = []
    for x in arguments:
        if isinstance(x, Tensor):
            values.append(ctypes.c_void_p(x.data_ptr()))
        # 64 bits of an integer by hand: ctypes would pass a Python integer as a C int, of 32 bits.
        elif isinstance(x, int):
            values.append(ctypes.c_int64(x))
        elif isinstance(x, float):
            values.append(ctypes.c_float(x))
        else:
            values.append(x)
    # None, for an absent tensor, arrives as a null pointer.
    getattr(library(), name)(*values)


def _is_bf16(x: Tensor) -> int:
    # One C function serves both types, and is given this number.
    return int(x.dtype == torch.bfloat16)


def gelu(x: Tensor, linear: float, cubic: float) -> Tensor:
    """Return x sigmoid(x (linear + cubic x^2)), the tanh form of GELU, in a new tensor.

    `linear` and `cubic` are the coefficients in models/gelu.py.
    """
    y = torch.empty_like(x)
    _run_elementwise("gelu", x, y, linear, cubic, _is_bf16(x))
    return y


def gelu_backward(x: Tensor, dy: Tensor, linear: float, cubic: float) -> Tensor:
    """Return the gradient of `gelu`'s input x, given the gradient dy of its output.

    `linear` and `cubic` are the coefficients in models/gelu.py.
    """
    dx = torch.empty_like(x)
    _run_elementwise("gelu_backward", x, dy, dx, linear, cubic, _is_bf16(x))
    return dx


def add_bf16_(into: Tensor, x: Tensor) -> None:
    """Add x, a bf16 tensor, to `into`, a float32 tensor of the same shape, in place."""
    _run_elementwise("add_bf16", into, x)


def add_transposed_(into: Tensor, x: Tensor) -> None:
    """Add the transpose of a bf16 matrix to a float32 matrix, in place.

    Args:
        into: [columns, rows], float32.
        x: [rows, columns], bf16.
    """
    _run("add_transposed", into, x, *x.shape)


def transposed(x: Tensor) -> Tensor:
    """Return the contiguous transpose of a matrix of 16-bit elements.

    torch's own copy takes two to seventeen times as long.
    """
    y = x.new_empty(x.shape[::-1])
    _run("transpose16", x, *x.shape, y)
    return y


def with_block_(logits: Tensor, highest: Tensor, total: Tensor) -> None:
    """Extend a running softmax denominator by one block of logits, in place.

    Args:
        logits: [n, block].
        highest: [n], the maximum of all logits so far; updated.
        total: [n], the sum of exp(logit - highest) so far; updated.
    """
    _run("with_block", logits, *logits.shape, highest, total, _is_bf16(logits))


def to_gradient_(logits: Tensor, log_sum: Tensor, scale: Tensor, labels: Tensor) -> None:
    """Replace logits by their cross-entropy gradients, (softmax - one_hot) x scale.

    Args:
        logits: [n, block], overwritten.
        log_sum: [n], logarithm of the softmax denominator over the whole vocabulary.
        scale: [n], gradient with respect to each token's loss.
        labels: [n], column of each label in this block, of any integer type and stride. A number
            outside of 0..block-1 is a label in another block.
    """
    columns = labels.long().contiguous()  # C reads 64 bits for each label
    _run("to_gradient", logits, *logits.shape, log_sum, scale, columns, _is_bf16(logits))


def causal_softmax_(scores: Tensor, tokens: int) -> None:
    """Replace attention scores by probabilities under the causal mask.

    Args:
        scores: [n, rows, end], the scores of queries for the keys 0..end-1; overwritten. The first
            rows / tokens rows are the first token's heads, the next ones the second token's.
        tokens: number of tokens with queries, which are the tokens end - tokens..end-1.
    """
    n, rows, end = scores.shape
    _run("causal_softmax", scores, n * rows, tokens, rows // tokens, end, _is_bf16(scores))


def softmax_backward_(p: Tensor, dp: Tensor, scale: float) -> None:
    """Replace the gradient of softmax's output by scale x the gradient of its input.

    Args:
        p: [..., end], softmax's output.
        dp: [..., end], the gradient of p; overwritten with p (dp - sum(p dp)) scale.
    """
    rows = dp.numel() // dp.shape[-1]
    _run("softmax_backward", p, dp, rows, dp.shape[-1], scale, _is_bf16(p))


def adamw_(
    value: Tensor,
    grad: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    model: Tensor | None,
    scale: Tensor,
    rates: Sequence[float],
) -> None:
    """Apply one AdamW update to float32 parameters in place.

    Args:
        value, exp_avg, exp_avg_sq: the parameters and their two moments.
        grad: the gradient, multiplied in place by `scale` and rates[0].
        model: the bf16 copy that the model computes with, rounded from value; None without one.
        scale: a float32 tensor with one element, a factor on the gradient.
        rates: gradient factor, weight decay factor (1 - lr x decay), step size (negative), square
            root of the second moment's bias correction, 1 - beta1, beta2, 1 - beta2, epsilon.
    """
    constants = (ctypes.c_float * len(rates))(*rates)
    _run_elementwise("adamw", value, grad, exp_avg, exp_avg_sq, model, scale, constants)
