"""A rank's part of a checkpoint: tensors under global names in full shapes, the files it writes, what a file holds."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.hf_storage import (
    HuggingFaceStorageReader,
    HuggingFaceStorageWriter,
)
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.checkpoint.storage import WriteResult
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.futures import Future

from megapipe.checkpoint import commit
from megapipe.distributed.layout import (
    HISTORY,
    Layout,
    histories,
    layout_of,
    saved_tensors,
    whole_name,
)
from megapipe.distributed.meeting.together import room
from megapipe.distributed.mesh import ProcessMesh
from megapipe.errors import CheckpointError
from megapipe.optim.optimizer import Optimizer


class ShardWriter(HuggingFaceStorageWriter):
    """Knows which files this rank has written, and on the first rank which ones all have."""

    mine: tuple[str, ...] = ()
    everyones: tuple[str, ...] = ()

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        written = super().write_data(plan, planner)
        self.mine = _names([written.value()])
        return written

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        self.everyones = _names(results)
        super().finish(metadata, results)


def whole_weights(optimizer: Optimizer | None) -> AbstractContextManager[None]:
    """All weights of the rank are there, to be saved or loaded, where it has shares of them alone between steps."""
    return nullcontext() if optimizer is None else optimizer.gathers.whole()


def write(folder: Path, tensors: dict[str, Tensor], mesh: ProcessMesh) -> ShardWriter:
    """Collective. Raises: CheckpointError with the failure of each rank."""
    writer = ShardWriter(str(folder), save_distributed=True)
    _call(save, folder, tensors, storage_writer=writer, no_dist=mesh.device_mesh is None)
    return writer


def read(folder: Path, tensors: dict[str, Tensor], mesh: ProcessMesh) -> None:
    """Into `tensors`, which `compare` has found there. Collective."""
    reader = HuggingFaceStorageReader(str(folder))
    _call(load, folder, tensors, storage_reader=reader, no_dist=mesh.device_mesh is None)


def all_there(folder: Path, written: Iterable[str], files: Mapping[str, commit.Digest]) -> None:
    if lacking := [name for name in written if name not in files]:
        raise CheckpointError(
            f"{folder} has shards that no rank has read back: {', '.join(lacking)}. Not saved"
        )


def tensors_of(
    stages: Sequence[nn.Module], held: dict[str, dict[str, Tensor]], mesh: ProcessMesh
) -> dict[str, Tensor]:
    """Tensors of this rank by global key, as views in saved shape. A tied weight has its owner's key, so ranks that
    hold the one or the other save one tensor and load the same. What `from_twins` brings is left out."""
    params = dict(pair for stage in stages for pair in (*saved_tensors(stage), *histories(stage)))
    layouts = {name: layout_of(param) for name, param in params.items()}
    saved = {name: param for name, param in params.items() if not _of_twin(layouts[name], mesh)}
    own = {
        name: param.detach() for name, param in saved.items() if layouts[name].tied_to not in params
    }
    kinds = {"": own, **{f"optimizer.{kind}.": views for kind, views in held.items()}}
    return {
        prefix + whole_name(layouts[name].tied_to or name): _placed(tensor, layouts[name], mesh)
        for prefix, views in kinds.items()
        for name, tensor in views.items()
    }


def from_twins(stages: Sequence[nn.Module], mesh: ProcessMesh) -> None:
    """The second copy of shares of the vocabulary, under DualPipe, from the mirrored rank, which has read its own."""
    params = dict(pair for stage in stages for pair in stage.named_parameters())
    if not any(_of_twin(layout_of(param), mesh) for param in params.values()):
        return
    for _, param in sorted(params.items()):  # in one order on both
        share, shares = layout_of(param).part
        if shares > 1:
            mesh.twins.broadcast(param.detach(), mesh.twins.ranks.index(mesh.pp.ranks[share]))


def loadable(folder: Path, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Tensors that the folder has, or must have: a run in FP8 may go on from one that was not, or remembered less."""
    if not any(key.endswith(HISTORY) for key in tensors):
        return tensors
    stored, facts = _stored(folder), facts_of(tensors)
    return {
        key: x
        for key, x in tensors.items()
        if not key.endswith(HISTORY) or stored.get(key) == facts[key]
    }


def facts_of(tensors: Mapping[str, Tensor]) -> dict[str, str]:
    """Full shape and dtype of each tensor, as errors print them."""
    return {key: _fact(list(tensor.shape), tensor.dtype) for key, tensor in tensors.items()}


