"""Who a process is and with whom it talks: tensor, data and pipeline axes over one world of ranks.

Read once from torch's device mesh into plain frozen objects; nothing else in the package asks torch.distributed who it
is. Rank order as Megatron's: tensor parallel fastest, pipeline slowest.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import PrefixStore  # type: ignore[attr-defined]
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.rendezvous import rendezvous

from megapipe.config import ParallelConfig
from megapipe.device import backend_of
from megapipe.errors import ConfigError
from megapipe.position import Position
from megapipe.shared_memory import Exchange, SharedMemory

# torch 2.13 renamed these two and warns about the old names; 2.11 has only those.
_all_gather = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
_reduce_scatter = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)

CPU = torch.device("cpu")


@dataclass(frozen=True)
class Pending:
    """The result of a collective that may still be under way: read it after `wait` only."""

    tensor: Tensor
    work: dist.Work | Exchange | None = None

    def wait(self) -> Tensor:
        """The result, once it is here. To be called once."""
        if self.work is not None:
            self.work.wait()
        return self.tensor


@dataclass(frozen=True)
class Axis:
    """One axis of the mesh as a rank sees it. Size 1 needs no group and its collectives are the identity.

    Attributes:
        rank: position on the axis, 0..size-1.
        ranks: global rank at each position.
        group: communicator; None where size is 1.
        device: where its tensors live.
        shared: a faster way between CPU ranks of one host, where there is one.
    """

    rank: int = 0
    size: int = 1
    ranks: tuple[int, ...] = (0,)
    group: dist.ProcessGroup | None = None
    device: torch.device = CPU
    shared: SharedMemory | None = None

    def all_reduce(self, x: Tensor, op: str = "sum") -> Tensor:
        """Combine x over the axis in place and return it. op: sum, max or min."""
        return self.start_all_reduce(x, op).wait()

    def all_gather(self, x: Tensor) -> Tensor:
        """[n, ...] on each rank -> [size * n, ...], in rank order."""
        return self.start_all_gather(x).wait()

    def reduce_scatter(self, x: Tensor) -> Tensor:
        """[size * n, ...] on each rank -> the sum's own slice [n, ...]."""
        return self.start_reduce_scatter(x).wait()

    def start_all_reduce(self, x: Tensor, op: str = "sum") -> Pending:
        """`all_reduce` that runs while its caller goes on; so are the two below. x must not change before the end."""
        if self.size == 1:
            return Pending(x)
        exchange = self._exchange(x, lambda parts: _add(parts, x)) if op == "sum" else None
        op_of_torch = getattr(dist.ReduceOp, op.upper())
        return Pending(x, exchange or dist.all_reduce(x, op=op_of_torch, group=self.group, async_op=True))

    def start_all_gather(self, x: Tensor) -> Pending:
        if self.size == 1:
            return Pending(x)
        out = x.new_empty(self.size * x.shape[0], *x.shape[1:])
        exchange = self._exchange(x, lambda parts: torch.cat(list(parts), out=out))
        return Pending(out, exchange or _all_gather(out, x.contiguous(), group=self.group, async_op=True))

    def start_reduce_scatter(self, x: Tensor) -> Pending:
        if self.size == 1:
            return Pending(x)
        rows = x.shape[0] // self.size
        mine, out = slice(self.rank * rows, (self.rank + 1) * rows), x.new_empty(rows, *x.shape[1:])
        exchange = self._exchange(x, lambda parts: _add([part[mine] for part in parts], out))
        return Pending(out, exchange or _reduce_scatter(out, x.contiguous(), group=self.group, async_op=True))

    def _exchange(self, x: Tensor, read: Callable[[Sequence[Tensor]], object]) -> Exchange | None:
        return None if self.shared is None else self.shared.start(x, read)

    def broadcast(self, x: Tensor, source: int = 0) -> Tensor:
        """Overwrite x with the one at position `source`."""
        if self.size > 1:
            dist.broadcast(x, group=self.group, group_src=source)
        return x

    def barrier(self) -> None:
        """Wait until every rank of the axis is here."""
        self.all_reduce(torch.zeros(1, device=self.device))

    def gather_json(self, value: Any) -> list[Any]:
        """Every rank's value, in rank order. JSON, so that nothing is unpickled."""
        if self.size == 1:
            return [value]
        data = torch.tensor(list(json.dumps(value).encode()), dtype=torch.uint8, device=self.device)
        sizes = self.all_gather(torch.tensor([data.numel()], device=self.device)).tolist()
        padded = data.new_zeros(max(sizes))
        padded[: data.numel()] = data
        rows = self.all_gather(padded).view(self.size, -1).cpu()
        return [json.loads(bytes(row[:n].tolist())) for row, n in zip(rows, sizes, strict=True)]


