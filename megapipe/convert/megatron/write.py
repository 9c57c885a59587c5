"""Our checkpoint as Megatron-LM's `torch_dist`, whose loader cuts it anew; a tensor at a time.

The optimizer's state has the names that each of its optimizers asks for: FP32, with 16-bit weights, and distributed
(the form fully_reshardable). Where two of them mean one tensor, its bytes are there once.
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
from megapipe.convert.checkpoints import Converted, fresh_folder
from megapipe.convert.megatron.args import args_of
from megapipe.convert.megatron.experts import is_experts, is_uniform
from megapipe.convert.megatron.export import Export, open_export
from megapipe.convert.megatron.names import in_layer, stored_names
from megapipe.convert.megatron.ranks import Sizes
from megapipe.convert.tensors import Progress, counted, is_trained
from megapipe.errors import CheckpointError

_OF_STATE = re.compile(r"optimizer\.(\w+)\.(.*)")
_KINDS = {"exp_avg": ("exp_avg",), "exp_avg_sq": ("exp_avg_sq",), "master": ("fp32_param", "param")}
_EXTRA = tuple(
    f"self_attention.{name}" for name in ("core_attention", "linear_proj", "linear_qkv", "q_layernorm", "k_layernorm")
)
_EXTRA_LATENT = tuple(
    f"self_attention.linear_{name}" for name in ("q_proj", "q_down_proj", "q_up_proj", "kv_down_proj", "kv_up_proj")
)
_EXTRA_DEPTH = ("enorm", "hnorm", "eh_proj", "final_layernorm")
_EXTRA_DENSE = ("mlp.linear_fc1", "mlp.linear_fc2")
_EXTRA_SPARSE = ("pre_mlp_layernorm", "mlp.shared_experts.linear_fc1", "mlp.shared_experts.linear_fc2")
_FILE_BYTES = 1 << 32
_FORM = {
    "distrib_optim_sharding_type": "fully_reshardable",
    "distrib_optim_fully_reshardable_mem_efficient": False,
    "singleton_local_shards": False,
    "chained_optim_avoid_prefix": True,
}


class Writer:
    """A distributed checkpoint of torch, written by one process. Call `close` at the end."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._entries: dict[str, Any] = {}
        self._where: dict[MetadataIndex, _StorageInfo] = {}
        self._files = 0
        self._file = (folder / "__0_0.distcp").open("wb")

    def add(self, keys: Sequence[str], part: Tensor, offsets: Sequence[int], size: Sequence[int]) -> None:
        """A part of a tensor of this size, under each of these keys."""
        info = self._write(part.clone(memory_format=torch.contiguous_format))
        for key in keys:
            chunk = ChunkStorageMetadata(torch.Size(offsets), part.shape)
            empty = TensorStorageMetadata(TensorProperties(dtype=part.dtype), torch.Size(size), [])
            self._entries.setdefault(key, empty).chunks.append(chunk)
            self._where[MetadataIndex(key, chunk.offsets)] = info

    def add_object(self, key: str, value: Any) -> None:
        """Add what is no tensor."""
        self._entries[key] = BytesStorageMetadata()
        self._where[MetadataIndex(key)] = self._write([value])

    def close(self) -> None:
        """Write .metadata, by which the checkpoint is complete."""
        self._file.close()
        metadata = Metadata(self._entries, None, self._where, StorageMeta())
        with (self.folder / ".metadata").open("wb") as file:
            pickle.dump(metadata, file)

    def _write(self, value: Any) -> _StorageInfo:
        if self._file.tell() > _FILE_BYTES:
            self._file.close()
            self._files += 1
            self._file = (self.folder / f"__0_{self._files}.distcp").open("wb")
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
    """One of our checkpoints -> TARGET/iter_NNNNNNN, for Megatron-LM's --load TARGET --ckpt-format torch_dist.

    Args:
        folder: iter_NNNNNNN.
        optimizer: with its state, if the checkpoint has it.
        fused: is that for Transformer Engine's or Apex's Adam? Default: with 16-bit weights.
        ep: ranks of expert parallelism of the run that loads it: with several, experts have an optimizer of their own.
    Raises: CheckpointError for damage, or a model whose layers differ.
    """
    export = open_export(folder, target, optimizer, fused)
    if problems := list(Sizes(ep=ep).problems(export.config.model)):
        raise CheckpointError(problems)
    config, model, saved, steps = export.config, export.config.model, export.saved, export.steps
    iteration = export.iteration
    with fresh_folder(target) as made:
        out = made / f"iter_{iteration:07d}"
        out.mkdir()
        writer = Writer(out)
        names = [name for name in saved.shapes if steps is not None or not name.startswith("optimizer.")]
        for name in counted(names, progress):
            _add(writer, name, saved.read(name), model, steps is not None)
        for key in _extras(model):
            writer.add_object(key, None)
        common = export.common(args_of(config)) | {"content_metadata": _FORM} | _state(export, apart=ep > 1)
        writer.add_object("common_state/shard_0_1", common)
        torch.save(common, out / "common.pt")  # up to core_v0.18
        backends = {"sharded_backend": "torch_dist", "common_backend": "torch"}
        versions = {f"{name}_version": 1 for name in backends}
        (out / "metadata.json").write_text(json.dumps(backends | versions))
        writer.close()
        commit.write_durably(made / commit.POINTER, str(iteration))
    notes = export.notes()
    if model.has_experts and steps is not None:
        other = "--target-expert-parallel-size 1" if ep > 1 else "--target-expert-parallel-size N"
        several = "several ranks" if ep > 1 else "one rank"
        notes = *notes, f"that state is for a run with experts on {several}; others need {other}"
    return Converted(target / f"iter_{iteration:07d}", config, notes, model.padded_vocab_size or 0)


