"""Safetensors files one tensor at a time: theirs, ours however they are sharded, and files that are being written."""

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
from megapipe.distributed.layout import HISTORY, SAVED_BUFFERS, Layout, layout_of, saved_tensors, whole_name
from megapipe.errors import CheckpointError
from megapipe.models.gpt import GPTModel
from megapipe.partition.spans import LayerSpan, whole

INDEX = "model.safetensors.index.json"
SHARD_BYTES = 1 << 30
T = TypeVar("T")
Progress = Callable[[int, int], None]
"""(tensors done, tensors in all)"""


def counted(items: Sequence[T], progress: Progress) -> Iterator[T]:
    """Each of them, told of before it and behind the last."""
    for done, item in enumerate(items):
        progress(done, len(items))
        yield item
    progress(len(items), len(items))


class SavedTensors:
    """The tensors of a folder of safetensors files, by name, each read in full from as many files as hold a part of it.

    Attributes:
        folder: they are in.
        shapes, dtypes: by name.
    Raises: CheckpointError if the folder has no such files or one of them is damaged.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        if not list(folder.glob("*.safetensors")):
            old = " (pytorch_model.bin is a pickle: save it again with save_pretrained)" * bool(
                list(folder.glob("*.bin"))
            )
            raise CheckpointError(f"{folder} holds no safetensors files{old}")
        try:
            found: Any = HuggingFaceStorageReader(str(folder)).read_metadata()
        except Exception as error:  # safetensors and DCP have no common class for a file that is none of theirs
            raise CheckpointError(f"{folder} cannot be read as safetensors: {error}") from None
        facts = found.state_dict_metadata
        self.shapes: dict[str, tuple[int, ...]] = {key: tuple(fact.size) for key, fact in facts.items()}
        self.dtypes: dict[str, torch.dtype] = {key: fact.properties.dtype for key, fact in facts.items()}
        self._parts: dict[str, list[tuple[str, Sequence[int]]]] = {}
        files = _listed(folder)
        for index, info in found.storage_data.items():
            if files is None or Path(info.relative_path).name in files:
                self._parts.setdefault(index.fqn, []).append((info.relative_path, index.offset))
        self.shapes = {
            key: shape for key, shape in self.shapes.items() if key in self._parts and not key.endswith(HISTORY)
        }

    def read(self, key: str) -> Tensor:
        """The whole tensor, on the CPU."""
        whole = torch.empty(self.shapes[key], dtype=self.dtypes[key])
        for path, offsets in self._parts[key]:
            with safe_open(path, framework="pt") as file:
                part = file.get_tensor(key)
            whole[tuple(slice(o, o + n) for o, n in zip(offsets, part.shape, strict=True))] = part
        return whole


def _listed(folder: Path) -> set[str] | None:
    """The files that belong to a model; hub folders may hold the same weights in a second form."""
    if (folder / INDEX).exists():
        try:
            return set(map(str, json.loads((folder / INDEX).read_text())["weight_map"].values()))
        except OSError as error:
            raise CheckpointError(f"{folder / INDEX}: {error.strerror}") from None
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
            example = '{"weight_map": {TENSOR: FILE, ...}}'
            raise CheckpointError(f"{folder / INDEX} is damaged: it is no JSON object {example}") from None
    return {"model.safetensors"} if (folder / "model.safetensors").exists() else None


class ShardWriter:
    """Writes tensors into files of about SHARD_BYTES, so that no more than one file's are in memory.

    Call `add` for each and `close` at the end, which gives the files their names.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._held: dict[str, Tensor] = {}
        self._shards: list[list[str]] = []
        self._bytes = self._total = 0

    def add(self, name: str, tensor: Tensor) -> None:
        """Hold a tensor until its file is full."""
        if self._held and self._bytes + tensor.nbytes > SHARD_BYTES:
            self._flush()
        self._held[name] = tensor.clone(memory_format=torch.contiguous_format)
        self._bytes += tensor.nbytes
        self._total += tensor.nbytes

    def close(self) -> list[str]:
        """Write what is held, name the files model-I-of-N.safetensors, and write the index that loaders look for.

        Returns: names of all files.
        """
        self._flush()
        n = len(self._shards)
        names = [f"model-{i + 1:05d}-of-{n:05d}.safetensors" if n > 1 else "model.safetensors" for i in range(n)]
        for i, name in enumerate(names):
            self._path(i).rename(self.folder / name)
        if n == 1:
            return names
        weight_map = {key: name for keys, name in zip(self._shards, names, strict=True) for key in keys}
        index = {"metadata": {"total_size": self._total}, "weight_map": weight_map}
        (self.folder / INDEX).write_text(json.dumps(index, indent=2) + "\n")
        return [*names, INDEX]

    def _path(self, shard: int) -> Path:
        return self.folder / f"unfinished-{shard}"

    def _flush(self) -> None:
        path = self._path(len(self._shards))
        save_file(self._held, path, metadata={"format": "pt"})
        path.chmod(self.folder.stat().st_mode & 0o666)  # safetensors keeps others from reading
        with path.open("rb") as file:
            os.fsync(file.fileno())
        self._shards.append(list(self._held))
        self._held, self._bytes = {}, 0


@torch.no_grad()
def load_full(stages: Sequence[nn.Module], read: Callable[[str], Tensor], tp: Axis) -> None:
    """Fill what is saved with this rank's slice of the whole tensor of its name, in its saved shape."""
    for stage in stages:
        for name, param in saved_tensors(stage):
            layout = layout_of(param)
            whole = read(whole_name(layout.tied_to or name))
            assert tuple(whole.shape) == layout.full, f"{name} is {list(whole.shape)}, not {list(layout.full)}"
            param.copy_(layout.mine(whole, tp).reshape(param.shape))


def whole_model(model: ModelConfig, span: LayerSpan | None = None) -> GPTModel:
    """The model in one piece, or a span of it, its parameters not yet filled; none of its products in FP8."""
    return GPTModel(replace(model, fp8_format=None), span or LayerSpan(0, model.layers, True, True), Axis())


def is_trained(name: str) -> bool:
    """Has a saved tensor a gradient, and an optimizer's state? The others are float32 in a model of any type."""
    return name.rpartition(".")[2] not in SAVED_BUFFERS


def our_layouts(model: ModelConfig, span: LayerSpan | None = None) -> dict[str, Layout]:
    """Layouts of a model's parameters by name, or of those of a span and, where the loss is, of the depths behind it;
    those that repeat another's weight are among them."""
    own, *depths = whole(model.layers, model.depths)
    spans = [span or own, *(depths if span is None or span.loss else ())]
    with torch.device("meta"):
        modules = [whole_model(model, span) for span in spans]
    return {name: layout_of(param) for module in modules for name, param in saved_tensors(module)}


def our_shapes(model: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Shapes in which we save a model's parameters, by name, without those that repeat another's weight."""
    return {name: layout.full for name, layout in our_layouts(model).items() if layout.tied_to is None}
