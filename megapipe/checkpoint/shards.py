"""A rank's part of a checkpoint: its tensors, and the safetensors files that it writes and reads.

Tensors have global names and full shapes. A rank that has a part of a tensor gives it to torch as a
DTensor. torch's distributed checkpoint writes the parts, and reads parts that are cut otherwise.
"""

from __future__ import annotations

import warnings
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.hf_storage import (
    HuggingFaceStorageReader,
    HuggingFaceStorageWriter,
)
from torch.distributed.checkpoint.metadata import Metadata
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
    Layout,
    histories,
    layout_of,
    saved_tensors,
    whole_name,
)
from megapipe.distributed.meeting.together import failure, together
from megapipe.distributed.mesh import ProcessMesh
from megapipe.errors import CheckpointError
from megapipe.optim.optimizer import Optimizer
from megapipe.optim.sharded.saved import Saved, SavedShard, allocate, has_memory, room_for


class ShardWriter(HuggingFaceStorageWriter):
    """A writer of a rank's safetensors files. torch's distributed checkpoint chooses the tensors.

    torch calls `write_data` on every rank. Nothing is written then: `keys` are the tensors that
    this rank is to write, and `write_files` writes them later, without torch's collectives.

    Args:
        folder: where the files are written.
    """

    def __init__(self, folder: Path) -> None:
        super().__init__(str(folder), save_distributed=True)
        self._plan = SavePlan([])
        self._planner: SavePlanner | None = None

    @property
    def keys(self) -> Collection[str]:
        """The keys of the tensors that this rank writes."""
        return {item.index.fqn for item in self._plan.items}

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        self._plan = plan
        self._planner = planner
        nothing = Future[list[WriteResult]]()
        nothing.set_result([])
        return nothing

    def write_files(self) -> tuple[str, ...]:
        """Write this rank's tensors, and return the names of their files."""
        assert self._planner is not None, "torch has chosen the tensors"
        written = super().write_data(self._plan, self._planner).value()
        # A file has many tensors.
        return tuple(dict.fromkeys(result.storage_data.relative_path for result in written))


class ShardReader(HuggingFaceStorageReader):
    """A reader of safetensors files for several loads, which reads the files' headers once."""

    _headers: Metadata | None = None

    def read_metadata(self) -> Metadata:
        if self._headers is None:
            self._headers = super().read_metadata()
        return self._headers


def saved_by(optimizer: Optimizer | None, *, with_state: bool) -> Saved:
    """Return the tensors that an optimizer has in a checkpoint.

    Args:
        optimizer: None if nothing is trained; the result is then empty.
        with_state: whether the optimizer's state is in the checkpoint.
    """
    if optimizer is None:
        return Saved({}, {}, [])
    return optimizer.saved(with_state=with_state)


def fill(
    folder: Path,
    tensors: Mapping[str, Tensor],
    shards: Sequence[SavedShard],
    keys: Collection[str],
    mesh: ProcessMesh,
) -> None:
    """Allocate the tensors with these keys, and gather the shards into them. Collective.

    A shard is a rank's part of a flat tensor under ZeRO. One full tensor is gathered at a time.

    Args:
        folder: the checkpoint, for errors.
        tensors: this rank's tensors by key.
        shards: the shards whose full tensors are among `tensors`.
        keys: the keys of the tensors that this rank writes.
    Raises: CheckpointError on all ranks with the failure of each rank.
    """
    rank = mesh.world.rank

    def allocate_all() -> Tensor | None:
        with _failures(folder, rank):
            for key in keys:
                allocate(_local(tensors[key]))
            return room_for(shards)

    # All memory first, on all ranks: whoever lacks some later would leave the others in a gather.
    memory = together(mesh, allocate_all)
    failed = None
    # A rank gathers all shards, though it may keep none: the others need its part.
    for shard in shards:
        flat = shard.gather(memory)
        try:
            shard.copy(flat)
        except Exception as error:
            failed = error

    def report() -> None:
        with _failures(folder, rank):
            if failed is not None:
                raise failed

    together(mesh, report)


def write(
    folder: Path, tensors: dict[str, Tensor], shards: Sequence[SavedShard], mesh: ProcessMesh
) -> tuple[str, ...]:
    """Write this rank's part of the tensors, and return the names of its files. Collective.

    Args:
        folder: where the files are written.
        tensors: this rank's tensors by key.
        shards: the shards whose full tensors are among `tensors`.
    Raises: CheckpointError on all ranks with the failure of each rank.
    """
    rank = mesh.world.rank
    writer = ShardWriter(folder)
    alone = mesh.device_mesh is None

    def choose() -> None:
        try:
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", message="torch.distributed is disabled")
                save(tensors, storage_writer=writer, no_dist=alone)
        except CheckpointException as error:
            failures = error.failures.items()
            raise CheckpointError([failure(folder, n, why) for n, (why, _) in failures]) from error

    def write_files() -> tuple[str, ...]:
        with _failures(folder, rank):
            return writer.write_files()

    # Shapes alone divide the writing among the ranks. Only then a rank knows what it needs.
    together(mesh, choose, folder)
    fill(folder, tensors, shards, writer.keys, mesh)
    return together(mesh, write_files)