def _add(writer: Writer, name: str, tensor: Tensor, model: ModelConfig, with_state: bool) -> None:
    kinds: tuple[str, ...] = ()
    if match := _OF_STATE.fullmatch(name):
        kinds, name, tensor = _KINDS[match[1]], match[2], tensor.to(torch.promote_types(tensor.dtype, torch.float32))
    if model.gated and ".linear_fc1." in name:
        gate = int(is_experts(name))
        tensor = tensor.flatten(gate, gate + 1)
    offsets, size, names = [0] * tensor.ndim, list(tensor.shape), [name]
    if (place := in_layer(name, model)) is not None:
        layer, inner = place
        where = name.removesuffix(inner).replace("mtp_model_layer", "transformer_layer")
        if is_uniform(model) and name.startswith("decoder."):
            where, offsets, size, tensor = "decoder.layers.", [layer, *offsets], [model.layers, *size], tensor[None]
        names = [where + its for its in stored_names(inner, model.has_experts_in(layer), model.multi_latent_attention)]
    keys = [f"optimizer.state.{kind}.{key}" for kind in kinds for key in names] or names
    if with_state and not kinds and tensor.dtype == torch.float32 and is_trained(name):
        keys = [*keys, *(f"optimizer.state.param.{key}" for key in names)]  # the weights are the main parameters
    writer.add(keys, tensor, offsets, size)


def _extras(model: ModelConfig) -> Iterator[str]:
    """Keys of modules that ask for a state of their own, which is empty without fp8."""
    for layer in range(model.layers):
        stacked = is_uniform(model)
        where = "decoder.layers." + f"{layer}." * (not stacked)
        yield from _extras_of(model, layer, where, (layer, model.layers) if stacked else None)
    for depth in range(model.depths):
        where = f"mtp.layers.{depth}."
        yield from (f"{where}{module}._extra_state/shard_0_1" for module in _EXTRA_DEPTH)
        yield from _extras_of(model, model.layers - 1, f"{where}transformer_layer.")
    yield "decoder.final_layernorm._extra_state/shard_0_1"


def _extras_of(model: ModelConfig, layer: int, where: str, part: tuple[int, int] | None = None) -> Iterator[str]:
    """Keys of one layer. part: the layer's number and that of all layers, under a key of all."""
    sparse = model.has_experts_in(layer)
    n, of = part or (0, 1)
    latent = ("input_layernorm", "self_attention.kv_layernorm", *_EXTRA_LATENT) * model.multi_latent_attention
    for module in (*_EXTRA, *latent, *(_EXTRA_SPARSE if sparse else _EXTRA_DENSE)):
        yield f"{where}{module}._extra_state/shard_{n}_{of}"
    for expert in range(model.experts if sparse else 0):
        at = f"{expert}_{model.experts}" if part is None else f"{n}.{expert}_{of}.{model.experts}"
        for module in ("linear_fc1", "linear_fc2"):
            yield f"{where}mlp.experts.experts.{module}._extra_state/shard_{at}"


def _state(export: Export, apart: bool) -> dict[str, Any]:
    """The state of optimizer and learning rate beside tensors, where it goes out. apart: experts' is of their own."""
    if export.steps is None:
        return {}
    state = {} if export.fused else {"common_step": torch.tensor(float(export.steps))}

    def one(experts: bool) -> dict[str, Any]:
        groups = [group | {"is_expert_parallel": experts} for group in export.groups()]
        if experts and not export.config.model.bias:  # a group without parameters is not there
            groups = groups[:1]
        return {
            "state": dict(state),
            "param_groups": groups,
            "optimizer": {"state": dict(state), "param_groups": groups},
            "param_state_sharding_type": _FORM["distrib_optim_sharding_type"],
        }

    optimizer = {0: one(False), 1: one(True)} if apart else one(False)
    return {"optimizer": optimizer, "opt_param_scheduler": export.scheduler()}
