"""Read Megatron-LM's `torch_dist` checkpoints, one tensor at a time.

They are torch's distributed checkpoints: .metadata lists the chunks of all tensors and where their
bytes are. A parameter of a layer has the layer's number in its key. If all layers are of one kind,
they share one key, and the first dimension of its tensor counts the layers.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megapipe.convert.megatron.flat import Row
from megapipe.convert.megatron.names import common_name, joined
from megapipe.convert.megatron.pickles import read_pickle, read_torch
from megapipe.distributed.layout import Layout
from megapipe.errors import CheckpointError

# The optimizers of 16-bit weights and of sharded state have different names for main parameters.
_MASTER = {"fp32_param": "master", "param": "master"}
_STATE = re.compile(r"(?:chained_\d+\.)?optimizer\.state\.(\w+)\.(.+)")
FLAT = re.compile(r"(?:chained_\d+\.)?optimizer\.distributed\.")
"""Start of the keys of the distributed optimizer's flat rows."""
_STACKED = re.compile(r"(decoder\.layers\.)(\D.+)")


@dataclass(frozen=True)
class Chunk:
    """The place of a stored object, or of a part of a stored tensor. `read` reads it.

    Attributes:
        offsets: the part's first index in each dimension of the tensor; () for an object.
        sizes: the part's shape; () for an object.
        path: the file.
        at: the position of the first byte in the file.
        length: number of bytes.
    """

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    path: Path
    at: int
    length: int

    def read(self) -> Any:
        """Return the tensor or object. Raises: CheckpointError if its bytes are not all there."""
        with self.path.open("rb") as file:
            file.seek(self.at)
            data = file.read(self.length)
        if len(data) != self.length:
            end = self.at + self.length
            raise CheckpointError(f"{self.path} is cut off: it ends before byte {end}")
        return read_torch(data, str(self.path))


