"""Functions that torch.compile must leave alone (--compile)."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import cache, wraps
from typing import Any, TypeVar, cast

import torch

F = TypeVar("F", bound=Callable[..., Any])


def eager(function: F) -> F:
    """A function that is never compiled: what it does beside its result would be lost, or compiled for each layer.

    A run that compiles nothing does not import the compiler: that takes more than a second of each process.
    """
    uncompiled = cache(lambda: torch.compiler.disable(function))  # type: ignore[no-untyped-call]

    @wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        return (uncompiled() if "torch._dynamo" in sys.modules else function)(*args, **kwargs)

    return cast(F, call)
