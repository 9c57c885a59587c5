"""Size and type of what pipeline ranks send each other, agreed on before the first message."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from megapipe.distributed.axis import Axis
from megapipe.errors import ConfigError


def size_of(seq_length: int | None, micro_batch_size: int | None, config: Any) -> tuple[int, int, int]:
    """[s, b, h] of whole sequences. Raises: ConfigError naming what is missing."""
    names, hidden = ("seq_length", "micro_batch_size", "config.hidden_size"), getattr(config, "hidden_size", None)
    said = dict(zip(names, (seq_length, micro_batch_size, hidden), strict=True))
    if missing := [name for name, value in said.items() if value is None]:
        raise ConfigError(
            f"the size of messages between pipeline ranks is [seq_length, micro_batch_size, config.hidden_size], and "
            f"{' and '.join(missing)} {'is' if len(missing) == 1 else 'are'} None or absent. Give a number."
        )
    return int(seq_length or 0), int(micro_batch_size or 0), int(hidden or 0)


def dtype_of(modules: Sequence[nn.Module], pp: Axis, dtype: torch.dtype | None = None) -> torch.dtype:
    """The type of messages, as all ranks of a pipeline say: a rank's stages may have no parameters to tell.

    Args:
        modules: this rank's stages.
        dtype: where a configuration says it; else that of all parameters.
    Raises: ConfigError if the ranks say several types and send messages.
    """
    found = {dtype} if dtype is not None else {p.dtype for module in modules for p in module.parameters()}
    dtypes = sorted(name_of(dtype) for dtype in found)
    everyone = pp.gather_json(dtypes)
    found_by_all = sorted({dtype for dtypes in everyone for dtype in dtypes})
    if len(found_by_all) != 1 and pp.size > 1:
        of_ranks = "; ".join(f"pipeline rank {rank}: {', '.join(dtypes)}" for rank, dtypes in enumerate(everyone))
        raise ConfigError(
            f"parameters are of {len(found_by_all)} types ({of_ranks}), and messages between stages need one. "
            "Let the model provider make all of one type, or say the type of messages in config.pipeline_dtype."
        )
    return getattr(torch, found_by_all[0]) if found_by_all else torch.float32


def name_of(dtype: torch.dtype) -> str:
    """Return a type's name without its module."""
    return str(dtype).removeprefix("torch.")
