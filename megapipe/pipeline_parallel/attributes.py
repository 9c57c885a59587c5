"""Modules of a rank's stages as the engine is given them, and attributes that it asks for, whatever wraps them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from torch import nn

from megapipe.errors import ConfigError
from megapipe.schedule import Schedule

Chunks = Mapping[int, tuple[nn.Module, Iterator[Any] | None]]
"""Module and data of each stage of a rank."""


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


def chunks_of(
    table: Schedule,
    rank: int,
    model: nn.Module | Sequence[nn.Module],
    data: Any,
) -> Chunks:
    """Module and data of each stage of a rank. Raises: ConfigError for lists of other lengths."""
    own = table.placement.stages_on(rank)
    modules = list(model) if isinstance(model, Sequence) else [model]
    iterators = data if isinstance(data, list) else [data] * len(modules)  # other sequences may be the data themselves
    if not len(modules) == len(iterators) == len(own):
        raise ConfigError(
            f"pipeline rank {rank} has {len(own)} stages under the schedule {table.name}: model and data_iterator must "
            f"be lists of {len(own)}, one of each per stage, got {len(modules)} and {len(iterators)}."
        )
    return dict(zip(own, zip(modules, iterators, strict=True), strict=True))
