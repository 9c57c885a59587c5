"""Which ranks keep a rank's state, besides itself."""

from __future__ import annotations

from dataclasses import dataclass

from megapipe.config import Config
from megapipe.distributed.axis import Axis
from megapipe.distributed.grid import Grids
from megapipe.distributed.groups import host_group_of
from megapipe.distributed.mesh import ProcessMesh


@dataclass(frozen=True)
class Clique:
    """The ranks that keep the state of this rank.

    Attributes:
        axis: this rank and the others, with a group for memory of the host.
        sends: True if the ranks send each other their states. False if data parallelism keeps the
            states equal anyway, or if this rank is alone in the clique.
    """

    axis: Axis
    sends: bool

    @property
    def others(self) -> tuple[int, ...]:
        """The other ranks, as numbers of the world."""
        own = self.axis.ranks[self.axis.rank]
        return tuple(rank for rank in self.axis.ranks if rank != own)


def sets_of(config: Config) -> tuple[list[tuple[int, ...]], bool]:
    """Return (disjoint sets of ranks that keep each other's states, whether they send them).

    A set has F ranks: n, n + J, n + 2J and so on, as in NVIDIA's resiliency extension. J is
    --replication-jump, F --replication-factor.
    """
    if config.equal_states > 1:
        grids = Grids.of(config.parallel, config.world_size)
        names = ("edp",) if config.model.has_experts else ("cp", "dp")
        return grids.sets(*names), False
    flags = config.checkpoint
    if not flags.replication:
        return [(rank,) for rank in range(config.world_size)], False
    factor = flags.replication_factor
    jump = flags.replication_jump or config.world_size // factor
    found = []
    for first in range(config.world_size):
        if first // jump % factor == 0:
            found.append(tuple(first + k * jump for k in range(factor)))
    return found, True


def clique_of(config: Config, mesh: ProcessMesh) -> Clique:
    """Return this rank's clique, with a new group. Collective over the world."""
    sets, sends = sets_of(config)
    rank = mesh.world.rank
    own = next(ranks for ranks in sets if rank in ranks)
    several = [ranks for ranks in sets if len(ranks) > 1]
    group = host_group_of(several, rank, config.parallel.distributed_timeout_minutes)
    return Clique(Axis(own.index(rank), len(own), own, group), sends)
