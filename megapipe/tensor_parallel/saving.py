"""Record which module of a layer is running, for hooks on saved tensors (--offload-modules).

Modules have Megatron-LM's names. A function sets the name once `named` has wrapped it; without
--offload-modules nothing is wrapped.
"""

from __future__ import annotations

from collections.abc import Callable
from contextvars import ContextVar
from functools import wraps
from typing import Any

from torch import Tensor

_running: ContextVar[tuple[str, dict[int, str]]] = ContextVar("running")
"""(name of the running module, storage address -> module that owns the tensor instead)."""


def named(module: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """Return the function, wrapped so that tensors it saves belong to this module."""

    @wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        # Owners are of this call only: later tensors may get the same addresses.
        before = _running.set((module, {}))
        try:
            return function(*args, **kwargs)
        finally:
            _running.reset(before)

    return call


def saves(module: str, *tensors: Tensor) -> None:
    """Assign tensors to a module that runs inside a named one. No effect outside of any."""
    running = _running.get(None)
    if running is None:
        return
    _, owners = running
    for x in tensors:
        owners[x.untyped_storage().data_ptr()] = module


def saver(storage: int) -> str:
    """Return the module that a saved tensor belongs to; "" if no named module is running.

    Args:
        storage: the address of the tensor's storage.
    """
    name, owners = _running.get(("", {}))
    return owners.get(storage, name)