class DistributedTensors:
    """The tensors that the .metadata of a checkpoint's folder lists under their keys.

    `shapes` and `read` take megapipe's names. `box` reads a part of the tensor under a key. `row`
    returns the optimizer's state of a model chunk. It is only for a checkpoint that stores this
    state as flat vectors.

    `common` is the data other than tensors. `pieces` returns 1, as tensors are not split by rank.

    Attributes:
        folder: the folder.
        sizes: {key: stored shape of the tensor}.
        objects: {key without /shard_... at its end: a stored object other than a tensor}.
        places: (kind, megapipe's name) -> (key, layer). The kind is exp_avg, exp_avg_sq, master for
            float32 main parameters, or "" for weights. All layers may share a key: the layer is
            then an index in the tensor's first dimension. Otherwise it is None.
        copies: empty, because each tensor is stored once.

    Raises: CheckpointError if the .metadata is missing or damaged.
    """

    copies: Set[str] = frozenset()

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.sizes: dict[str, tuple[int, ...]] = {}
        self.objects: dict[str, Chunk] = {}
        self._chunks: dict[str, list[Chunk]] = {}
        path = folder / ".metadata"
        try:
            self._list(read_pickle(path).fields())
        except (KeyError, TypeError, AttributeError, ValueError):
            raise CheckpointError(f"{path} is damaged, or of a version that is not known") from None
        self.places = dict(self._places())

    def _list(self, metadata: Mapping[str, Any]) -> None:
        """Fill `sizes`, `objects` and the chunks of each tensor.

        Args:
            metadata: the fields of torch's Metadata, by name.
        """
        parts: dict[tuple[str, tuple[int, ...]], tuple[int, ...]] = {}
        for key, value in metadata["state_dict_metadata"].items():
            entry = value.fields()
            # Entries of objects have no chunks.
            if "chunks" in entry:
                self.sizes[key] = _numbers(entry["size"])
                for item in entry["chunks"]:
                    part = item.fields()
                    parts[key, _numbers(part["offsets"])] = _numbers(part["sizes"])
        for index, info in metadata["storage_data"].items():
            key = index.fields()["fqn"]
            where = info.fields()
            # The last part of the path alone: no checkpoint can name a file outside of its folder.
            path = self.folder / Path(where["relative_path"]).name
            place = path, where["offset"], where["length"]
            if key in self.sizes:
                offsets = _numbers(index.fields()["offset"])
                chunk = Chunk(offsets, parts[key, offsets], *place)
                self._chunks.setdefault(key, []).append(chunk)
            # The end of an object's key numbers its shards.
            else:
                self.objects[key.split("/shard_")[0]] = Chunk((), (), *place)

    def _places(self) -> Iterator[tuple[tuple[str, str], tuple[str, int | None]]]:
        """Yield the items of `places`: ((kind, megapipe's name), (key, layer)) for each tensor.

        The kind is exp_avg, exp_avg_sq, master, or "" for weights. The key is the tensor's name in
        .metadata. If all layers share a key, each layer is yielded with its index in the tensor's
        first dimension. For any other tensor, the layer is None.
        """
        for key, size in self.sizes.items():
            # An extra state holds Transformer Engine's FP8 scales, which a run finds anew.
            if FLAT.match(key) or "_extra_state" in key:
                continue
            kind = ""
            name = key
            if match := _STATE.fullmatch(key):
                kind = _MASTER.get(match[1], match[1])
                name = match[2]
            if match := _STACKED.fullmatch(name):
                for layer in range(size[0]):
                    yield (kind, common_name(f"{match[1]}{layer}.{match[2]}")), (key, layer)
            else:
                yield (kind, common_name(name)), (key, None)

    def box(self, key: str, start: Sequence[int], stop: Sequence[int]) -> Tensor:
        """Return a part of a stored tensor, read from all chunks that have some of it.

        Args:
            key: the tensor's name in .metadata.
            start: the part's first index in each dimension.
            stop: the index after the part's last index, in each dimension.
        Raises: CheckpointError if chunks are missing or damaged.
        """
        shape = [b - a for a, b in zip(start, stop, strict=True)]
        left = math.prod(shape)
        found: Tensor | None = None
        for chunk in self._chunks.get(key, ()):
            # What the chunk and the asked part have in common, from low to high.
            low = [max(a, o) for a, o in zip(start, chunk.offsets, strict=True)]
            ends = [o + n for o, n in zip(chunk.offsets, chunk.sizes, strict=True)]
            high = [min(b, end) for b, end in zip(stop, ends, strict=True)]
            if any(a >= b for a, b in zip(low, high, strict=True)):
                continue
            part = chunk.read()
            if not isinstance(part, Tensor) or tuple(part.shape) != chunk.sizes:
                raise CheckpointError(f"{chunk.path} holds something else where {key} should be")
            # Only the chunk knows the type: .metadata has it as a name that is not imported.
            if found is None:
                found = torch.empty(shape, dtype=part.dtype)
            part = part[_slices(low, high, chunk.offsets)]
            found[_slices(low, high, start)] = part
            # Chunks do not overlap, so that counting elements finds a missing chunk.
            left -= part.numel()
        if found is None or left:
            raise CheckpointError(f"{self.folder} has not all of {key}")
        return found

    @property
    def common(self) -> dict[str, Any]:
        """{name: value} of data other than tensors: arguments, iteration and so on."""
        # Up to core_v0.18.2, a file of its own.
        path = self.folder / "common.pt"
        if path.exists():
            return dict(read_torch(path))
        if "common_state" not in self.objects:
            raise CheckpointError(f"{self.folder} has neither a common.pt nor a common_state")
        return dict(self.objects["common_state"].read()[0])

    def shapes(self, kind: str) -> dict[str, tuple[int, ...]]:
        """Return {megapipe's name: whole shape} of the tensors of a kind.

        Args:
            kind: exp_avg, exp_avg_sq, master, or "" for the model's weights.
        """
        found = {}
        for (its_kind, name), (key, layer) in self.places.items():
            if its_kind == kind:
                size = self.sizes[key]
                found[name] = size if layer is None else size[1:]
        return found

    def pieces(self, name: str) -> int:
        """Return 1, because `shapes` are of whole tensors and not of a rank's slices."""
        return 1

    def read(self, kind: str, name: str, layout: Layout) -> Tensor:
        """Return a whole tensor in the shape in which megapipe saves it.

        Args:
            kind: exp_avg, exp_avg_sq, master, or "" for the model's weights.
            name: megapipe's name of the parameter.
            layout: the parameter's layout, which gives that shape.
        """
        key, layer = self.places[kind, name]
        stop = list(self.sizes[key])
        start = [0] * len(stop)
        # One row of a stacked tensor: the chunks of other layers are not read.
        if layer is not None:
            start[0] = layer
            stop[0] = layer + 1
        return joined([self.box(key, start, stop)], layout)

    def row(self, group: int, number: int, orders: Sequence[Sequence[str]]) -> Row:
        """Return the distributed optimizer's state of one model chunk, stored in flat vectors.

        The vectors are read later, by a function of the returned Row.

        Args:
            group: index of the group of data-parallel ranks that share the chunk.
            number: index of the chunk on its pipeline rank, 0 without virtual stages.
            orders: possible orders of the chunk's parameters, each a list of names. The Row keeps
                them, and `FlatState.find` takes the order that fits the weights.
        """
        start = f"optimizer.distributed.dp_group_idx_{group}.gbuf_idx_{number}.dtype_"
        pattern = re.compile(re.escape(start) + r"[^/]*\.bucket_idx_(\d+)\.param")
        matches = [match for match in map(pattern.fullmatch, self.sizes) if match]
        buckets = [match[0] for match in sorted(matches, key=lambda match: int(match[1]))]

        def read(kind: str, start: int, stop: int) -> Tensor:
            # Buckets follow each other; `first` is the first number of the current one.
            parts = []
            first = 0
            for key in buckets:
                size = self.sizes[key][0]
                low = max(start, first)
                high = min(stop, first + size)
                if low < high:
                    its = key
                    if kind != "master":
                        its = key.removesuffix("param") + kind
                    parts.append(self.box(its, [low - first], [high - first]))
                first += size
            return torch.cat(parts)

        return Row(sum(self.sizes[key][0] for key in buckets), read, orders)


def _slices(low: Sequence[int], high: Sequence[int], origin: Sequence[int]) -> tuple[slice, ...]:
    """Return the slices that select a box of a tensor from one stored part of the tensor.

    Args:
        low, high: the box's first index, and the index after the box, in each dimension of the
            whole tensor.
        origin: the part's first index in each dimension of the whole tensor.
    """
    return tuple(slice(a - o, b - o) for a, b, o in zip(low, high, origin, strict=True))


def _numbers(size: Any) -> tuple[int, ...]:
    """Return the dimensions of a torch.Size that `read_pickle` has read.

    Args:
        size: a `Named`, the stand-in for an object of a pickle. Its one argument is a tuple of the
            dimensions.
    """
    return tuple(map(int, size.args[0]))
