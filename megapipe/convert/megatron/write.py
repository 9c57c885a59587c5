"""Export a checkpoint to Megatron-LM's `torch_dist` format, one tensor at a time.

Megatron-LM's loader reshards this format, so that one checkpoint suits all sizes of tensor and
pipeline parallelism. Only the optimizer's state of experts differs with expert parallelism.

Megatron-LM's optimizers look for their state under different keys: float32, 16-bit weights, and the
distributed optimizer (in its form fully_reshardable). Keys of one tensor share its bytes.
"""

from __future__ import annotations

import io
import json
import pickle
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)

from megapipe.checkpoint import commit
from megapipe.config import ModelConfig
from megapipe.convert.checkpoints import Converted
from megapipe.convert.folders import fresh_folder
from megapipe.convert.megatron.args import args_of
from megapipe.convert.megatron.experts import is_experts, is_uniform
from megapipe.convert.megatron.export import Export, open_export
from megapipe.convert.megatron.names import in_layer, stored_names
from megapipe.convert.megatron.ranks import Sizes
from megapipe.convert.tensors import Progress, counted, is_trained
from megapipe.errors import CheckpointError

_OF_STATE = re.compile(r"optimizer\.(\w+)\.(.*)")
_KINDS = {
    "exp_avg": ("exp_avg",),
    "exp_avg_sq": ("exp_avg_sq",),
    "master": ("fp32_param", "param"),
}
"""megapipe's kinds of state -> Megatron-LM's. Main parameters have a name in each optimizer."""

# Modules that look for an extra state of their own: in all layers, in layers with latents, with a
# dense MLP and with experts, and in a depth of multi-token prediction.
_EXTRA = (
    "self_attention.core_attention",
    "self_attention.linear_proj",
    "self_attention.linear_qkv",
    "self_attention.q_layernorm",
    "self_attention.k_layernorm",
)
_EXTRA_LATENT = (
    "input_layernorm",
    "self_attention.kv_layernorm",
    "self_attention.linear_q_proj",
    "self_attention.linear_q_down_proj",
    "self_attention.linear_q_up_proj",
    "self_attention.linear_kv_down_proj",
    "self_attention.linear_kv_up_proj",
)
_EXTRA_DENSE = ("mlp.linear_fc1", "mlp.linear_fc2")
_EXTRA_SPARSE = (
    "pre_mlp_layernorm",
    "mlp.shared_experts.linear_fc1",
    "mlp.shared_experts.linear_fc2",
)
_EXTRA_DEPTH = ("enorm", "hnorm", "eh_proj", "final_layernorm")

_FILE_BYTES = 1 << 32
"""A file that is larger gets no further tensor."""
_FORM = {
    "distrib_optim_sharding_type": "fully_reshardable",
    "distrib_optim_fully_reshardable_mem_efficient": False,
    "singleton_local_shards": False,
    "chained_optim_avoid_prefix": True,
}
"""Choices of Megatron-LM's format, by which its loader forms the keys it looks for."""


