"""The mesh: the position of a process on every axis of both grids, and its communicators.

A mesh is a frozen value that is made once and handed down. Nothing else in the package asks
torch.distributed for its rank.
"""

from __future__ import annotations

import socket
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field, fields, replace
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore  # type: ignore[attr-defined]
from torch.distributed.device_mesh import DeviceMesh

from megapipe.config import ParallelConfig
from megapipe.distributed.axis import CPU, Axis
from megapipe.distributed.device import backend_of
from megapipe.distributed.grid import Grids
from megapipe.distributed.groups import (
    Sets,
    device_mesh_of,
    group_of,
    group_of_one,
    links_of,
)
from megapipe.distributed.meeting.met import Met
from megapipe.distributed.meeting.position import Position
from megapipe.distributed.shared_memory import SharedMemory
from megapipe.errors import ConfigError

SHARES: Mapping[str, Sequence[int]] = {"ends": (0, -1), "twins": ()}
"""The pipeline ranks that share weights, if no plan says which."""
JOINT = {
    "tp-pp": ("tp", "pp"),
    "tp-cp": ("tp", "cp"),
    "tp-dp": ("tp", "dp"),
    "tp-dp-cp": ("tp", "dp_cp"),
    "etp-ep-pp": ("experts", "pp"),
}
"""Axes over several others that Megatron has groups for, each as two axes of the mesh."""


