"""Axes of a model whose last rank is missing: a peer in another replica has its seat as well.

The ranks are numbered replica by replica. With 2 replicas of 3 ranks:

    seats        0  1  2
    replica 0    0  1  2
    replica 1    3  4  (2)      rank 2 has the last seat of both

The passes of such a run belong to one pipeline of all ranks. Sums of gradients, norms and
checkpoints go by replicas and seats, as in any run.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import partial
from typing import Any

from torch import Tensor

from megapipe.config import ParallelConfig
from megapipe.distributed.axis import OF_TWO, Axis, Pending
from megapipe.distributed.groups import group_of
from megapipe.distributed.mesh import ProcessMesh


@dataclass(frozen=True)
class Seats(Axis):
    """The axis of a replica whose seats are taken by any ranks, one of them perhaps by a peer.

    A peer has a seat in several replicas and calls once for all of them. So each collective gathers
    from all ranks of `over`, and reads the rows of its own replica. Even `start_` methods wait for
    that. Only the methods here, and methods of Axis that call them, work by seats.

    Attributes:
        over: the ranks of all replicas, which call together.
    """

    over: Axis = Axis()

    def _rows(self, x: Tensor) -> Tensor:
        """Return the tensor of each seat's rank, [size, ...]."""
        return self.over.all_gather(x[None].contiguous())[self._places]

    @property
    def _places(self) -> list[int]:
        return [self.over.ranks.index(rank) for rank in self.ranks]

    def start_all_reduce(self, x: Tensor, op: str = "sum") -> Pending:
        """Combine x over the ranks of this replica, in the order of its seats and in place.

        `op` is "sum", "max" or "min".
        """
        first, *others = self._rows(x)
        for other in others:
            OF_TWO[op](first, other, out=first)
        return Pending(x.copy_(first))

    def start_all_gather(self, x: Tensor, into: Tensor | None = None) -> Pending:
        """Gather x [n, ...] of each seat into one tensor [size * n, ...]; `into` is not used."""
        return Pending(self._rows(x).flatten(0, 1))

    def broadcast(self, x: Tensor, source: int = 0) -> Tensor:
        """Overwrite x with the x of the rank in the seat `source`, and return it."""
        return x.copy_(self._rows(x)[source])

    def gather_json(self, value: Any) -> list[Any]:
        """Return the values of this replica's ranks, in the order of its seats.

        All ranks of `over` must call it. Values must be representable in JSON.
        """
        everyone = self.over.gather_json(value)
        return [everyone[place] for place in self._places]


def peers_of(ranks: int, world: int) -> list[tuple[int, ...]]:
    """Return, for each seat of a replica of `ranks` ranks, the ranks of the world that have it."""
    return [tuple(range(seat, world, ranks)) for seat in range(ranks)]


def seated(
    mesh: ProcessMesh, parallel: ParallelConfig, shares: Mapping[str, Sequence[int]]
) -> ProcessMesh:
    """Make and activate the model's mesh, with all seats of each replica. Collective.

    Args:
        mesh: the mesh of one pipeline of all ranks. The rank after its last one is missing.
        parallel: the sizes of a replica.
        shares: the seats with equal weights, see `Plan.shares`.
    """
    pp = parallel.pipeline_model_parallel_size
    world = mesh.world
    replica, seat = divmod(world.rank, pp)
    timeout = timedelta(minutes=parallel.distributed_timeout_minutes)
    make = partial(group_of, rank=world.rank, device=mesh.device, timeout=timeout)
    peers = peers_of(pp, world.size)
    group = make([ranks for ranks in peers if len(ranks) > 1])
    own = peers[seat]
    dp = Axis(replica, len(own), own, group, mesh.device)

    def seats(numbers: Sequence[int], over: Axis) -> Seats:
        # The first replica has all of its ranks, so a seat's number is also its first peer's.
        first = replica * pp
        ranks = tuple(first + n if first + n < world.size else n for n in numbers)
        at = numbers.index(seat)
        return Seats(at, len(ranks), ranks, over.group, mesh.device, links=over.links, over=over)

    tied = sorted({end % pp for end in shares.get("ends", ())})
    callers = tuple(rank for rank in range(world.size) if rank % pp in tied)
    ends = alone(mesh)
    if len(tied) > 1:
        of_ends = make([callers])
        if seat in tied:
            at = callers.index(world.rank)
            ends = seats(tied, Axis(at, len(callers), callers, of_ends, mesh.device))
    pipeline = seats(range(pp), mesh.pp)
    return replace(mesh, pp=pipeline, dp=dp, dp_cp=dp, edp=dp, ends=ends).activate()


def one_pipeline(mesh: ProcessMesh) -> ProcessMesh:
    """Return the mesh of the passes: one pipeline of all ranks, if `seated` made `mesh`.

    Any other mesh is returned as it is.
    """
    if not isinstance(mesh.pp, Seats):
        return mesh
    single = alone(mesh)
    return replace(mesh, pp=mesh.pp.over, dp=single, dp_cp=single, edp=single, ends=single)


def alone(mesh: ProcessMesh) -> Axis:
    """Return an axis of this rank alone."""
    return Axis(ranks=(mesh.world.rank,), device=mesh.device)
