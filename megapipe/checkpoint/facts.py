"""The facts of tensors: their full shapes and types, in a checkpoint's files and in a model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from megapipe.distributed.layout import HISTORY
from megapipe.errors import CheckpointError


def facts_of(tensors: Mapping[str, Tensor]) -> dict[str, str]:
    """Return the full shape and dtype of each tensor by key, as errors print them.

    Args:
        tensors: {key: tensor}, as `tensors_of` returns them.
    """
    return {key: _fact(list(tensor.shape), tensor.dtype) for key, tensor in tensors.items()}


def loadable(folder: Path, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return the tensors to load: all except FP8 histories that the folder lacks.

    An FP8 history has the largest absolute values (amax) of recent steps. The folder lacks it after
    a run in bf16. A history of another length is left out, too. The run then keeps its initial one.

    Args:
        folder: the checkpoint.
        tensors: this rank's tensors by key.
    """
    if not any(key.endswith(HISTORY) for key in tensors):
        return tensors
    stored = _stored(folder)
    facts = facts_of(tensors)
    return {
        key: tensor
        for key, tensor in tensors.items()
        if not key.endswith(HISTORY) or stored.get(key) == facts[key]
    }


def compare(folder: Path, needed: Mapping[str, str], with_optimizer: bool) -> None:
    """Compare a checkpoint's keys, shapes and dtypes with the tensors that a run needs.

    Args:
        folder: the checkpoint.
        needed: {key: text with full shape and dtype of the tensor}.
        with_optimizer: optimizer state is needed too.
    Raises: CheckpointError if they differ, except for the dtype of optimizer state. torch itself
        would convert any dtype, and skip a key.
    """
    there = _stored(folder)
    if with_optimizer and not any(key.startswith("optimizer.") for key in there):
        raise CheckpointError(
            f"{folder} holds no optimizer state (--no-save-optim); add --no-load-optim"
        )
    # The state of a parameter that has been frozen since is not read.
    unread = {key for key in there if key.startswith("optimizer.")} - needed.keys()
    if with_optimizer:
        unread = {key for key in unread if key.split(".", 2)[2] in needed}
    unread |= {key for key in there if key.endswith(HISTORY) and key not in needed}
    there = {key: fact for key, fact in there.items() if key not in unread}

    # Each problem with the keys that have it.
    lacking = [key for key in needed if key not in there]
    lack = "lacks parameters that this model has"
    if all(key.startswith("optimizer.") for key in lacking):
        lack = "lacks state of parameters that were frozen then (add --no-load-optim)"
    more = [key for key in there if key not in needed]
    wrong = [
        f"{key} is {there[key]}, not {needed[key]}"
        for key in needed
        if key in there and _compared(key, there[key]) != _compared(key, needed[key])
    ]
    found = {
        lack: lacking,
        "has parameters that this model lacks": more,
        "has other shapes or types (--bf16?) than this model": wrong,
    }
    problems = [f"{folder.name} {text}: {_few(keys)}" for text, keys in found.items() if keys]
    if problems:
        raise CheckpointError(problems)


def _stored(folder: Path) -> dict[str, str]:
    """Return {key: text with full shape and dtype} of the tensors in a folder.

    Raises: CheckpointError if the folder cannot be read.
    """
    try:
        stored = HuggingFaceStorageReader(str(folder)).read_metadata().state_dict_metadata
    # safetensors and torch have no common class for a file that they cannot read.
    except Exception as error:
        raise CheckpointError(f"{folder} cannot be read as safetensors: {error}") from None
    return {
        key: _fact(list(entry.size), entry.properties.dtype)
        for key, entry in stored.items()
        if isinstance(entry, TensorStorageMetadata)
    }


def _fact(shape: list[int], dtype: torch.dtype) -> str:
    return f"{shape} {str(dtype).removeprefix('torch.')}"


def _compared(key: str, fact: str) -> str:
    """Return the facts of a tensor that have to agree: its shape, and for weights also its dtype.

    Args:
        key: the tensor's key.
        fact: the tensor's shape and dtype, as text.
    """
    # Optimizer state is converted to the type that --exp-avg-dtype and other flags say.
    if key.startswith("optimizer."):
        return fact.rpartition(" ")[0]
    return fact


def _few(texts: Sequence[str]) -> str:
    """Return the first three texts, and how many more there are."""
    listed = ", ".join(texts[:3])
    if len(texts) > 3:
        listed += f" and {len(texts) - 3} more"
    return listed