@dataclass(frozen=True)
class ProcessMesh:
    """The axes of one process: its ranks along each kind of parallelism.

    `create` makes the mesh, or `single` for a single process. `close` destroys its groups.
    `current` returns the mesh of this process.

    Attributes:
        tp: tensor parallelism. Layers get only this axis, which also has etp, ep and experts.
        cp: context parallelism, which splits sequences.
        dp: data parallelism.
        dp_cp: data and context parallelism together, the ranks with equal weights that sum their
            gradients. This is the axis dp itself if sequences are not split.
        pp: the pipeline.
        etp: tensor parallelism of experts, which splits each expert.
        ep: expert parallelism, which distributes experts.
        edp: the ranks with equal experts, which sum the gradients of the experts.
        experts: ep and etp together, the ranks that have all experts of a stage once.
        world: all ranks.
        ends: the ranks of this pipeline that share a weight: the first and the last one for a tied
            embedding, and ranks with multi-token prediction. Size 1 on all other ranks.
        twins: this rank r and rank p-1-r of its pipeline, which hold equal stages under DualPipe.
            Size 1 for the middle rank of an odd pipeline, and if `shares` has no key "twins".
        device: device of this process.
        device_mesh: torch's DeviceMesh (pp, dp, cp if it has several ranks, tp), for distributed
            checkpoints. None without other processes, and for ranks that are threads.
        position: where this rank is in its work, for diagnosis.
        store: a store that all processes share. None without a device mesh, and if
            torch.distributed was initialised before.
        joint: {name, such as "tp-cp": axis over these two}, for the axes that the caller asked for.
        alone: a group of this rank alone, for code that asks for the group of an axis of size 1.
            None if torch.distributed does not know the groups.
        virtual_rank: the model chunk that Megatron's code is working on, only for `parallel_state`.
        virtual_size: number of model chunks on each rank, only for `parallel_state`.
        is_guest: whether torch.distributed was initialised before. `close` then leaves it
            initialised.
        kept: {name: state} that Megatron-like functions keep from step to step. All copies of a
            mesh share this dictionary.
    """

    tp: Axis = Axis()
    cp: Axis = Axis()
    dp: Axis = Axis()
    dp_cp: Axis = Axis()
    pp: Axis = Axis()
    etp: Axis = Axis()
    ep: Axis = Axis()
    edp: Axis = Axis()
    experts: Axis = Axis()
    world: Axis = Axis()
    ends: Axis = Axis()
    twins: Axis = Axis()
    device: torch.device = CPU
    device_mesh: DeviceMesh | None = None
    position: Position = field(default_factory=Position, compare=False)
    store: PrefixStore | None = field(default=None, compare=False)
    joint: Mapping[str, Axis] = field(default_factory=dict)
    alone: dist.ProcessGroup | None = None
    virtual_rank: int | None = None
    virtual_size: int | None = None
    is_guest: bool = False
    kept: dict[str, Any] = field(default_factory=dict, compare=False)

    @property
    def hides(self) -> bool:
        """Whether tp, cp or ep has several ranks: passes then wait for collectives.

        Another pass of the same rank can compute during these waits, which hides them.
        """
        return max(self.tp.size, self.cp.size, self.ep.size) > 1

    @staticmethod
    def current() -> ProcessMesh | None:
        """Return the mesh that was activated last in this process or thread; None after `close`."""
        return _current.get()

    @staticmethod
    def required() -> ProcessMesh:
        """Return the current mesh.

        Raises: ConfigError if there is none.
        """
        mesh = _current.get()
        if mesh is None:
            raise ConfigError(
                "there is no mesh: call ProcessMesh.create(ParallelConfig(...), device) at the "
                "start of the program, or parallel_state.initialize_model_parallel"
            )
        return mesh

    def activate(self) -> ProcessMesh:
        """Make this the current mesh and return it.

        Functions with Megatron's interface, which take no mesh, then find it by `current`.
        """
        _current.set(self)
        return self

    @staticmethod
    def single(device: torch.device | None = None) -> ProcessMesh:
        """Return the mesh of a single process, without groups. A device of None is the CPU.

        It is not activated.
        """
        device = device or CPU
        axes: dict[str, Any] = dict.fromkeys(axis_names(), Axis(device=device))
        return ProcessMesh(**axes, device=device)

    @staticmethod
    def create(
        parallel: ParallelConfig,
        device: torch.device,
        shares: Mapping[str, Sequence[int]] = SHARES,
        facts: Mapping[str, str] | None = None,
        joint: Collection[str] = (),
        met: Met | None = None,
    ) -> ProcessMesh:
        """Make the mesh of this process, as torchrun started it, and activate it.

        All communicators are created here, on all ranks in one order. The world size must be tp x
        cp x dp x pp, and etp x ep x edp x pp. If torch.distributed is initialised already, the mesh
        is made within that world.

        Args:
            parallel: the sizes of the axes.
            device: device of this process.
            shares: {name: pipeline ranks with equal weights}. "ends" are ranks that use the same
                embedding or head, such as (0, -1). If there is a key "twins", ranks r and p-1-r
                get a group, for equal stages as under DualPipe. The default has both.
            facts: {name: value} that must be equal on all ranks; None for the sizes of the axes.
            joint: keys of JOINT, such as "tp-cp": axes over two others that get a group.
            met: the result of `Met.of`, if the ranks have compared their facts already; else None.
        Raises: ConfigError as `Met.of`, and if process groups cannot be made.
        """
        met = met or Met.of(parallel, device, facts)
        grids = Grids.of(parallel, met.world_size)
        if met.world_size == 1:
            return replace(ProcessMesh.single(device), is_guest=met.is_guest).activate()
        timeout = timedelta(minutes=parallel.distributed_timeout_minutes)
        # Naming the device lets NCCL connect at once and split its communicators, see `group_of`.
        device_id = device if device.type == "cuda" else None
        try:
            if met.store is not None:
                dist.init_process_group(
                    backend_of(device),
                    store=met.store,
                    rank=met.rank,
                    world_size=met.world_size,
                    timeout=timeout,
                    device_id=device_id,
                )
            mesh = _joined(grids, device, timeout, shares, joint, links_of(parallel))
            # A rank that closes its groups at once would cut off others that still connect to it.
            mesh.world.barrier()
        except RuntimeError as error:
            # The full text, because NCCL gives its reason in the last lines.
            raise ConfigError(
                f"rank {met.rank} on {socket.gethostname()} could not make its process groups "
                f"({backend_of(device)}, {device}):\n{error}"
            ) from error
        mesh = replace(mesh, store=met.store, is_guest=met.is_guest)
        mesh.set_timeout(timeout.total_seconds())
        return mesh.activate()

    def set_timeout(self, seconds: float) -> None:
        """Set how long a message or a collective may take from now on, in seconds.

        Gloo's messages keep the timeout with which their group was made, half an hour in a device
        mesh. `pipeline_parallel.watch` ends such messages.
        """
        self.position.limit_s = seconds
        # NCCL's watchdog aborts the process without saying in which pass it was. With 30 s more,
        # megapipe's own watch reports first.
        extra = 30 if self.device.type == "cuda" else 0
        timeout = timedelta(seconds=seconds + extra)
        # torch 2.14 has a public function and warns about the private one.
        set_timeout = getattr(dist, "set_timeout", None) or dist.distributed_c10d._set_pg_timeout
        for group in self.groups():
            set_timeout(timeout, group)

    def groups(self) -> list[dist.ProcessGroup]:
        """Return the process groups that were made for this mesh, each once."""
        axes = [*(getattr(self, name) for name in axis_names()), *self.joint.values()]
        found: dict[dist.ProcessGroup, None] = {}
        for axis in axes:
            for group in (axis.group, *axis.links):
                # The world of a guest belongs to the program that made it.
                is_foreign = self.is_guest and group is dist.group.WORLD
                if group is not None and not is_foreign:
                    found[group] = None
        return list(found)

    def close(self) -> None:
        """Destroy the process groups of this mesh, which is then no longer the current one.

        If torch.distributed was initialised before the mesh, it stays so.
        """
        current = _current.get()
        # Copies of a mesh share its position.
        if current is not None and current.position is self.position:
            _current.set(None)
        if self.is_guest:
            groups = self.groups() if dist.is_initialized() else []
            for group in groups:
                dist.destroy_process_group(group)
        elif self.device_mesh is not None:
            dist.destroy_process_group()


