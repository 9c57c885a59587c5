"""Agree on the size and type of messages between pipeline ranks, before the first one is sent."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from megapipe.distributed.axis import Axis
from megapipe.errors import ConfigError


def size_of(
    seq_length: int | None, micro_batch_size: int | None, config: Any
) -> tuple[int, int, int]:
    """Return (s, b, h): sequence length, microbatch size and config.hidden_size.

    Raises: ConfigError if one of them is None or config has no hidden_size.
    """
    hidden = getattr(config, "hidden_size", None)
    sizes = {
        "seq_length": seq_length,
        "micro_batch_size": micro_batch_size,
        "config.hidden_size": hidden,
    }
    if missing := [name for name, value in sizes.items() if value is None]:
        verb = "is" if len(missing) == 1 else "are"
        raise ConfigError(
            "the size of messages between pipeline ranks is [seq_length, micro_batch_size, "
            f"config.hidden_size], and {' and '.join(missing)} {verb} None or absent. "
            "Give a number."
        )
    return int(seq_length or 0), int(micro_batch_size or 0), int(hidden or 0)


def dtype_of(
    modules: Sequence[nn.Module], pp: Axis, dtype: torch.dtype | None = None
) -> torch.dtype:
    """Return the type of messages on which all ranks of a pipeline agree. Collective.

    A rank whose stages have no parameters takes the type of the others. One pipeline rank sends
    nothing: of several types it returns any, and float32 without parameters.

    Args:
        modules: this rank's stages.
        pp: the pipeline's ranks.
        dtype: the type that a configuration asks for; None for the type of the parameters.
    Raises: ConfigError if several ranks find several types, or none.
    """
    if dtype is None:
        found = {p.dtype for module in modules for p in module.parameters()}
    else:
        found = {dtype}
    dtypes = sorted(map(name_of, found))
    everyone = pp.gather_json(dtypes)
    found_by_all = sorted({dtype for dtypes in everyone for dtype in dtypes})
    if len(found_by_all) != 1 and pp.size > 1:
        of_ranks = [
            f"pipeline rank {rank}: {', '.join(dtypes)}" for rank, dtypes in enumerate(everyone)
        ]
        raise ConfigError(
            f"parameters are of {len(found_by_all)} types ({'; '.join(of_ranks)}), and messages "
            "between stages need one. Let the model provider make all of one type, or say the "
            "type of messages in config.pipeline_dtype."
        )
    return getattr(torch, found_by_all[0]) if found_by_all else torch.float32


def name_of(dtype: torch.dtype) -> str:
    """Return the name of a type without `torch.`."""
    return str(dtype).removeprefix("torch.")
