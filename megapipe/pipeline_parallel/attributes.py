"""Find a rank's modules and the attributes that the engine reads of them, whatever wraps them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from torch import nn

from megapipe.errors import ConfigError
from megapipe.schedule import Schedule

Chunks = Mapping[int, tuple[nn.Module, Iterator[Any] | None]]
"""Module and data of each stage of a rank, by the stage's number in ascending order.

The data are None for a stage that is given none.
"""

Wrap = Callable[[Chunks, Schedule], Chunks]
"""A function that returns the chunks of a training step with other modules, given its table."""


def attribute_of(module: nn.Module, name: str) -> Any:
    """Return an attribute of the module, or else of the module that it wraps as `.module`.

    DistributedDataParallel wraps a model in this way. Several wrappers may be around one module.
    Other submodules are not searched. Raises: AttributeError if none of these has the attribute.

    Args:
        name: name of the attribute.
    """
    while not hasattr(module, name):
        inner = getattr(module, "module", None)
        if not isinstance(inner, nn.Module):
            break
        module = inner
    return getattr(module, name)


def config_of(module: nn.Module) -> Any:
    """Return a model's `.config`, the object from which Megatron-LM reads hidden_size and others.

    Raises: ConfigError if neither the module nor a module that it wraps has one.
    """
    try:
        return attribute_of(module, "config")
    except AttributeError:
        raise ConfigError(
            f"{type(module).__name__} has no `config` to say the size of messages: give "
            "get_forward_backward_func config=..., an object with hidden_size and "
            "sequence_parallel, or the model such an attribute."
        ) from None


def chunks_of(
    table: Schedule,
    rank: int,
    model: nn.Module | Sequence[nn.Module],
    data: Any,
) -> Chunks:
    """Return {stage: (module, data iterator)} for the stages of a rank.

    Args:
        table: the schedule, which says which stages the rank has.
        rank: pipeline rank.
        model: one module, or a list with one for each stage in ascending order.
        data: one data iterator for all stages, or a list (not a tuple) with one for each stage.
    Raises: ConfigError if the number of modules or of iterators in a list is not the number of
        stages.
    """
    # Megatron's callers give a list only where a rank has several chunks.
    stages = table.placement.stages_on(rank)
    modules = list(model) if isinstance(model, Sequence) else [model]
    # Sequences other than a list may be the data themselves.
    iterators = data if isinstance(data, list) else [data] * len(modules)
    if not len(modules) == len(iterators) == len(stages):
        raise ConfigError(
            f"pipeline rank {rank} has {len(stages)} stages under the schedule {table.name}: model "
            f"and data_iterator must be lists of {len(stages)}, one of each per stage, got "
            f"{len(modules)} and {len(iterators)}."
        )
    return dict(zip(stages, zip(modules, iterators, strict=True), strict=True))
