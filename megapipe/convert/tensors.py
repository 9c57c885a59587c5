"""Read and write safetensors files one tensor at a time, in any number of files and shards."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader

from megapipe.config import ModelConfig
from megapipe.distributed.axis import Axis
from megapipe.distributed.layout import (
    HISTORY,
    SAVED_BUFFERS,
    Layout,
    layout_of,
    saved_tensors,
    whole_name,
)
from megapipe.errors import CheckpointError
from megapipe.models.gpt import GPTModel
from megapipe.partition.spans import LayerSpan, whole

INDEX = "model.safetensors.index.json"
SHARD_BYTES = 1 << 30
"""Largest size of a file, unless a single tensor is larger."""
T = TypeVar("T")
Progress = Callable[[int, int], None]
"""Takes the number of tensors that are done, and the number of all."""


def counted(items: Sequence[T], progress: Progress) -> Iterator[T]:
    """Yield each item, and report progress before every item and once at the end.

    Args:
        items: the items.
        progress: called with (number of items done, number of all items).
    """
    for done, item in enumerate(items):
        progress(done, len(items))
        yield item
    progress(len(items), len(items))


class SavedTensors:
    """The tensors of a folder of safetensors files. `read` returns one of them.

    A tensor may be split over several files. `read` joins it.

    Args:
        renamed: takes a name in the files, and returns the name for `read`; None leaves a tensor
            out.

    Attributes:
        folder: the folder of the files.
        stored: the names of all tensors in the files, as they are there.
        shapes: {name: whole shape of the tensor}, without histories of FP8 scales.
        dtypes: {name: type of the tensor}.

    Raises: CheckpointError if the folder has no such files, or one of them is damaged.
    """

    def __init__(
        self, folder: Path, renamed: Callable[[str], str | None] = lambda name: name
    ) -> None:
        self.folder = folder
        if not list(folder.glob("*.safetensors")):
            old = ""
            if list(folder.glob("*.bin")):
                old = " (pytorch_model.bin is a pickle: save it again with save_pretrained)"
            raise CheckpointError(f"{folder} holds no safetensors files{old}")
        try:
            # torch's reader knows the parts of a tensor in the files of several ranks, too.
            found: Any = HuggingFaceStorageReader(str(folder)).read_metadata()
        # safetensors and torch raise errors without a common class.
        except Exception as error:
            raise CheckpointError(f"{folder} cannot be read as safetensors: {error}") from None
        names = {key: name for key in found.state_dict_metadata if (name := renamed(key))}
        self.stored = frozenset(found.state_dict_metadata)
        self._keys = {name: key for key, name in names.items()}
        # Files and the offset of the part in each, by name of the tensor.
        self._parts: dict[str, list[tuple[str, Sequence[int]]]] = {}
        files = _listed(folder)
        for index, info in found.storage_data.items():
            listed = files is None or Path(info.relative_path).name in files
            if listed and index.fqn in names:
                parts = self._parts.setdefault(names[index.fqn], [])
                parts.append((info.relative_path, index.offset))
        self.shapes: dict[str, tuple[int, ...]] = {}
        self.dtypes: dict[str, torch.dtype] = {}
        for stored, key in names.items():
            fact = found.state_dict_metadata[stored]
            self.dtypes[key] = fact.properties.dtype
            # Histories of FP8 scales are no part of a model.
            if key in self._parts and not key.endswith(HISTORY):
                self.shapes[key] = tuple(fact.size)

    def read(self, key: str) -> Tensor:
        """Return the whole tensor of a name, on the CPU.

        Args:
            key: the tensor's name, as `renamed` returned it.
        """
        tensor = torch.empty(self.shapes[key], dtype=self.dtypes[key])
        for path, offsets in self._parts[key]:
            with safe_open(path, framework="pt") as file:
                part = file.get_tensor(self._keys[key])
            place = tuple(slice(o, o + n) for o, n in zip(offsets, part.shape, strict=True))
            tensor[place] = part
        return tensor


def _listed(folder: Path) -> set[str] | None:
    """Return the names of the safetensors files that belong to the model; None if all files do.

    The folder's index lists these files; without an index it is model.safetensors, if there is one.
    A folder of the Hugging Face hub may also hold the same weights in a second form, which is not
    listed.

    Raises: CheckpointError if the index is damaged.
    """
    index = folder / INDEX
    # Without an index, loaders take the one file with this name, if it is there.
    if not index.exists():
        return {"model.safetensors"} if (folder / "model.safetensors").exists() else None
    try:
        return set(map(str, json.loads(index.read_text())["weight_map"].values()))
    except OSError as error:
        raise CheckpointError(f"{index}: {error.strerror}") from None
    # No JSON, or JSON of another form. Deep nesting ends the parser with a RecursionError.
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        example = '{"weight_map": {TENSOR: FILE, ...}}'
        raise CheckpointError(f"{index} is damaged: it is no JSON object {example}") from None


class ShardWriter:
    """Writes tensors to files of about SHARD_BYTES, and keeps at most one file's tensors in memory.

    Call `add` for each tensor, and then `close`, which gives the files their names.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._held: dict[str, Tensor] = {}
        self._shards: list[list[str]] = []
        self._bytes = 0
        self._total = 0

    def add(self, name: str, tensor: Tensor) -> None:
        """Keep a copy of a tensor until its file is full."""
        if self._held and self._bytes + tensor.nbytes > SHARD_BYTES:
            self._flush()
        # A copy: safetensors refuses views that share memory, such as rows of one tensor.
        self._held[name] = tensor.clone(memory_format=torch.contiguous_format)
        self._bytes += tensor.nbytes
        self._total += tensor.nbytes

    def close(self) -> list[str]:
        """Write the last file and the index of several files, and name the files as loaders expect.

        Returns: the names of all files, model-I-of-N.safetensors and the index; of a single file
            model.safetensors alone.
        """
        self._flush()
        n = len(self._shards)
        names = [f"model-{i + 1:05d}-of-{n:05d}.safetensors" for i in range(n)]
        if n == 1:
            names = ["model.safetensors"]
        # Only now is the number of files known, which is in all names.
        for i, name in enumerate(names):
            self._path(i).rename(self.folder / name)
        if n == 1:
            return names
        weight_map: dict[str, str] = {}
        for keys, name in zip(self._shards, names, strict=True):
            weight_map |= dict.fromkeys(keys, name)
        index = {"metadata": {"total_size": self._total}, "weight_map": weight_map}
        (self.folder / INDEX).write_text(json.dumps(index, indent=2) + "\n")
        return [*names, INDEX]

    def _path(self, shard: int) -> Path:
        """Return the path of a file before `close` names it.

        Args:
            shard: the number of the file, from 0.
        """
        return self.folder / f"unfinished-{shard}"

    def _flush(self) -> None:
        """Write the tensors that are held to the next file, and release them."""
        path = self._path(len(self._shards))
        save_file(self._held, path, metadata={"format": "pt"})
        # safetensors lets nobody else read its files; give them the folder's permissions.
        path.chmod(self.folder.stat().st_mode & 0o666)
        # A checkpoint is committed only after its bytes are on disk.
        with path.open("rb") as file:
            os.fsync(file.fileno())
        self._shards.append(list(self._held))
        self._held = {}
        self._bytes = 0


