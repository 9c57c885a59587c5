"""A rank's part of a checkpoint: its tensors, and the safetensors files that it writes and reads.

Tensors have global names and full shapes. A rank that has a part of one says so by a DTensor, and
torch's distributed checkpoint writes the parts and reads any others.
"""

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
from megapipe.distributed.axis import Axis
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
    """A writer of safetensors files for torch's distributed checkpoint, which remembers file names.

    torch calls `write_data` on every rank, and `finish` on the first one.

    Attributes:
        mine: names of the files that this rank has written.
        everyones: on the first rank, names of the files of all ranks; elsewhere none.
    """

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
    """Return a context in which this rank's weights are gathered.

    Outside of the context a rank may have only shards of its weights, as in FSDP.

    Args:
        optimizer: gathers the shards; None if nothing is trained, so that nothing is sharded.
    """
    if optimizer is None:
        return nullcontext()
    return optimizer.gathers.whole()


def write(folder: Path, tensors: dict[str, Tensor], mesh: ProcessMesh) -> ShardWriter:
    """Write the tensors of all ranks, and return the writer, which has the files' names.

    Collective.

    Args:
        folder: where the files are written.
        tensors: this rank's tensors by key.
    Raises: CheckpointError with the failure of each rank.
    """
    writer = ShardWriter(str(folder), save_distributed=True)
    _call(save, folder, tensors, storage_writer=writer, no_dist=mesh.device_mesh is None)
    return writer


def read(folder: Path, tensors: dict[str, Tensor], mesh: ProcessMesh) -> None:
    """Read a checkpoint into `tensors` in place. Collective.

    `compare` must have found all these tensors in the folder.
    """
    reader = HuggingFaceStorageReader(str(folder))
    _call(load, folder, tensors, storage_reader=reader, no_dist=mesh.device_mesh is None)


def all_there(folder: Path, written: Iterable[str], files: Mapping[str, commit.Digest]) -> None:
    """Check that each written file has a digest. Raises: CheckpointError if not.

    Args:
        folder: the checkpoint, for the error.
        written: names of the files that ranks have written.
        files: {name: digest} of the files that were read back.
    """
    lacking = [name for name in written if name not in files]
    if lacking:
        raise CheckpointError(
            f"{folder} has shards that no rank has read back: {', '.join(lacking)}. Not saved"
        )


def tensors_of(
    stages: Sequence[nn.Module], held: dict[str, dict[str, Tensor]], mesh: ProcessMesh
) -> dict[str, Tensor]:
    """Return {key: tensor} for the tensors of this rank, as a checkpoint has them; not copied.

    A weight's key is its global name. Optimizer state has the kind in front, such as
    optimizer.exp_avg.NAME.

    Args:
        stages: this rank's stages.
        held: {kind of optimizer state: {parameter's name: tensor}}; empty to leave the state out.
    """
    params = dict(pair for stage in stages for pair in (*saved_tensors(stage), *histories(stage)))
    layouts = {name: layout_of(param) for name, param in params.items()}
    # A tied weight has its owner's key: ranks that hold the one or the other save one tensor, and
    # load the same. Where a rank holds both, one of them is enough.
    own = {
        name: param.detach()
        for name, param in params.items()
        if not _of_twin(layouts[name], mesh) and layouts[name].tied_to not in params
    }
    kinds = {"": own}
    for kind, views in held.items():
        kinds[f"optimizer.{kind}."] = views
    found = {}
    for prefix, views in kinds.items():
        for name, tensor in views.items():
            key = prefix + whole_name(layouts[name].tied_to or name)
            found[key] = _placed(tensor, layouts[name], mesh)
    return found


def from_twins(stages: Sequence[nn.Module], mesh: ProcessMesh) -> None:
    """Fill the vocabulary parts that no file has, if DualPipe's ranks split the vocabulary.

    DualPipe has two copies of the model. Pipeline ranks r and p - 1 - r hold equal parts of the
    vocabulary, and only one of them saves and loads each part. That rank sends it to the other.

    Args:
        stages: this rank's stages, whose parameters are filled.
    """
    params = dict(pair for stage in stages for pair in stage.named_parameters())
    if not any(_of_twin(layout_of(param), mesh) for param in params.values()):
        return
    # Both ranks broadcast in one order.
    for _, param in sorted(params.items()):
        share, shares = layout_of(param).part
        if shares > 1:
            mesh.twins.broadcast(param.detach(), mesh.twins.ranks.index(mesh.pp.ranks[share]))


