"""Functions of tensors that a GPU runs as one operation of torch's list, torch.ops.megapipe.NAME.

torch.compile writes its Triton kernel at the first call. On a CPU, without Triton and with TORCHDYNAMO_DISABLE=1 it is
the same formula, operation by operation. No GPU has run them yet.
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
    """The decorator of such a function. schema: name and arguments as torch.library takes them."""

    def made(function: Callable[..., Any]) -> Callable[..., Any]:
        name = schema.partition("(")[0]

        @cache
        def compiled() -> Callable[..., Any]:  # imports the compiler
            return torch.compile(function) if find_spec("triton") else function

        _LIBRARY.define(schema)  # type: ignore[no-untyped-call]
        _LIBRARY.impl(name, function, "CPU")  # type: ignore[no-untyped-call]
        _LIBRARY.impl(name, lambda *given: compiled()(*given), "CUDA")  # type: ignore[no-untyped-call]
        torch.library.register_fake(f"megapipe::{name}", function, lib=_LIBRARY)
        operation = getattr(torch.ops.megapipe, name)

        @wraps(function)
        def call(x: Tensor, *others: Any) -> Any:
            return (operation if x.is_cuda else function)(x, *others)

        return call

    return made


def is_fused(x: Tensor) -> bool:
    """Is a region better than torch's own operations? On a GPU, where --compile does not put these together."""
    return x.is_cuda and not torch.compiler.is_compiling()
