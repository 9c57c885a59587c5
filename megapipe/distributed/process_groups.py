"""Give a mesh's process groups Megatron-LM's names, for code that passes groups on."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, fields
from datetime import timedelta
from functools import cache

import torch
import torch.distributed as dist
from torch.distributed import HashStore, ProcessGroupGloo  # type: ignore[attr-defined]

from megapipe.distributed.axis import CPU, Axis
from megapipe.distributed.mesh import JOINT, ProcessMesh

Group = dist.ProcessGroup
# Megatron-LM's name of a group -> the field of ProcessMesh, or the name in JOINT.
_AXES = {name: name for name in ("tp", "pp", "cp", "dp", "dp_cp", "ep")}
_AXES |= {"expt_tp": "etp", "expt_dp": "edp", "tp_ep": "experts"}
_JOINT = {
    "mp": "tp-pp",
    "tp_cp": "tp-cp",
    "tp_dp": "tp-dp",
    "tp_dp_cp": "tp-dp-cp",
    "tp_ep_pp": "etp-ep-pp",
}


@dataclass(repr=False)
class ProcessGroupCollection:
    """Megatron's collection of a rank's process groups, with Megatron's names.

    The fields are groups, named after their axes: tp, pp, cp, dp, mp (tp with pp), ep, expt_ for
    experts, embd for embeddings. A group is None if the rank has none, or if it was not asked for.
    dp_cp_ag and expt_dp_ag are None, because parameters are gathered over dp_cp and expt_dp. `of`
    and `use_mpu_process_groups` make the collection from a mesh.
    """

    tp: Group | None = None
    pp: Group | None = None
    cp: Group | None = None
    dp: Group | None = None
    dp_cp: Group | None = None
    mp: Group | None = None
    tp_cp: Group | None = None
    tp_dp: Group | None = None
    tp_dp_cp: Group | None = None
    ep: Group | None = None
    expt_tp: Group | None = None
    expt_dp: Group | None = None
    tp_ep: Group | None = None
    tp_ep_pp: Group | None = None
    embd: Group | None = None
    pos_embd: Group | None = None
    dp_cp_ag: Group | None = None
    expt_dp_ag: Group | None = None

    @staticmethod
    def of(mesh: ProcessMesh) -> ProcessGroupCollection:
        """Return the groups of a mesh."""
        axes = {field: getattr(mesh, name) for field, name in _AXES.items()}
        for field, name in _JOINT.items():
            axis = joint_axis(mesh, name)
            if axis is not None:
                axes[field] = axis
        # As in Megatron-LM, the first and the last rank have a group for tied embeddings, and the
        # first one another for position embeddings.
        is_end = mesh.pp.rank in (0, mesh.pp.size - 1)
        if is_end and (mesh.ends.size > 1 or mesh.pp.size == 1):
            axes["embd"] = mesh.ends
        if mesh.pp.rank == 0:
            axes["pos_embd"] = Axis(device=mesh.device)
        return ProcessGroupCollection(
            **{field: group_of(mesh, axis) for field, axis in axes.items()}
        )

    @staticmethod
    def use_mpu_process_groups(
        required_pgs: Collection[str] | None = None,
    ) -> ProcessGroupCollection:
        """Return a collection with the current mesh's groups of these names; None for all names.

        Raises: ValueError for names that Megatron's collection does not have, and ConfigError
            without a mesh.
        """
        found = ProcessGroupCollection.of(ProcessMesh.required())
        names = {field.name for field in fields(ProcessGroupCollection)}
        wanted = names if required_pgs is None else set(required_pgs)
        unknown = wanted - names
        if unknown:
            listed = ", ".join(map(str, sorted(unknown)))
            raise ValueError(
                f"Invalid process groups requested: {listed}; there are {', '.join(sorted(names))}"
            )
        return ProcessGroupCollection(**{name: getattr(found, name) for name in wanted})

    def __repr__(self) -> str:
        """Name the groups with their sizes, as Megatron-LM does: ProcessGroupCollection(tp(4))."""
        groups = {field.name: getattr(self, field.name) for field in fields(self)}
        sizes = [f"{name}({group.size()})" for name, group in groups.items() if group is not None]
        return f"ProcessGroupCollection({', '.join(sizes) or 'empty'})"


def group_of(mesh: ProcessMesh, axis: Axis) -> Group:
    """Return the group of an axis; an axis of size 1 gets a group of this rank alone."""
    if axis.group is not None:
        return axis.group
    # A world of one rank has a group of one already.
    if mesh.alone is None and dist.is_initialized() and dist.get_world_size() == 1:
        return dist.distributed_c10d._get_default_group()
    return mesh.alone or _nobody_else()


# A group of one keeps no state of its rank, so that all threads can share it.
@cache
def _nobody_else() -> Group:
    """Return a group of size 1 that torch.distributed does not know."""
    store = HashStore()
    group = Group(store, 0, 1)
    for device in (CPU, torch.device("cuda")):
        backend = ProcessGroupGloo(store, 0, 1, timedelta(minutes=1))
        group._register_backend(device, Group.BackendType.GLOO, backend)
    return group


def joint_axis(mesh: ProcessMesh, name: str) -> Axis | None:
    """Return the axis over two others, such as tp and cp; None if the mesh has no such group.

    No group is needed in two cases. If one of the two axes has size 1, the other axis is returned.
    If the two make up the world, the axis `world` is returned.

    Args:
        name: a key of JOINT, such as "tp-cp".
    """
    parts: list[Axis] = [getattr(mesh, part) for part in JOINT[name]]
    split = [axis for axis in parts if axis.size > 1]
    if not split:
        return parts[0]
    if len(split) == 1:
        return split[0]
    if split[0].size * split[1].size == mesh.world.size:
        return mesh.world
    return mesh.joint.get(name)
