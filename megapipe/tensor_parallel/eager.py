"""Functions that torch.compile must leave alone (--compile)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar, cast

import torch

F = TypeVar("F", bound=Callable[..., Any])


def eager(function: F) -> F:
    """The same function, never compiled: what it does beside its result would be lost, or compiled for each layer."""
    return cast(F, torch.compiler.disable(function))  # type: ignore[no-untyped-call]
