"""Exclude functions from torch.compile (--compile)."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import cache, wraps
from typing import Any, TypeVar, cast

import torch

F = TypeVar("F", bound=Callable[..., Any])


def eager(function: F) -> F:
    """Return the function, wrapped so that torch.compile calls it uncompiled.

    A compiler would lose the side effects of the function. If an argument is a layer's number, it
    would compile the function once for each layer.
    """
    # Importing the compiler takes more than a second, so a run without --compile never does it.
    uncompiled = cache(lambda: torch.compiler.disable(function))  # type: ignore[no-untyped-call]

    @wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        # torch.compile imports this module. While it is absent, nothing is being compiled.
        if "torch._dynamo" in sys.modules:
            return uncompiled()(*args, **kwargs)
        return function(*args, **kwargs)

    return cast(F, call)