_current: ContextVar[ProcessMesh | None] = ContextVar("mesh", default=None)


def axis_names() -> list[str]:
    """Return the names of the fields of ProcessMesh that are axes."""
    return [x.name for x in fields(ProcessMesh) if isinstance(x.default, Axis)]


def _joined(
    grids: Grids,
    device: torch.device,
    timeout: timedelta,
    shares: Mapping[str, Sequence[int]],
    joint: Collection[str],
    links: int,
) -> ProcessMesh:
    """Return the mesh of this process, with groups made by torch.distributed.

    Args:
        grids: the grids of the world.
        timeout: the timeout of messages and collectives.
        shares, joint: {name: pipeline ranks with equal weights}, and names of further axes, both as
            for `ProcessMesh.create`.
        links: number of communicators for messages within a pipeline.
    """
    rank = dist.get_rank()
    device_mesh = device_mesh_of(grids, device)

    def make_group(name: str, sets: Sets) -> dist.ProcessGroup | None:
        if name in ("tp", "cp", "dp", "pp"):
            return device_mesh.get_group(name)
        if name == "world":
            return dist.group.WORLD
        return group_of(sets, rank, device, timeout, is_link=name.startswith("link"))

    links = links if backend_of(device) == "nccl" else 0
    mesh = build_mesh(grids, rank, device, make_group, device_mesh, shares, links, joint)
    # The device mesh has made a group of one for each of its axes of size 1.
    for name in ("tp", "dp", "pp"):
        if getattr(mesh, name).size == 1:
            return replace(mesh, alone=device_mesh.get_group(name))
    return replace(mesh, alone=group_of_one(rank))


