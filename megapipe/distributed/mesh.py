"""The mesh: who a process is and with whom it talks, the axes of both grids (grid.py) over one world of ranks.

Plain frozen objects, made once; nothing else in the package asks torch.distributed who it is.
"""

from __future__ import annotations

import os
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
from megapipe.distributed.device import backend_of, gpu_name
from megapipe.distributed.grid import Grids
from megapipe.distributed.groups import Sets, check_backend, device_mesh_of, group_of, group_of_one, links_of
from megapipe.distributed.meeting.agreement import agree, agree_in, taken
from megapipe.distributed.meeting.meeting import meet
from megapipe.distributed.meeting.position import Position
from megapipe.distributed.shared_memory import SharedMemory
from megapipe.errors import ConfigError

SHARES: Mapping[str, Sequence[int]] = {"ends": (0, -1), "twins": ()}
"""The ranks of a pipeline that share weights, where no plan says it."""
JOINT = {
    "tp-pp": ("tp", "pp"),
    "tp-cp": ("tp", "cp"),
    "tp-dp": ("tp", "dp"),
    "tp-dp-cp": ("tp", "dp_cp"),
    "etp-ep-pp": ("experts", "pp"),
}
"""Axes over several others, for code in Megatron's shape, and the two of the mesh that have the same ranks."""


