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
    """Return the function, wrapped so that tensors it saves for backward have a module's name.

    --offload-modules chooses saved tensors by these names, such as "attn_norm".

    Args:
        module: Megatron-LM's name of a part of a layer, as --offload-modules takes it.
        function: the part's forward.
    """

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
    """Give tensors to be saved the name `module`, not the one of the running function.

    No effect where no function wrapped by `named` is running.

    Args:
        module: Megatron-LM's name of a part of a layer.
        tensors: the tensors that will be saved for backward.
    """
    running = _running.get(None)
    if running is None:
        return
    _, owners = running
    for x in tensors:
        owners[x.untyped_storage().data_ptr()] = module


def saver(storage: int) -> str:
    """Return the name of the module that saves a tensor for backward; "" if it has none.

    Args:
        storage: the address of the tensor's storage.
    """
    name, owners = _running.get(("", {}))
    return owners.get(storage, name)