@torch.no_grad()
def load_full(stages: Sequence[nn.Module], read: Callable[[str], Tensor], tp: Axis) -> None:
    """Fill the parameters and other saved tensors of stages with slices of whole tensors.

    Args:
        stages: the modules of this rank's stages.
        read: returns the whole tensor of a name, in its saved shape.
        tp: the tensor-parallel axis, which says what slice this rank has.
    """
    for stage in stages:
        for name, param in saved_tensors(stage):
            layout = layout_of(param)
            # Only the owner of a tied weight is saved, and parts of a vocabulary as one tensor.
            tensor = read(whole_name(layout.tied_to or name))
            shape = tuple(tensor.shape)
            assert shape == layout.full, f"{name} is {list(shape)}, not {list(layout.full)}"
            param.copy_(layout.mine(tensor, tp).reshape(param.shape))


def whole_model(model: ModelConfig, span: LayerSpan | None = None) -> GPTModel:
    """Build the model without tensor parallelism. The caller fills its parameters.

    Matrix products are not in FP8.

    Args:
        span: build only these layers, with embedding and loss if the span has them. None: all.
    """
    if span is None:
        span = LayerSpan(0, model.layers, True, True)
    # FP8 changes products, and no tensor that is saved.
    return GPTModel(replace(model, fp8_format=None), span, Axis())


def is_trained(name: str) -> bool:
    """Return whether the saved tensor of this name has a gradient and optimizer state.

    Saved tensors without them, such as an expert bias, are float32 in a model of any type.
    """
    return name.rpartition(".")[2] not in SAVED_BUFFERS


def saved_dtype(name: str, dtype: torch.dtype) -> torch.dtype:
    """Return the type in which a tensor is saved.

    Args:
        name: name of the tensor.
        dtype: type of the model's weights.
    """
    return dtype if is_trained(name) else torch.float32


def our_layouts(model: ModelConfig, span: LayerSpan | None = None) -> dict[str, Layout]:
    """Return {name: layout} of all parameters, tied parameters included.

    Args:
        span: only these layers, with the model's multi-token prediction if the span has the loss.
            None: the whole model.
    """
    own, *depths = whole(model.layers, model.depths)
    spans = [span or own]
    if span is None or span.loss:
        spans += depths
    found = {}
    for each in spans:
        # Shapes alone: a meta tensor has no memory, so that the model may be of any size.
        with torch.device("meta"):
            module = whole_model(model, each)
        for name, param in saved_tensors(module):
            found[name] = layout_of(param)
    return found


def our_shapes(model: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Return {name: saved shape} of the parameters, without tied parameters."""
    layouts = our_layouts(model)
    return {name: layout.full for name, layout in layouts.items() if layout.tied_to is None}
