"""The joint table of data-parallel replicas: one table with the ranks and microbatches of all.

Every microbatch of the joint table runs through a chain of stages of its own. The stages are on the
ranks of the microbatch's replica. If the replica has lost a rank, the stages of that rank are on a
peer: the same pipeline rank of another replica.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace
from itertools import pairwise
from math import inf
from typing import Any

from megapipe.errors import ScheduleError
from megapipe.schedule.costs import Costs
from megapipe.schedule.kinds import LAYERS
from megapipe.schedule.passes import Pass, Placement, Schedule, Step
from megapipe.schedule.simulate import simulate

_PER_STAGE = ("f", "b", "w", "mem_b", "mem_w", "mem_k", "mem_p")


@dataclass(frozen=True)
class Joint:
    """The joint table of data-parallel replicas, one of them perhaps without one of its ranks.

    Each replica runs the table of one pipeline. The joint table has the ranks and microbatches of
    all replicas: with 2 replicas of 4 ranks, rank 1 of replica 1 is rank 5 of the joint table. If a
    rank is lost, its peers run its passes in addition to their own. The peers are the same pipeline
    rank of the other replicas.

    `rank` and `microbatch` return numbers in the joint table. `peer` returns the replica that takes
    over a microbatch. `placement` and `queues` return the stages and the steps of the joint table.

    Attributes:
        table: the table of one replica.
        replicas: number of replicas.
        lost: (replica, pipeline rank) of the lost rank; None if all are there.
        positions: for each microbatch of `table` its place in the order in which microbatches
            begin. If given, peers run the lost passes in blocks, one peer after another. Each peer
            stops its own pipeline between two microbatches, and has all its memory for its block.
    """

    table: Schedule
    replicas: int
    lost: tuple[int, int] | None = None
    positions: tuple[int, ...] = ()

    def rank(self, replica: int, rank: int) -> int:
        """Return the rank of the joint table that is pipeline rank `rank` of a replica.

        Ranks are numbered replica by replica, and the lost rank is left out.
        """
        ranks = len(self.table.ranks)
        number = replica * ranks + rank
        if self.lost is None:
            return number
        broken, gone = self.lost
        return number - (number > broken * ranks + gone)

    def microbatch(self, replica: int, microbatch: int) -> int:
        """Return the microbatch of the joint table that is `microbatch` of a replica.

        Replicas take turns, as they do with the samples of a batch. So the joint table reads a
        batch in its order.
        """
        return microbatch * self.replicas + replica

    def peer(self, microbatch: int) -> int:
        """Return the replica that runs a microbatch in place of the lost rank.

        The other replicas take turns by microbatch, or by block.

        Args:
            microbatch: number of a microbatch within the replica that lost the rank.
        """
        assert self.lost is not None
        broken, _ = self.lost
        peers = self.replicas - 1
        turn = microbatch % peers
        if self.positions:
            turn = self.positions[microbatch] * peers // len(self.positions)
        return (broken + 1 + turn) % self.replicas

    def borders(self, replica: int) -> list[int]:
        """Return the positions before which a replica ends all earlier microbatches.

        Positions are places in the order of microbatches. The replica that lost a rank has one
        between every two blocks. A peer has one, where its block comes: the first peer before its
        own microbatches, the last one after them, and the others at equal distances between.
        """
        assert self.lost is not None
        peers = self.replicas - 1
        count = len(self.positions)
        if replica == self.lost[0]:
            return [-(-count * block // peers) for block in range(1, peers)]
        turn = (replica - self.lost[0] - 1) % self.replicas
        return [count * turn // (peers - 1)]

    def placement(self) -> Placement:
        """Return the joint placement.

        Each microbatch has a chain of stages (a copy of the model) in it, because different peers
        may run the lost stages of different microbatches.
        """
        place = self.table.placement
        rank_of = []
        for microbatch in range(self.table.num_microbatches):
            for replica in range(self.replicas):
                first = self.table.chain_of(microbatch) * place.chain
                for stage in range(first, first + place.chain):
                    at = (replica, place.rank_of[stage])
                    if at == self.lost:
                        at = (self.peer(microbatch), at[1])
                    rank_of.append(self.rank(*at))
        return replace(place, rank_of=tuple(rank_of))

    def queues(self) -> Iterator[tuple[int, list[Step]]]:
        """Yield (rank of the joint table, its steps in order), possibly twice for one rank.

        The first yield has the rank's own row, the second the passes that it runs in place of the
        lost rank. The two passes of an overlapped pair run one after the other if they go to
        different peers.
        """
        adopted: dict[int, list[Step]] = {}
        for replica in range(self.replicas):
            for rank in range(len(self.table.ranks)):
                row = self._row(replica, rank)
                if (replica, rank) != self.lost:
                    yield self.rank(replica, rank), [self._renamed(step, replica) for step in row]
                    continue
                for step in row:
                    parts: dict[int, Step] = {}
                    for item in step:
                        at = self.rank(self.peer(item.microbatch), rank)
                        parts[at] = (*parts.get(at, ()), item)
                    for at, part in parts.items():
                        adopted.setdefault(at, []).append(self._renamed(part, replica))
        yield from adopted.items()

    def _row(self, replica: int, rank: int) -> Sequence[Step]:
        """Return a rank's row, in which earlier microbatches end before each border of its replica.

        Without blocks there are no borders.
        """
        row = self.table.ranks[rank]
        if not self.positions:
            return row
        found = []
        borders = [0, *self.borders(replica), len(self.positions)]
        for first, end in pairwise(borders):
            for step in row:
                part = tuple(x for x in step if first <= self.positions[x.microbatch] < end)
                if part:
                    found.append(part)
        return found

    def _renamed(self, step: Step, replica: int) -> Step:
        place = self.table.placement
        found = []
        for kind, stage, microbatch, piece in step:
            number = self.microbatch(replica, microbatch)
            at = number * place.chain + place.position(stage)
            found.append(Pass(kind, at, number, piece))
        return tuple(found)


def joint(table: Schedule, replicas: int) -> Schedule:
    """Return the joint table of replicas that all have their ranks.

    Args:
        table: the table of one replica, of one training step.
        replicas: number of replicas.
    Raises: ScheduleError if the table has other passes than F, B, W and BW, or several steps.
    """
    return unordered(Joint(table, replicas))


def unordered(ranks: Joint) -> Schedule:
    """Return the joint table, in which each peer runs passes of the lost rank after its own.

    Raises: ScheduleError as `refuse_others`.
    """
    table = ranks.table
    refuse_others(table)
    place = ranks.placement()
    rows: list[list[Step]] = [[] for _ in range(place.num_ranks)]
    for rank, steps in ranks.queues():
        rows[rank] += steps
    documents = table.documents
    if len(documents) > 1:
        documents = tuple(x for x in documents for _ in range(ranks.replicas))
    name = f"{table.name} x {ranks.replicas}"
    if ranks.lost is not None:
        name += " without rank {1} of replica {0}".format(*ranks.lost)
    return Schedule(
        name,
        place,
        table.num_microbatches * ranks.replicas,
        tuple(map(tuple, rows)),
        cuts=table.cuts,
        documents=documents,
    )


def joint_costs(costs: Costs, table: Schedule) -> Costs:
    """Return the costs of a table for use with its joint table.

    A cost that is one number is for 1/p of the model on p ranks. The joint table has more ranks, so
    the number becomes a tuple with a value for each stage. Every message takes as long as the
    slowest one of `costs`, also a message between two replicas.

    Args:
        table: the table of one replica.
    """
    place = table.placement
    stated: dict[str, Any] = {}
    for field in fields(costs):
        if field.name in _PER_STAGE:
            stated[field.name] = tuple(costs.by_stage(field.name, place)[: place.chain])
    comm = max(costs.comm) if isinstance(costs.comm, tuple) else costs.comm
    # A pair's time is per device share as well.
    fb = None if costs.fb is None else costs.fb * len(table.ranks) / place.chain
    return replace(costs, comm=comm, fb=fb, **stated)


def positions_of(table: Schedule, costs: Costs) -> tuple[int, ...]:
    """Return each microbatch's place in the order in which microbatches begin under `costs`."""
    first: dict[int, float] = {}
    for item, start in simulate(table, costs).start.items():
        first[item.microbatch] = min(start, first.get(item.microbatch, inf))
    order = sorted(first, key=lambda microbatch: (first[microbatch], microbatch))
    return tuple(map(order.index, range(table.num_microbatches)))


def refuse_others(table: Schedule) -> None:
    """Raise ScheduleError for passes other than F, B, W and BW, and for several steps."""
    others = sorted(table.kinds.difference(LAYERS))
    if others:
        raise ScheduleError(
            f"{table.name} has {', '.join(others)}: reroute F, B, W and BW, and add other passes "
            "afterwards."
        )
    if table.training_steps > 1:
        raise ScheduleError(f"{table.name} has {table.training_steps} steps: reroute one.")