def compare(folder: Path, needed: Mapping[str, str], with_optimizer: bool) -> None:
    """Raises: CheckpointError if keys, shapes or dtypes are not what the run needs; DCP would convert or skip some."""
    there = _stored(folder)
    if with_optimizer and not any(key.startswith("optimizer.") for key in there):
        raise CheckpointError(
            f"{folder} holds no optimizer state (--no-save-optim); add --no-load-optim"
        )
    # The state of a parameter that has been frozen since is left where it is.
    unread = {key for key in there if key.startswith("optimizer.")} - needed.keys()
    if with_optimizer:
        unread = {key for key in unread if key.split(".", 2)[2] in needed}
    unread |= {key for key in there if key.endswith(HISTORY) and key not in needed}
    there = {key: fact for key, fact in there.items() if key not in unread}
    wrong = [
        f"{key} is {there[key]}, not {needed[key]}"
        for key in needed
        if _compared(key, there.get(key, needed[key])) != _compared(key, needed[key])
    ]
    lacking = [key for key in needed if key not in there]
    state = bool(lacking) and all(key.startswith("optimizer.") for key in lacking)
    problems = [
        f"{folder.name} {text}: {_few(keys)}"
        for text, keys in (
            (
                "lacks state of parameters that were frozen then (add --no-load-optim)",
                lacking if state else [],
            ),
            ("lacks parameters that this model has", [] if state else lacking),
            ("has parameters that this model lacks", [key for key in there if key not in needed]),
            ("has other shapes or types (--bf16?) than this model", wrong),
        )
        if keys
    ]
    if problems:
        raise CheckpointError(problems)


def _stored(folder: Path) -> dict[str, str]:
    """Full shape and dtype of what a folder has. Raises: CheckpointError."""
    try:
        stored = HuggingFaceStorageReader(str(folder)).read_metadata().state_dict_metadata
    except (
        Exception
    ) as error:  # safetensors and DCP have no common class for a file that is none of theirs
        raise CheckpointError(f"{folder} cannot be read as safetensors: {error}") from None
    return {
        key: _fact(list(entry.size), entry.properties.dtype)
        for key, entry in stored.items()
        if isinstance(entry, TensorStorageMetadata)
    }


def _call(call: Callable[..., object], folder: Path, *args: object, **kwargs: object) -> None:
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")
            call(*args, **kwargs)
    except CheckpointException as error:
        raise CheckpointError(
            [
                f"{folder}, on rank {rank}: {why}{room(why, folder)}"
                for rank, (why, _) in error.failures.items()
            ]
        ) from error


def _names(results: Iterable[Iterable[WriteResult]]) -> tuple[str, ...]:
    return tuple(
        dict.fromkeys(result.storage_data.relative_path for row in results for result in row)
    )


def _placed(tensor: Tensor, layout: Layout, mesh: ProcessMesh) -> Tensor:
    local = tensor.view(layout.local(mesh.tp))
    along = {
        dim: axis for dim, name in layout.splits.items() if (axis := mesh.tp.named(name)).size > 1
    }
    shared = layout.part[1] > 1
    if not along and not shared:
        return local
    assert mesh.device_mesh is not None, "ranks that are threads cannot save"
    if shared:
        both = mesh.device_mesh["pp", "tp"]
        groups, ranks, dims = both.get_all_groups(), both.mesh, [*layout.splits] * 2
    else:
        axes, dims = [*along.values()], [*along]
        groups = [axis.group for axis in axes if axis.group is not None]
        ranks = torch.tensor(axes[0].ranks if len(axes) == 1 else mesh.experts.ranks)
        ranks = ranks.view([axis.size for axis in axes])
    # Of the tensor's own device: a DTensor copies what lies on another one, and a load would fill the copy alone. The
    # state that ZeRO-1 splits lies on the host.
    names = tuple(map(str, range(len(groups))))
    of_axes = DeviceMesh.from_group(groups, local.device.type, ranks, mesh_dim_names=names)
    return DTensor.from_local(local, of_axes, [Shard(dim) for dim in dims], run_check=False)


def _of_twin(layout: Layout, mesh: ProcessMesh) -> bool:
    """Ranks save the shares of the vocabulary in their order; another rank's is a copy."""
    return layout.part[1] > 1 and layout.part[0] != mesh.pp.rank


def _fact(shape: list[int], dtype: torch.dtype) -> str:
    return f"{shape} {str(dtype).removeprefix('torch.')}"


def _compared(key: str, fact: str) -> str:
    """Optimizer state may be of another type, as --exp-avg-dtype and its like say; it is converted."""
    return fact.rpartition(" ")[0] if key.startswith("optimizer.") else fact


def _few(texts: Sequence[str]) -> str:
    return ", ".join(texts[:3]) + (f" and {len(texts) - 3} more" if len(texts) > 3 else "")