def _add(parts: Sequence[Tensor], out: Tensor) -> None:
    """Their sum in this order, the same bits on every rank."""
    torch.add(parts[0], parts[1], out=out)
    for part in parts[2:]:
        out.add_(part)


@dataclass(frozen=True)
class ProcessMesh:
    """The axes of one process.

    Attributes:
        ends: the first and the last pipeline rank of this rank's pipeline, which share a tied embedding under a loop
            placement; size 1 for all others and where both are the same rank.
        twins: this rank and its mirror image r, p-1-r in its pipeline, which hold the same stages under DualPipe; size
            1 for the middle rank of an odd pipeline.
        device_mesh: torch's view (dimensions pp, dp, tp), for distributed checkpoints; None in a process of its own
            and for ranks that are threads.
        position: where this rank is in its work.
        store: what the launcher's processes share besides the groups; None where device_mesh is.
    """

    tp: Axis = Axis()
    dp: Axis = Axis()
    pp: Axis = Axis()
    world: Axis = Axis()
    ends: Axis = Axis()
    twins: Axis = Axis()
    device: torch.device = CPU
    device_mesh: DeviceMesh | None = None
    position: Position = field(default_factory=Position, compare=False)
    store: PrefixStore | None = field(default=None, compare=False)

    @staticmethod
    def single(device: torch.device | None = None) -> ProcessMesh:
        """One process, no groups."""
        return ProcessMesh(device=device or CPU)

    @staticmethod
    def create(parallel: ParallelConfig, device: torch.device) -> ProcessMesh:
        """The mesh of this process as torchrun started it; `single` when it is alone.

        Every communicator is made here, on all ranks in one order. World size must be tp x dp x pp.
        Raises: ConfigError if the ranks do not meet in time.
        """
        world_size = int(os.environ.get("WORLD_SIZE", "1"))
        if world_size == 1:
            return ProcessMesh.single(device)
        try:
            return ProcessMesh._meet(parallel, device, world_size)
        except RuntimeError as error:
            address, port = os.environ.get("MASTER_ADDR"), os.environ.get("MASTER_PORT")
            minutes = parallel.distributed_timeout_minutes
            raise ConfigError(
                f"rank {os.environ.get('RANK')} did not meet all {world_size} ranks at {address}:{port} "
                f"(--distributed-timeout-minutes {minutes:g}): {str(error).splitlines()[0]}\n"
                f"      Start every rank of 0..{world_size - 1} with the same MASTER_ADDR, MASTER_PORT and WORLD_SIZE, "
                f"or wait longer: --distributed-timeout-minutes {max(10, 2 * minutes):g}"
            ) from error

    @staticmethod
    def _meet(parallel: ParallelConfig, device: torch.device, world_size: int) -> ProcessMesh:
        timeout = timedelta(minutes=parallel.distributed_timeout_minutes)
        store, rank, _ = next(rendezvous("env://", timeout=timeout))
        # torchrun reuses one store over restarts, where a new attempt would read the addresses of dead peers.
        store = PrefixStore(f"attempt{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", store)
        dist.init_process_group(
            backend_of(device),
            store=store,
            rank=rank,
            world_size=world_size,
            timeout=timeout,
            device_id=device if device.type == "cuda" else None,
        )
        tp, pp = parallel.tensor_model_parallel_size, parallel.pipeline_model_parallel_size
        shape = (pp, world_size // (tp * pp), tp)
        device_mesh = init_device_mesh(device.type, shape, mesh_dim_names=("pp", "dp", "tp"))

        def make_group(name: str, ranks: tuple[int, ...]) -> dist.ProcessGroup | None:
            if name in ("tp", "dp", "pp"):
                return device_mesh.get_group(name) if rank in ranks else None
            return dist.group.WORLD if name == "world" else dist.new_group(list(ranks), timeout=timeout)

        mesh = replace(build_mesh(shape, rank, device, make_group, device_mesh), store=store)
        mesh.set_timeout(timeout.total_seconds())
        return mesh

    def set_timeout(self, seconds: float) -> None:
        """How long a message or collective may take from now on.

        Gloo's messages keep the time of their group's making, half an hour in a device mesh: `watch` ends those.
        """
        self.position.limit_s = seconds
        # NCCL's own watchdog aborts the process without a word about the pass; ours comes first.
        timeout = timedelta(seconds=seconds + (30 if self.device.type == "cuda" else 0))
        for axis in (self.tp, self.dp, self.pp, self.world, self.ends, self.twins):
            if axis.group is not None:
                dist.distributed_c10d._set_pg_timeout(timeout, axis.group)

    def close(self) -> None:
        """Leave the process groups."""
        if self.device_mesh is not None:
            dist.destroy_process_group()


def build_mesh(
    shape: tuple[int, int, int],
    rank: int,
    device: torch.device,
    make_group: Callable[[str, tuple[int, ...]], dist.ProcessGroup | None],
    device_mesh: DeviceMesh | None = None,
) -> ProcessMesh:
    """The mesh of one rank of a (pp, dp, tp) grid; `make_group` is called for every group of the grid, in one order."""
    grid = torch.arange(shape[0] * shape[1] * shape[2]).view(shape)

    def axis(name: str, sets: Iterable[Iterable[int]]) -> Axis:
        mine = Axis(ranks=(rank,), device=device)
        for ranks in map(tuple, sets):
            if len(ranks) > 1:
                group = make_group(name, ranks)
                if rank in ranks:
                    mine = Axis(ranks.index(rank), len(ranks), ranks, group, device)
        return mine

    def along(dim: int) -> list[list[int]]:
        return grid.movedim(dim, -1).reshape(-1, shape[dim]).tolist()

    pipelines = along(0)
    tp = axis("tp", along(2))
    if tp.group is not None and device == CPU:
        tp = replace(tp, shared=SharedMemory(tp.rank, tp.gather_json))
    return ProcessMesh(
        tp=tp,
        dp=axis("dp", along(1)),
        pp=axis("pp", pipelines),
        world=axis("world", [grid.flatten().tolist()]),
        ends=axis("ends", [sorted({ranks[0], ranks[-1]}) for ranks in pipelines]),
        twins=axis("twins", [(ranks[r], ranks[-1 - r]) for ranks in pipelines for r in range(shape[0] // 2)]),
        device=device,
        device_mesh=device_mesh,
    )


@dataclass(frozen=True)
class Layout:
    """How a parameter lies over the tensor-parallel axis, and what it is called in the whole model.

    Attributes:
        full: shape in which the parameter is saved, the same under every layout. The local tensor, viewed as `full`
            with size full[dim] / t in dimension `dim`, is this rank's slice.
        dim: dimension of `full` that tensor parallelism splits; None if every rank holds all of it.
        tied_to: global name of the parameter whose weight this one repeats (a tied output head), else None.
        mean, std: the initial weight is mean + std x N(0, 1).
        sum_over_tp: whole on every rank, but each sees a part of what it is used on (its heads, or its share of a
            sequence-parallel sequence), so that the gradients must be summed over tp.
    """

    full: tuple[int, ...]
    dim: int | None = None
    tied_to: str | None = None
    mean: float = 0.0
    std: float = 0.0
    sum_over_tp: bool = False

    def local(self, tp_size: int) -> tuple[int, ...]:
        """`full` with this layout's dimension divided over tp."""
        return tuple(n // tp_size if d == self.dim else n for d, n in enumerate(self.full))


def set_layout(param: nn.Parameter, layout: Layout) -> nn.Parameter:
    """Write down how a parameter is split; returns it."""
    setattr(param, "mesh_layout", layout)  # noqa: B010
    return param


def layout_of(param: nn.Parameter) -> Layout:
    """How a parameter is split; one that says nothing is whole on every rank."""
    return getattr(param, "mesh_layout", Layout(tuple(param.shape)))