@dataclass(frozen=True)
class ProcessMesh:
    """The axes of one process.

    Attributes:
        tp: with `beside`, what splits weights: a layer is handed this axis alone.
        dp_cp: data and context parallel together: the ranks that hold the same weights and sum their gradients. The
            axis dp itself where sequences are not cut.
        etp, ep, edp: of the experts: which split each one, which share them, which hold the same ones and sum their
            gradients.
        experts: ep and etp together: the ranks that have a stage's experts once among them.
        ends: the ranks of this rank's pipeline that share a weight: the first and the last a tied embedding under a
            loop placement, and those with depths of multi-token prediction; size 1 for all others.
        twins: this rank and its mirror image r, p-1-r in its pipeline, which hold the same stages under DualPipe; size
            1 for the middle rank of an odd pipeline, and under every other schedule.
        device_mesh: torch's view (dimensions pp, dp, cp if it has ranks, tp), for distributed checkpoints; None in a
            process of its own and for ranks that are threads.
        position: where this rank is in its work.
        store: what the launcher's processes share besides the groups; None where device_mesh is, and in a world that
            was there before.
        joint: axes over several others, "tp-pp" and the like, where they were asked for: the executor needs none.
        alone: a group of this rank by itself, for code that asks for the group of an axis of size 1; None where
            torch.distributed does not know the groups.
        virtual_rank, virtual_size: of the chunk that code in Megatron's shape is at, and how many a rank has; only
            read back by `parallel_state`.
        is_guest: torch.distributed was initialised before, and stays so after `close`.
        kept: what code in Megatron's shape keeps from step to step, by a name of its own. All copies of a mesh have
            the same dictionary.
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
        """Do passes have collectives of their own, behind which one that runs together with them can compute?"""
        return max(self.tp.size, self.cp.size, self.ep.size) > 1

    @staticmethod
    def current() -> ProcessMesh | None:
        """The mesh that `create` made last in this process, or a thread was given as a rank, until its `close`."""
        return _current.get()

    @staticmethod
    def required() -> ProcessMesh:
        """The mesh as `current` has it. Raises: ConfigError if there is none."""
        if (mesh := _current.get()) is None:
            raise ConfigError(
                "there is no mesh: call ProcessMesh.create(ParallelConfig(...), device) at the start of the program, "
                "or parallel_state.initialize_model_parallel"
            )
        return mesh

    def activate(self) -> ProcessMesh:
        """Be the `current` one, for code in Megatron's shape, which hands none down."""
        _current.set(self)
        return self

    @staticmethod
    def single(device: torch.device | None = None) -> ProcessMesh:
        """One process, no groups."""
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
    ) -> ProcessMesh:
        """The mesh of this process as torchrun started it; `single` when it is alone.

        Every communicator is made here, on all ranks in one order. World size must be tp x cp x dp x pp, and
        etp x ep x edp x pp. Where torch.distributed is initialised already, the mesh is made inside that world.

        Args:
            shares: which of `ends` and `twins` share weights (Plan.shares), and need groups; of ends the ranks.
            facts: what must be the same on all ranks, see `agreement.agree`; the sizes if None.
            joint: of JOINT, which axes over several others get a group.
        Raises: ConfigError if the sizes do not divide the world, the ranks do not meet in time, or their facts differ.
        """
        guest = dist.is_initialized()
        world_size = dist.get_world_size() if guest else int(os.environ.get("WORLD_SIZE", "1"))
        rank = dist.get_rank() if guest else int(os.environ.get("RANK", "0"))
        grids = Grids.of(parallel, world_size)
        if world_size == 1:
            return replace(ProcessMesh.single(device), is_guest=guest).activate()
        same = {**(facts or grids.sizes), "the kind of device": device.type}
        timeout, store = timedelta(minutes=parallel.distributed_timeout_minutes), None
        if guest:
            check_backend(device)
            agree_in(Axis(rank, world_size, tuple(range(world_size)), dist.group.WORLD, device), same)
        else:
            store = meet(rank, world_size, timeout.total_seconds())
            same |= taken(PrefixStore("gpus", store), gpu_name(device))
            agree(PrefixStore("agreement", store), rank, world_size, same)
        try:
            if store is not None:
                dist.init_process_group(
                    backend_of(device),
                    store=store,
                    rank=rank,
                    world_size=world_size,
                    timeout=timeout,
                    device_id=device if device.type == "cuda" else None,
                )
            mesh = _joined(grids, device, timeout, shares, joint, links_of(parallel))
            # A rank that closes its groups at once would cut off others that still connect to it.
            mesh.world.barrier()
        except RuntimeError as error:  # whole: NCCL's reason stands in its last lines
            raise ConfigError(
                f"rank {rank} on {socket.gethostname()} could not make its process groups "
                f"({backend_of(device)}, {device}):\n{error}"
            ) from error
        mesh = replace(mesh, store=store, is_guest=guest)
        mesh.set_timeout(timeout.total_seconds())
        return mesh.activate()

    def set_timeout(self, seconds: float) -> None:
        """Set how long a message or collective may take from now on.

        Gloo's messages keep the time of their group's making, half an hour in a device mesh: `watch` ends those.
        """
        self.position.limit_s = seconds
        # NCCL's own watchdog aborts the process without a word about the pass; ours comes first.
        timeout = timedelta(seconds=seconds + (30 if self.device.type == "cuda" else 0))
        # The public one is torch 2.14's; the private one warns from then on.
        set_timeout = getattr(dist, "set_timeout", None) or dist.distributed_c10d._set_pg_timeout
        for group in self.groups():
            set_timeout(timeout, group)

    def groups(self) -> list[dist.ProcessGroup]:
        """Groups that were made for it."""
        axes = (*(getattr(self, name) for name in axis_names()), *self.joint.values())
        found = dict.fromkeys(group for axis in axes for group in (axis.group, *axis.links) if group is not None)
        return [group for group in found if not (self.is_guest and group is dist.group.WORLD)]

    def close(self) -> None:
        """Leave the process groups."""
        current = _current.get()
        if current is not None and current.position is self.position:
            _current.set(None)
        if self.is_guest:
            for group in self.groups() if dist.is_initialized() else ():
                dist.destroy_process_group(group)
        elif self.device_mesh is not None:
            dist.destroy_process_group()


_current: ContextVar[ProcessMesh | None] = ContextVar("mesh", default=None)


