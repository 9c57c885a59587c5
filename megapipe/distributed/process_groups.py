"""A mesh's process groups by Megatron-LM's names, for code that passes groups on."""

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
_AXES = {name: name for name in ("tp", "pp", "cp", "dp", "dp_cp", "ep")}
_AXES |= {"expt_tp": "etp", "expt_dp": "edp", "tp_ep": "experts"}
_JOINT = {"mp": "tp-pp", "tp_cp": "tp-cp", "tp_dp": "tp-dp", "tp_dp_cp": "tp-dp-cp", "tp_ep_pp": "etp-ep-pp"}
"""Megatron-LM's names, and those of a mesh's axes."""


@dataclass(repr=False)
class ProcessGroupCollection:
    """Megatron's collection of a rank's groups; None where there is none, or none was asked for.

    Attributes:
        dp_cp_ag, expt_dp_ag: None, as parameters are gathered over dp_cp and expt_dp.
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
        """The groups of a mesh."""
        axes = {name: getattr(mesh, of) for name, of in _AXES.items()}
        axes |= {field: axis for field, name in _JOINT.items() if (axis := joint_axis(mesh, name)) is not None}
        if mesh.pp.rank in (0, mesh.pp.size - 1) and (mesh.ends.size > 1 or mesh.pp.size == 1):
            axes["embd"] = mesh.ends
        if mesh.pp.rank == 0:
            axes["pos_embd"] = Axis(device=mesh.device)
        return ProcessGroupCollection(**{name: group_of(mesh, axis) for name, axis in axes.items()})

    @staticmethod
    def use_mpu_process_groups(
        required_pgs: Collection[str] | None = None,
    ) -> ProcessGroupCollection:
        """Return the current mesh's groups of these names, or all of them for None.

        Raises: ValueError for names that Megatron's collection does not have.
        """
        found = ProcessGroupCollection.of(ProcessMesh.required())
        names = {field.name for field in fields(ProcessGroupCollection)}
        wanted = names if required_pgs is None else set(required_pgs)
        if unknown := wanted - names:
            listed = ", ".join(map(str, sorted(unknown)))
            raise ValueError(f"Invalid process groups requested: {listed}; there are {', '.join(sorted(names))}")
        return ProcessGroupCollection(**{name: getattr(found, name) for name in wanted})

    def __repr__(self) -> str:
        """Name the groups with their sizes, as Megatron-LM does: ProcessGroupCollection(tp(4), pp(2))."""
        groups = {field.name: getattr(self, field.name) for field in fields(self)}
        sizes = [f"{name}({group.size()})" for name, group in groups.items() if group is not None]
        return f"ProcessGroupCollection({', '.join(sizes) or 'empty'})"


def group_of(mesh: ProcessMesh, axis: Axis) -> Group:
    """The group of an axis; of one of size 1, which has none, a group of this rank alone."""
    if axis.group is not None:
        return axis.group
    if mesh.alone is None and dist.is_initialized() and dist.get_world_size() == 1:
        return dist.distributed_c10d._get_default_group()
    return mesh.alone or _nobody_else()


@cache
def _nobody_else() -> Group:
    """A group of one that torch.distributed does not know of. It keeps nothing of its rank, so that all share it."""
    store = HashStore()
    group = Group(store, 0, 1)
    for device in (CPU, torch.device("cuda")):
        group._register_backend(device, Group.BackendType.GLOO, ProcessGroupGloo(store, 0, 1, timedelta(minutes=1)))
    return group


def joint_axis(mesh: ProcessMesh, name: str) -> Axis | None:
    """An axis over several others, where one of them has all ranks, all ranks are in it, or it was asked for."""
    parts: list[Axis] = [getattr(mesh, part) for part in JOINT[name]]
    many = [axis for axis in parts if axis.size > 1]
    if len(many) < 2:
        return many[0] if many else parts[0]
    return mesh.world if many[0].size * many[1].size == mesh.world.size else mesh.joint.get(name)
