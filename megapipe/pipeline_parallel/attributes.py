"""Attributes of a stage's module that the engine asks for, whatever wraps it."""

from __future__ import annotations

from typing import Any

from torch import nn

from megapipe.errors import ConfigError


def attribute_of(module: nn.Module, name: str) -> Any:
    """An attribute of the module, or of the one that it wraps as `.module`, as DistributedDataParallel does."""
    while not hasattr(module, name) and isinstance(inner := getattr(module, "module", None), nn.Module):
        module = inner
    return getattr(module, name)


def config_of(module: nn.Module) -> Any:
    """Megatron's way to say the size of messages. Raises: ConfigError if the module has none."""
    try:
        return attribute_of(module, "config")
    except AttributeError:
        raise ConfigError(
            f"{type(module).__name__} has no `config` to say the size of messages: give get_forward_backward_func "
            "config=..., an object with hidden_size and sequence_parallel, or the model such an attribute."
        ) from None