def axis_names() -> list[str]:
    """The fields of a mesh that are axes."""
    return [x.name for x in fields(ProcessMesh) if isinstance(x.default, Axis)]


def _joined(
    grids: Grids,
    device: torch.device,
    timeout: timedelta,
    shares: Mapping[str, Sequence[int]],
    joint: Collection[str],
    links: int,
) -> ProcessMesh:
    rank, device_mesh = dist.get_rank(), device_mesh_of(grids, device)

    def make_group(name: str, sets: Sets) -> dist.ProcessGroup | None:
        if name in ("tp", "cp", "dp", "pp"):
            return device_mesh.get_group(name)
        if name == "world":
            return dist.group.WORLD
        return group_of(sets, rank, device, timeout, is_link=name.startswith("link"))

    links = links if backend_of(device) == "nccl" else 0
    mesh = build_mesh(grids, rank, device, make_group, device_mesh, shares, links, joint)
    alone = next((name for name in ("tp", "dp", "pp") if getattr(mesh, name).size == 1), None)
    return replace(mesh, alone=device_mesh.get_group(alone) if alone else group_of_one(rank))


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
    """The mesh of one rank of the grids.

    Args:
        make_group: (name, sets of ranks that share no rank) -> the group of this rank's set, or None if it is in none.
            All ranks call it as often and in one order.
        num_links: how many communicators the messages of a pipeline have, see `groups.links_of`.
        joint: names of JOINT.
    """
    made: dict[tuple[tuple[int, ...], ...], Axis] = {}

    def axis(name: str, sets: Iterable[Sequence[int]]) -> Axis:
        shared = [tuple(ranks) for ranks in sets if len(ranks) > 1]
        group = make_group(name, shared) if shared else None
        mine = next((ranks for ranks in shared if rank in ranks), None)
        return Axis(mine.index(rank), len(mine), mine, group, device) if mine else Axis(ranks=(rank,), device=device)

    def along(name: str, *names: str) -> Axis:
        """An axis of a grid; one that has the same ranks is the same."""
        sets = tuple(grids.sets(*(names or (name,))))
        # NCCL runs a communicator's calls one after another: tokens on their way do not stand behind sums of gradients.
        apart = name == "experts" and sets != tuple(grids.sets("tp"))
        if sets not in made or apart:
            made[sets] = axis(name, sets)
        found = made[sets]
        if name in ("tp", "experts") and found.group is not None and found.shared is None and device == CPU:
            called = "tensor-parallel group" if name == "tp" else "group of experts"
            shared = SharedMemory(found.rank, found.gather_json, position, called)
            found = replace(found, shared=shared)
        return found

    pipelines, position = grids.sets("pp"), Position()
    ends = [sorted({ranks[end] for end in shares.get("ends", ())}) for ranks in pipelines]
    twins = [(ranks[r], ranks[-1 - r]) for ranks in pipelines for r in range(len(ranks) // 2)]
    axes: dict[str, Any] = {name: along(name) for name in ("tp", "cp", "dp", "pp")}
    links = [axis(f"link{number}", pipelines).group for number in range(num_links)]
    axes |= {name: along(name) for name in ("etp", "ep", "edp")}
    axes |= {"dp_cp": along("dp_cp", "dp", "cp"), "experts": along("experts", "etp", "ep")}
    if axes["experts"].ranks == axes["tp"].ranks:
        axes["experts"] = axes["tp"]
    axes["tp"] = replace(axes["tp"], beside={name: axes[name] for name in ("etp", "ep", "experts")})
    axes["pp"] = replace(axes["pp"], links=tuple(group for group in links if group is not None))
    return ProcessMesh(
        **axes,
        world=axis("world", [range(len(pipelines) * len(pipelines[0]))]),
        ends=axis("ends", ends),
        twins=axis("twins", twins if "twins" in shares else ()),
        device=device,
        device_mesh=device_mesh,
        position=position,
        joint={name: along(name, *name.split("-")) for name in joint},
    )
