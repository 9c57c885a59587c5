"""The module of a layer that runs, by Megatron-LM's name, for hooks that see what its graph saves (--offload-modules).

Functions say so once `named` has wrapped them: layers of a run that asks for no module stay as they are.
"""

from __future__ import annotations

from collections.abc import Callable
from contextvars import ContextVar
from functools import wraps
from typing import Any

from torch import Tensor

_running: ContextVar[tuple[str, dict[int, str]]] = ContextVar("running")
"""The module, and the addresses of what another one saves within it."""


def named(module: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """A function during which this module runs."""

    @wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        before = _running.set((module, {}))
        try:
            return function(*args, **kwargs)
        finally:
            _running.reset(before)

    return call


def saves(module: str, *tensors: Tensor) -> None:
    """Say that these are this module's, which runs as a part of a named one."""
    if (running := _running.get(None)) is not None:
        running[1].update((x.untyped_storage().data_ptr(), module) for x in tensors)


def saver(storage: int) -> str:
    """The module that saves a storage, by its address; empty where nobody has named it."""
    name, others = _running.get(("", {}))
    return others.get(storage, name)
