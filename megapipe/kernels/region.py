"""Fuse a function of tensors into one GPU kernel.

Such a function is registered with torch as the operation torch.ops.megapipe.NAME. On a GPU
torch.compile writes a Triton kernel for it at the first call. On a CPU, without Triton, or with
TORCHDYNAMO_DISABLE=1, torch runs the same formula operation by operation. No GPU has run it yet.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, wraps
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

_LIBRARY = torch.library.Library("megapipe", "DEF")  # type: ignore[no-untyped-call]


def region(schema: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Return a decorator that registers a function as an operation and fuses it on a GPU.

    The decorated function is compiled by torch to one kernel; on a CPU it runs as it is.

    Args:
        schema: name, arguments and results of the operation, in torch.library's notation.
    """

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        name = schema.partition("(")[0]

        # Compiled at the first call only: torch.compile imports the compiler, about a second.
        @cache
        def compiled() -> Callable[..., Any]:
            # Inductor writes a GPU's kernels in Triton.
            return torch.compile(function) if find_spec("triton") else function

        # Registered, and not only compiled: to torch the region is one operation, which a fake
        # device can run and count (tools/proofs/gpu).
        _LIBRARY.define(schema)  # type: ignore[no-untyped-call]
        _LIBRARY.impl(name, function, "CPU")  # type: ignore[no-untyped-call]
        _LIBRARY.impl(name, lambda *given: compiled()(*given), "CUDA")  # type: ignore[no-untyped-call]
        # Shapes and dtypes of the results follow from the function itself, run on fake tensors.
        torch.library.register_fake(f"megapipe::{name}", function, lib=_LIBRARY)
        operation = getattr(torch.ops.megapipe, name)

        @wraps(function)
        def call(x: Tensor, *others: Any) -> Any:
            # A CPU tensor skips torch's dispatcher, which costs more than a small operation.
            if x.is_cuda:
                return operation(x, *others)
            return function(x, *others)

        return call

    return decorate


def is_fused(x: Tensor) -> bool:
    """Return whether a function decorated by `region` runs as one kernel on this tensor.

    This is so on a GPU, except inside torch.compile, which fuses plain operations itself.
    """
    return x.is_cuda and not torch.compiler.is_compiling()