def read(
    folder: Path, tensors: dict[str, Tensor], shards: Sequence[SavedShard], mesh: ProcessMesh
) -> None:
    """Read this rank's tensors from a checkpoint, in place. Each rank reads alone.

    Of a tensor that data-parallel ranks shard, the full tensor is read, and the rank's part kept.
    Such tensors are read one at a time. `facts.compare` must have found all tensors in the folder.

    Args:
        folder: the checkpoint.
        tensors: this rank's tensors by key.
        shards: the shards whose full tensors are among `tensors`.
    Raises: CheckpointError if the files cannot be read, or the rank has no memory for them.
    """
    reader = ShardReader(str(folder))
    full = {key: x for key, x in tensors.items() if not has_memory(_local(x))}
    others = {key: x for key, x in tensors.items() if key not in full}
    with _failures(folder, mesh.world.rank):
        load(others, storage_reader=reader, no_dist=True)
        for shard in shards:
            shard.allocate()
            there = {key: x for key, x in full.items() if has_memory(_local(x))}
            load(there, storage_reader=reader, no_dist=True)
            shard.keep()


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


def tensors_of(stages: Sequence[nn.Module], saved: Saved, mesh: ProcessMesh) -> dict[str, Tensor]:
    """Return {key: tensor} for the tensors of this rank, as a checkpoint has them; not copied.

    A weight's key is its global name. Optimizer state has the kind in front, such as
    optimizer.exp_avg.NAME.

    Args:
        stages: this rank's stages.
        saved: the optimizer's tensors.
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
    # Last, so that a full tensor has its key to itself. A depth of multi-token prediction may use
    # the memory of the tied head on its rank. Its view of that memory has no values now.
    for name, full in saved.weights.items():
        own.pop(name, None)
        own[name] = full
    kinds = {"": own}
    for kind, views in saved.state.items():
        kinds[f"optimizer.{kind}."] = views
    found = {}
    made: dict[tuple[object, ...], DeviceMesh] = {}
    for prefix, views in kinds.items():
        for name, tensor in views.items():
            key = prefix + whole_name(layouts[name].tied_to or name)
            found[key] = _placed(tensor, layouts[name], mesh, made)
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


def to_uses(stages: Sequence[nn.Module]) -> None:
    """Copy each weight that was read to the other parameters of this rank that are tied to it.

    `tensors_of` has one parameter for each key: the owner of a tied weight, or on a rank without
    the owner the last use.

    Args:
        stages: this rank's stages, whose parameters are filled.
    """
    params = dict(pair for stage in stages for pair in stage.named_parameters())
    uses = {name: layout_of(param).tied_to for name, param in params.items()}
    read = {owner: params[name] for name, owner in uses.items() if owner is not None} | params
    for name, owner in uses.items():
        # Trained uses are one memory, which may be released at this time.
        if owner is not None and not params[name].is_set_to(read[owner]):
            params[name].data.copy_(read[owner].data)


@contextmanager
def _failures(folder: Path, rank: int) -> Iterator[None]:
    """Return a context in which a failure of this rank becomes a CheckpointError.

    Args:
        folder: the checkpoint, for the error.
        rank: this rank's number.
    """
    try:
        # A rank that calls alone gives torch no process group, and torch warns of that.
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")
            yield
    except CheckpointException as error:
        # torch takes a rank that calls alone for rank 0.
        for why, _ in error.failures.values():
            raise CheckpointError(failure(folder, rank, why)) from error
    except Exception as error:
        raise CheckpointError(failure(folder, rank, error)) from error


def _local(tensor: Tensor) -> Tensor:
    """Return this rank's part of a tensor."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _placed(
    tensor: Tensor, layout: Layout, mesh: ProcessMesh, made: dict[tuple[object, ...], DeviceMesh]
) -> Tensor:
    """Return this rank's part of a tensor as a DTensor of the tensor's full shape.

    A tensor that is not split is returned as a plain Tensor.

    Args:
        tensor: this rank's part, in any shape of as many elements.
        layout: how ranks split the tensor.
        made: {device, axes: mesh} of earlier tensors, to which a new mesh is added. Torch takes
            two milliseconds for each.
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
        dims = [*layout.splits] * 2
    # On the tensor's own device: the state that ZeRO-1 splits lies on the host. A DTensor copies a
    # tensor of another device, and a load would fill the copy alone.
    kind = local.device.type
    key = (kind, shared, *(layout.splits[dim] for dim in axes))
    if key not in made:
        made[key] = _mesh_over(list(axes.values()), shared, mesh, kind)
    return DTensor.from_local(local, made[key], [Shard(dim) for dim in dims], run_check=False)


def _mesh_over(axes: list[Axis], shared: bool, mesh: ProcessMesh, kind: str) -> DeviceMesh:
    """Return the mesh of the ranks that split a tensor.

    Args:
        axes: the axes of several ranks that split it.
        shared: whether pipeline ranks split it too.
        kind: the type of the tensor's device.
    """
    assert mesh.device_mesh is not None
    if shared:
        # A part of the vocabulary is split over pipeline ranks, and again over tensor parallelism.
        both = mesh.device_mesh["pp", "tp"]
        groups = both.get_all_groups()
        ranks = both.mesh
    else:
        groups = [axis.group for axis in axes if axis.group is not None]
        # Two axes split an expert's tensor alone, and the ranks of its grid have both.
        of_ranks = axes[0].ranks if len(axes) == 1 else mesh.experts.ranks
        ranks = torch.tensor(of_ranks).view([axis.size for axis in axes])
    names = tuple(map(str, range(len(groups))))
    return DeviceMesh.from_group(groups, kind, ranks, mesh_dim_names=names)


def _of_twin(layout: Layout, mesh: ProcessMesh) -> bool:
    """Return whether another rank saves this rank's part of the vocabulary.

    Under DualPipe pipeline ranks r and p - 1 - r have equal parts, and one of them saves.

    Args:
        layout: the layout of a parameter; False for one that is not split over pipeline ranks.
    """
    # Shares are numbered as the ranks that save them.
    return layout.part[1] > 1 and layout.part[0] != mesh.pp.rank
