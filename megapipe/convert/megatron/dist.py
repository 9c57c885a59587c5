"""Megatron-LM's `torch_dist` checkpoints: torch's distributed checkpoints, read a tensor at a time.

A layer's tensors lie under its number, or under one key for all layers with the layer as first axis.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence, Set
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megapipe.convert.megatron.names import common_name, joined
from megapipe.convert.megatron.pickles import read_pickle, read_torch
from megapipe.distributed.layout import Layout
from megapipe.errors import CheckpointError

_MASTER = {"fp32_param": "master", "param": "master"}
_STATE = re.compile(r"(?:chained_\d+\.)?optimizer\.state\.(\w+)\.(.+)")
FLAT = re.compile(r"(?:chained_\d+\.)?optimizer\.distributed\.")
"""Keys of the distributed optimizer's rows of numbers."""
_STACKED = re.compile(r"(decoder\.layers\.)(\D.+)")


@dataclass(frozen=True)
class Chunk:
    """A part of a stored tensor and where its bytes are."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    path: Path
    at: int
    length: int

    def read(self) -> Any:
        with self.path.open("rb") as file:
            file.seek(self.at)
            data = file.read(self.length)
        if len(data) != self.length:
            raise CheckpointError(f"{self.path} is cut off: it ends before byte {self.at + self.length}")
        return read_torch(data, str(self.path))


class DistributedTensors:
    """Tensors that .metadata lists.

    Attributes:
        sizes: shapes of stored tensors by key, as stored.
        objects: what is no tensor, by key without its shard.
        copies: none, as each tensor is there once.
    Raises: CheckpointError if the folder has no .metadata, or it is damaged.
    """

    copies: Set[str] = frozenset()

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        path = folder / ".metadata"
        try:
            content = read_pickle(path).fields()
            entries = {key: value.fields() for key, value in content["state_dict_metadata"].items()}
            tensors = {key: entry for key, entry in entries.items() if "chunks" in entry}
            self.sizes: dict[str, tuple[int, ...]] = {key: _numbers(entry["size"]) for key, entry in tensors.items()}
            parts = {
                (key, _numbers(chunk.fields()["offsets"])): _numbers(chunk.fields()["sizes"])
                for key, entry in tensors.items()
                for chunk in entry["chunks"]
            }
            self.objects: dict[str, Chunk] = {}
            self._chunks: dict[str, list[Chunk]] = {}
            for index, info in content["storage_data"].items():
                key, where = index.fields()["fqn"], info.fields()
                place = folder / Path(where["relative_path"]).name, where["offset"], where["length"]
                if key in tensors:
                    offsets = _numbers(index.fields()["offset"])
                    self._chunks.setdefault(key, []).append(Chunk(offsets, parts[key, offsets], *place))
                else:
                    self.objects[key.split("/shard_")[0]] = Chunk((), (), *place)
        except (KeyError, TypeError, AttributeError, ValueError):
            raise CheckpointError(f"{path} is damaged, or of a version that is not known") from None
        self.places = dict(self._places())
        """(kind, name in the whole model) -> (key, layer of a stacked tensor)"""

    def box(self, key: str, start: Sequence[int], stop: Sequence[int]) -> Tensor:
        """A part of a stored tensor, from as many chunks as have some of it."""
        found: Tensor | None = None
        left = math.prod(b - a for a, b in zip(start, stop, strict=True))
        for chunk in self._chunks.get(key, ()):
            low = [max(a, o) for a, o in zip(start, chunk.offsets, strict=True)]
            high = [min(b, o + n) for b, o, n in zip(stop, chunk.offsets, chunk.sizes, strict=True)]
            if any(a >= b for a, b in zip(low, high, strict=True)):
                continue
            part = chunk.read()
            if not isinstance(part, Tensor) or tuple(part.shape) != chunk.sizes:
                raise CheckpointError(f"{chunk.path} holds something else where {key} should be")
            if found is None:
                found = torch.empty([b - a for a, b in zip(start, stop, strict=True)], dtype=part.dtype)
            part = part[tuple(slice(a - o, b - o) for a, b, o in zip(low, high, chunk.offsets, strict=True))]
            found[tuple(slice(a - s, b - s) for a, b, s in zip(low, high, start, strict=True))] = part
            left -= part.numel()
        if found is None or left:
            raise CheckpointError(f"{self.folder} has not all of {key}")
        return found

    @property
    def common(self) -> dict[str, Any]:
        """Arguments, iteration, and what the optimizer has beside its tensors."""
        if (self.folder / "common.pt").exists():
            return dict(read_torch(self.folder / "common.pt"))
        if "common_state" not in self.objects:
            raise CheckpointError(f"{self.folder} has neither a common.pt nor a common_state")
        return dict(self.objects["common_state"].read()[0])

    def shapes(self, kind: str) -> dict[str, tuple[int, ...]]:
        """Whole tensors of the model (kind empty) or of the optimizer's state, by our names."""
        sizes = {name: (self.sizes[key], layer) for (its, name), (key, layer) in self.places.items() if its == kind}
        return {name: size if layer is None else size[1:] for name, (size, layer) in sizes.items()}

    def pieces(self, name: str) -> int:
        """A tensor is put together when it is read."""
        return 1

    def read(self, kind: str, name: str, layout: Layout) -> Tensor:
        """A whole tensor in the shape in which we save it."""
        key, layer = self.places[kind, name]
        first, *rest = self.sizes[key]
        rows = (0, first) if layer is None else (layer, layer + 1)
        return joined([self.box(key, [rows[0], *[0] * len(rest)], [rows[1], *rest])], layout)

    def _places(self) -> Iterator[tuple[tuple[str, str], tuple[str, int | None]]]:
        for key, size in self.sizes.items():
            kind, name = "", key
            if match := _STATE.fullmatch(key):
                kind, name = _MASTER.get(match[1], match[1]), match[2]
            if FLAT.match(key) or "_extra_state" in key:
                continue
            if match := _STACKED.fullmatch(name):
                for n in range(size[0]):
                    yield (kind, common_name(f"{match[1]}{n}.{match[2]}")), (key, n)
            else:
                yield (kind, common_name(name)), (key, None)


def _numbers(size: Any) -> tuple[int, ...]:
    """The numbers of a torch.Size, which is pickled as its class and a tuple."""
    return tuple(map(int, size.args[0]))