def build_mesh(
    grids: Grids,
    rank: int,
    device: torch.device,
    make_group: Callable[[str, Sets], dist.ProcessGroup | None],
    device_mesh: DeviceMesh | None = None,
    shares: Mapping[str, Sequence[int]] = SHARES,
    num_links: int = 0,
    joint: Collection[str] = (),
) -> ProcessMesh:
    """Return the mesh of one rank.

    Args:
        grids: the grids of the world.
        rank: the global rank.
        device: the rank's device.
        make_group: takes a name and disjoint sets of ranks. The function returns the group of this
            rank's set, or None if no set has the rank. All ranks call it in the same order.
        device_mesh: torch's DeviceMesh, for distributed checkpoints; None without one.
        shares, joint: {name: pipeline ranks with equal weights}, and names of further axes, both as
            for `ProcessMesh.create`.
        num_links: number of communicators for messages within a pipeline.
    """
    # Axes by their sets of ranks, so that equal sets share one communicator.
    made: dict[tuple[tuple[int, ...], ...], Axis] = {}

    # A group is made for all sets at once: ranks outside a set take part in making its group.
    def axis(name: str, sets: Iterable[Sequence[int]]) -> Axis:
        """Return this rank's axis of the sets, with a new group if any set has several ranks."""
        several = [tuple(ranks) for ranks in sets if len(ranks) > 1]
        group = make_group(name, several) if several else None
        own = next((ranks for ranks in several if rank in ranks), None)
        if own is None:
            return Axis(ranks=(rank,), device=device)
        return Axis(own.index(rank), len(own), own, group, device)

    def along(name: str, *names: str) -> Axis:
        """Return an axis of a grid. Axes with equal ranks are one and the same object."""
        sets = tuple(grids.sets(*(names or (name,))))
        # NCCL runs the calls on a communicator one after another. With its own one, the exchange of
        # tokens does not wait for sums of gradients.
        is_separate = name == "experts" and sets != tuple(grids.sets("tp"))
        if sets not in made or is_separate:
            made[sets] = axis(name, sets)
        found = made[sets]
        # Passes wait for collectives on these two axes, and gloo sends through sockets.
        if name in ("tp", "experts") and found.group is not None and device == CPU:
            title = "tensor-parallel group" if name == "tp" else "group of experts"
            shared = SharedMemory(found.rank, found.gather_json, position, title)
            found = replace(found, shared=shared)
        return found

    pipelines = grids.sets("pp")
    position = Position()
    ends = [sorted({ranks[end] for end in shares.get("ends", ())}) for ranks in pipelines]
    twins = []
    if "twins" in shares:
        twins = [(ranks[r], ranks[-1 - r]) for ranks in pipelines for r in range(len(ranks) // 2)]
    # Each call below may create groups. Its place is part of the one order that all ranks follow.
    axes: dict[str, Any] = {name: along(name) for name in ("tp", "cp", "dp", "pp")}
    links = [axis(f"link{number}", pipelines).group for number in range(num_links)]
    axes |= {name: along(name) for name in ("etp", "ep", "edp")}
    axes["dp_cp"] = along("dp_cp", "dp", "cp")
    axes["experts"] = along("experts", "etp", "ep")
    # Dense layers and experts then share the segments of shared memory, too.
    if axes["experts"].ranks == axes["tp"].ranks:
        axes["experts"] = axes["tp"]
    expert_axes = {name: axes[name] for name in ("etp", "ep", "experts")}
    axes["tp"] = replace(axes["tp"], expert_axes=expert_axes)
    axes["pp"] = replace(axes["pp"], links=tuple(group for group in links if group is not None))
    return ProcessMesh(
        **axes,
        world=axis("world", [range(len(pipelines) * len(pipelines[0]))]),
        ends=axis("ends", ends),
        twins=axis("twins", twins),
        device=device,
        device_mesh=device_mesh,
        position=position,
        joint={name: along(name, *name.split("-")) for name in joint},
    )