def loadable(folder: Path, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return the tensors to load: all except FP8 histories that the folder does not have.

    An FP8 history has the largest values of recent steps. The folder may lack it, after a run in
    bf16, or have it in another length. The run then keeps its initial history.

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


def facts_of(tensors: Mapping[str, Tensor]) -> dict[str, str]:
    """Return the full shape and dtype of each tensor by key, as errors print them.

    Args:
        tensors: {key: tensor}, as `tensors_of` returns them.
    """
    return {key: _fact(list(tensor.shape), tensor.dtype) for key, tensor in tensors.items()}


def compare(folder: Path, needed: Mapping[str, str], with_optimizer: bool) -> None:
    """Compare a checkpoint's keys, shapes and dtypes with the tensors that a run needs.

    Args:
        folder: the checkpoint.
        needed: {key: text with full shape and dtype of the tensor}.
        with_optimizer: optimizer state is needed too.
    Raises: CheckpointError if they differ. torch itself would convert a dtype, and skip a key.
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


def _call(call: Callable[..., object], folder: Path, *args: object, **kwargs: object) -> None:
    """Call a function of torch.distributed.checkpoint, and turn its failure into our error.

    Args:
        call: the function; `args` and `kwargs` are its arguments.
        folder: the checkpoint, for the error.
    Raises: CheckpointError with the failure of each rank.
    """
    try:
        # A process alone has no process group, and torch warns of that.
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
    """Return the names of the files in torch's results of writing, each once.

    Args:
        results: for each rank, a result for each tensor that it wrote.
    """
    found = [result.storage_data.relative_path for row in results for result in row]
    return tuple(dict.fromkeys(found))


def _placed(tensor: Tensor, layout: Layout, mesh: ProcessMesh) -> Tensor:
    """Return this rank's part of a tensor as a DTensor of the tensor's full shape.

    A tensor that is not split is returned as a plain Tensor.

    Args:
        tensor: this rank's part, in any shape of as many elements.
        layout: how ranks split the tensor.
    """
    local = tensor.view(layout.local(mesh.tp))
    axes: dict[int, Axis] = {}
    for dim, name in layout.splits.items():
        axis = mesh.tp.named(name)
        if axis.size > 1:
            axes[dim] = axis
    shared = layout.part[1] > 1
    if not axes and not shared:
        return local
    assert mesh.device_mesh is not None, "ranks that are threads cannot save"
    dims = [*axes]
    if shared:
        # A part of the vocabulary is split over pipeline ranks, and again over tensor parallelism.
        both = mesh.device_mesh["pp", "tp"]
        groups = both.get_all_groups()
        ranks = both.mesh
        dims = [*layout.splits] * 2
    else:
        groups = [axis.group for axis in axes.values() if axis.group is not None]
        # Two axes split an expert's tensor alone, and the ranks of its grid have both.
        of_ranks = axes[dims[0]].ranks if len(axes) == 1 else mesh.experts.ranks
        ranks = torch.tensor(of_ranks).view([axis.size for axis in axes.values()])
    # On the tensor's own device: the state that ZeRO-1 splits lies on the host. A DTensor copies a
    # tensor of another device, and a load would fill the copy alone.
    names = tuple(map(str, range(len(groups))))
    of_axes = DeviceMesh.from_group(groups, local.device.type, ranks, mesh_dim_names=names)
    return DTensor.from_local(local, of_axes, [Shard(dim) for dim in dims], run_check=False)


def _of_twin(layout: Layout, mesh: ProcessMesh) -> bool:
    """Return whether another rank saves this rank's part of the vocabulary.

    Under DualPipe pipeline ranks r and p - 1 - r have equal parts, and one of them saves.

    Args:
        layout: the layout of a parameter; False for one that is not split over pipeline ranks.
    """
    # Shares are numbered as the ranks that save them.
    return layout.part[1] > 1 and layout.part[0] != mesh.pp.rank


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
