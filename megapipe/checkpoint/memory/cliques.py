"""Which ranks keep a rank's state, besides itself."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from megapipe.config import Config
from megapipe.distributed.axis import Axis
from megapipe.distributed.grid import Grids
from megapipe.distributed.groups import host_group_of
from megapipe.distributed.mesh import ProcessMesh
from megapipe.distributed.seats import peers_of
from megapipe.errors import CheckpointError

_BOOT = Path("/proc/sys/kernel/random/boot_id")
Sets = list[tuple[int, ...]]


@dataclass(frozen=True)
class Clique:
    """The ranks that keep copies of each other's training state in memory; this rank is one.

    Attributes:
        axis: the ranks of the clique, with a process group for CPU tensors.
        sends: True if the ranks send each other their states. False if data parallelism keeps the
            states equal anyway, or if this rank is alone in the clique.
    """

    axis: Axis
    sends: bool

    @property
    def owner(self) -> int:
        """The global rank that names this rank's state: the first rank with an equal state.

        This is the calling rank itself, unless the ranks of the clique are data-parallel replicas
        with equal states.
        """
        return self.axis.ranks[self.axis.rank] if self.sends else self.axis.ranks[0]


def equal_sets(config: Config, *, experts: bool) -> Sets:
    """Return the sets of ranks with equal weights: they differ in data or context parallelism only.

    Args:
        experts: whether ranks of a set also have equal experts. With False the weights outside
            of experts are equal.
    """
    par = config.parallel
    if config.lacks_a_rank:
        return peers_of(par.ranks_of_a_replica, config.world_size)
    names = ("edp",) if experts else ("cp", "dp")
    return Grids.of(par, config.world_size).sets(*names)


def sets_of(config: Config) -> tuple[Sets, bool]:
    """Divide all ranks into sets that keep each other's states.

    Returns: (the sets, whether the ranks of a set send each other their states). Nothing is sent if
        data parallelism keeps the states equal, or if each set is a single rank.
    """
    world = config.world_size
    if config.equal_states > 1:
        return equal_sets(config, experts=config.model.has_experts), False
    flags = config.checkpoint
    if not flags.replication:
        return [(rank,) for rank in range(world)], False
    return flags.replicas_of(world), True


def clique_of(config: Config, mesh: ProcessMesh) -> Clique:
    """Return this rank's clique, with a new process group. Collective over the world.

    Raises: CheckpointError if the run has several machines and a clique lies on one alone, so that
        its states would be lost with that machine.
    """
    sets, sends = sets_of(config)
    if problems := list(lost_with_a_host(sets, mesh.world.gather_json(_BOOT.read_text().strip()))):
        raise CheckpointError(problems[0])
    rank = mesh.world.rank
    own = next(ranks for ranks in sets if rank in ranks)
    several = [ranks for ranks in sets if len(ranks) > 1]
    group = host_group_of(several, rank, config.parallel.distributed_timeout_minutes)
    return Clique(Axis(own.index(rank), len(own), own, group), sends)


def lost_with_a_host(sets: Sets, hosts: Sequence[str]) -> Iterator[str]:
    """Yield an error for each set whose ranks are all on one machine of several.

    Args:
        sets: the sets of ranks that have each other's states; a rank alone is no problem.
        hosts: for each rank, a text that is equal for ranks of the same machine.
    """
    if len(set(hosts)) == 1:
        return
    for ranks in sets:
        if len(ranks) > 1 and len({hosts[rank] for rank in ranks}) == 1:
            most = max(map(hosts.count, hosts))
            yield (
                f"--non-persistent-ckpt-type local: ranks {', '.join(map(str, ranks))} keep each "
                "other's state, and they are on one machine, with which all of them would be lost. "
                f"Use --replication with --replication-jump {most}, the ranks of a machine."
            )