class Writer:
    """Writes a distributed checkpoint of torch, in one process.

    Call `add` for each part of a tensor, `add_object` for other data, and then `close`. Without
    `close`, the checkpoint cannot be read.

    Args:
        folder: where the checkpoint's files are written.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._entries: dict[str, Any] = {}
        self._where: dict[MetadataIndex, _StorageInfo] = {}
        self._files = 0
        self._file = (folder / "__0_0.distcp").open("wb")

    def add(
        self, keys: Sequence[str], part: Tensor, offsets: Sequence[int], size: Sequence[int]
    ) -> None:
        """Write a part of a tensor once, and list the tensor under each of the keys.

        Args:
            keys: the keys under which a loader finds the tensor.
            part: the part.
            offsets: the part's first index in each dimension of the tensor.
            size: the tensor's whole shape.
        """
        # A copy: torch.save would write all of the tensor that a part is a view of.
        info = self._write(part.clone(memory_format=torch.contiguous_format))
        for key in keys:
            chunk = ChunkStorageMetadata(torch.Size(offsets), part.shape)
            properties = TensorProperties(dtype=part.dtype)
            empty = TensorStorageMetadata(properties, torch.Size(size), [])
            self._entries.setdefault(key, empty).chunks.append(chunk)
            self._where[MetadataIndex(key, chunk.offsets)] = info

    def add_object(self, key: str, value: Any) -> None:
        """Write an object other than a tensor, which a loader finds under `key`."""
        self._entries[key] = BytesStorageMetadata()
        # A list of one element, as Megatron-LM writes objects.
        self._where[MetadataIndex(key)] = self._write([value])

    def close(self) -> None:
        """Write .metadata, which completes the checkpoint."""
        # Last of all: without it, a checkpoint that was cut off cannot be taken for a whole one.
        self._file.close()
        metadata = Metadata(self._entries, None, self._where, StorageMeta())
        with (self.folder / ".metadata").open("wb") as file:
            pickle.dump(metadata, file)

    def _write(self, value: Any) -> _StorageInfo:
        """Append a value to the current file. Return (file's name, position, number of bytes).

        A new file is begun if the current one has become large.
        """
        if self._file.tell() > _FILE_BYTES:
            self._file.close()
            self._files += 1
            self._file = (self.folder / f"__0_{self._files}.distcp").open("wb")
        # Through a buffer: torch.save writes an archive that begins at byte 0 of its file.
        buffer = io.BytesIO()
        torch.save(value, buffer)
        at = self._file.tell()
        self._file.write(buffer.getbuffer())
        return _StorageInfo(Path(self._file.name).name, at, buffer.tell())


def export_megatron(
    folder: Path,
    target: Path,
    *,
    optimizer: bool = True,
    fused: bool | None = None,
    ep: int = 1,
    progress: Progress = lambda done, total: None,
) -> Converted:
    """Convert a checkpoint to TARGET/iter_NNNNNNN in Megatron-LM's `torch_dist` format.

    Megatron-LM loads it with --load TARGET --ckpt-format torch_dist.

    Args:
        folder: iter_NNNNNNN of megapipe.
        target: a new or empty folder.
        optimizer: export the optimizer's state, if the checkpoint has it.
        fused: whether the state is for Transformer Engine's or Apex's Adam, not for torch's. None:
            True for 16-bit weights.
        ep: number of expert-parallel ranks of the run that will load the result. If there are
            several, experts have an optimizer of their own.
        progress: is called with (done, total) before every tensor and at the end.

    Raises: CheckpointError if the checkpoint is damaged, Megatron-LM cannot express the model, or
        `ep` does not divide its experts.
    """
    export = open_export(folder, target, optimizer, fused)
    model = export.config.model
    if problems := list(Sizes(ep=ep).problems(model)):
        raise CheckpointError(problems)
    with_state = export.steps is not None
    names = [x for x in export.saved.shapes if with_state or not x.startswith("optimizer.")]
    with fresh_folder(target) as made:
        out = made / f"iter_{export.iteration:07d}"
        out.mkdir()
        writer = Writer(out)
        for name in counted(names, progress):
            _add(writer, name, export.saved.read(name), model, with_state)
        for key in _extras(model):
            writer.add_object(key, None)
        common = export.common(args_of(export.config)) | {"content_metadata": _FORM}
        common |= _state(export, separate=ep > 1)
        writer.add_object("common_state/shard_0_1", common)
        # Up to core_v0.18.2, Megatron-LM reads a file of its own instead of that entry.
        torch.save(common, out / "common.pt")
        formats = {
            "sharded_backend": "torch_dist",
            "common_backend": "torch",
            "sharded_backend_version": 1,
            "common_backend_version": 1,
        }
        (out / "metadata.json").write_text(json.dumps(formats))
        writer.close()
        commit.write_durably(made / commit.POINTER, str(export.iteration))
    notes = list(export.notes())
    if model.has_experts and with_state:
        ranks = "one rank"
        other = "N"
        if ep > 1:
            ranks = "several ranks"
            other = "1"
        notes.append(
            f"that state is for a run with experts on {ranks}; "
            f"others need --target-expert-parallel-size {other}"
        )
    rows = model.padded_vocab_size or 0
    return Converted(target / out.name, export.config, tuple(notes), rows)


def _add(writer: Writer, name: str, tensor: Tensor, model: ModelConfig, with_state: bool) -> None:
    """Write one of megapipe's tensors under all keys by which Megatron-LM looks for it.

    Args:
        writer: writes the checkpoint.
        name: megapipe's name of a weight, or of a tensor of the optimizer's state.
        tensor: the whole tensor.
        model: the configuration of the model.
        with_state: whether the optimizer's state is exported. Then a trained float32 weight is
            also listed as its own main parameter.
    """
    kinds: tuple[str, ...] = ()
    if match := _OF_STATE.fullmatch(name):
        kinds = _KINDS[match[1]]
        name = match[2]
        # Megatron-LM keeps the state in float32, unless a flag says otherwise.
        tensor = tensor.to(torch.promote_types(tensor.dtype, torch.float32))
    if model.gated and ".linear_fc1." in name:
        gate = int(is_experts(name))
        tensor = tensor.flatten(gate, gate + 1)
    offsets = [0] * tensor.ndim
    size = list(tensor.shape)
    names = [name]
    if (place := in_layer(name, model)) is not None:
        layer, inner = place
        start = name.removesuffix(inner).replace("mtp_model_layer", "transformer_layer")
        # Layers of one kind share a key, and their tensor counts them in its first dimension.
        if is_uniform(model) and name.startswith("decoder."):
            start = "decoder.layers."
            offsets.insert(0, layer)
            size.insert(0, model.layers)
            tensor = tensor[None]
        sparse = model.has_experts_in(layer)
        stored = stored_names(inner, sparse, model.multi_latent_attention)
        names = [start + its for its in stored]
    keys = names
    if kinds:
        keys = [f"optimizer.state.{kind}.{key}" for kind in kinds for key in names]
    elif with_state and tensor.dtype == torch.float32 and is_trained(name):
        # Weights in float32 are the main parameters as well.
        keys = [*names, *(f"optimizer.state.param.{key}" for key in names)]
    writer.add(keys, tensor, offsets, size)


def _extras(model: ModelConfig) -> Iterator[str]:
    """Yield the _extra_state keys that Megatron-LM's modules look for.

    Transformer Engine keeps its FP8 scales there. Without FP8 they are empty.
    """
    for layer in range(model.layers):
        if is_uniform(model):
            yield from _layer_extras(model, layer, "decoder.layers.", (layer, model.layers))
        else:
            yield from _layer_extras(model, layer, f"decoder.layers.{layer}.")
    for depth in range(model.depths):
        start = f"mtp.layers.{depth}."
        for module in _EXTRA_DEPTH:
            yield f"{start}{module}._extra_state/shard_0_1"
        # The layer of a depth is of the last layer's kind.
        yield from _layer_extras(model, model.layers - 1, f"{start}transformer_layer.")
    yield "decoder.final_layernorm._extra_state/shard_0_1"


def _layer_extras(
    model: ModelConfig, layer: int, start: str, part: tuple[int, int] | None = None
) -> Iterator[str]:
    """Yield the _extra_state keys of one layer's modules.

    Args:
        layer: number of the layer, which decides whether the layer has experts.
        start: the start of the keys.
        part: (layer's index, number of layers) if the keys do not name the layer. The keys then end
            in shard_INDEX_NUMBER. None if each layer has keys of its own, which end in shard_0_1.
    """
    sparse = model.has_experts_in(layer)
    modules = [*_EXTRA]
    if model.multi_latent_attention:
        modules += _EXTRA_LATENT
    modules += _EXTRA_SPARSE if sparse else _EXTRA_DENSE
    n, count = part or (0, 1)
    for module in modules:
        yield f"{start}{module}._extra_state/shard_{n}_{count}"
    if not sparse:
        return
    for expert in range(model.experts):
        # Shards are counted in two dimensions if layers share the key.
        shard = f"{expert}_{model.experts}"
        if part is not None:
            shard = f"{n}.{expert}_{count}.{model.experts}"
        for module in ("linear_fc1", "linear_fc2"):
            yield f"{start}mlp.experts.experts.{module}._extra_state/shard_{shard}"


def _state(export: Export, separate: bool) -> dict[str, Any]:
    """Return {"optimizer": ..., "opt_param_scheduler": ...}, without tensors of parameters.

    The dict is empty if no state is exported.

    Args:
        export: the opened checkpoint.
        separate: whether experts have an optimizer of their own.
    """
    if export.steps is None:
        return {}
    steps = {}
    if not export.fused:
        steps["common_step"] = torch.tensor(float(export.steps))
    optimizer: dict[Any, Any] = _optimizer(export, steps, of_experts=False)
    if separate:
        optimizer = {0: optimizer, 1: _optimizer(export, steps, of_experts=True)}
    return {"optimizer": optimizer, "opt_param_scheduler": export.scheduler()}


def _optimizer(export: Export, steps: dict[str, Tensor], of_experts: bool) -> dict[str, Any]:
    """Return the data of one optimizer, without the tensors of parameters.

    Args:
        export: the opened checkpoint.
        steps: {"common_step": number of steps} for torch's Adam; empty for a fused Adam.
        of_experts: whether the optimizer has only parameters of experts.
    """
    groups = export.groups()
    for group in groups:
        group["is_expert_parallel"] = of_experts
    # Experts without biases have no parameter in the group without weight decay.
    if of_experts and not export.config.model.bias:
        groups = groups[:1]
    # The optimizer of float32 weights has it at the top, the others one level deeper.
    return {
        "state": dict(steps),
        "param_groups": groups,
        "optimizer": {"state": dict(steps), "param_groups": groups},
        "param_state_sharding_type": _FORM["distrib_optim_sharding_type"],
    }
