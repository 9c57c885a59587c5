"""The memory of a rank that runs two queues of steps, each in its order."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from math import inf

from megapipe.schedule.costs import Costs
from megapipe.schedule.memory.held import memory_steps
from megapipe.schedule.passes import Schedule, Step
from megapipe.schedule.simulate import run_clock


@dataclass(frozen=True)
class Room:
    """The memory that the steps of queues hold, and what a rank has room for.

    The first queue of a rank has the rank's own steps, a second one steps of a lost rank. `fits`
    returns whether the next step of a queue may start. Memory is in the unit of the costs.

    Attributes:
        limit: the most that a rank may hold.
        after: after[queue][n] is the memory that the queue holds when its first n steps are over.
        during: during[queue][i] is the most that the queue holds while its step i runs.
        most: most[queue][n] is the most that the queue holds from the start of its step n on.
        other: for each queue the other one of its rank; None if there is none.
    """

    limit: float
    after: Sequence[Sequence[float]]
    during: Sequence[Sequence[float]]
    most: Sequence[Sequence[float]]
    other: Sequence[int | None]

    @staticmethod
    def of(
        table: Schedule, queues: Sequence[tuple[int, list[Step]]], costs: Costs, limit: float
    ) -> Room:
        """Return the memory of queues.

        Args:
            table: the joint table, in which each rank runs its queues one after the other.
            queues: (rank, steps in order).
            costs: the costs of the joint table.
            limit: the most that a rank may hold.
        """
        curves = memory_steps(table, costs, run_clock(table, costs))
        values: dict[tuple[int, int], list[float]] = {}
        for rank, curve in enumerate(curves):
            for _, held, step in curve:
                values.setdefault((rank, step), []).append(held)
        of_rank: dict[int, list[int]] = {}
        after, during, most = [], [], []
        for n, (rank, steps) in enumerate(queues):
            before = sum(len(queues[other][1]) for other in of_rank.get(rank, ()))
            of_rank.setdefault(rank, []).append(n)
            holds = [0.0]
            peaks = []
            for i in range(before, before + len(steps)):
                found = [holds[-1], *values.get((rank, i), ())]
                peaks.append(max(found))
                holds.append(found[-1])
            after.append(holds)
            during.append(peaks)
            most.append([*accumulate((0.0, *reversed(peaks)), max)][::-1])
        other: list[int | None] = [None] * len(queues)
        for n, *rest in of_rank.values():
            for m in rest:
                other[n], other[m] = m, n
        return Room(limit, after, during, most, other)

    @property
    def least(self) -> float:
        """Return the least limit that suffices: the most that any queue holds by itself."""
        return max(row[0] for row in self.most)

    def fits(self, queue: int, at: Sequence[int]) -> bool:
        """Return whether the next step of a queue leaves a rank with room for all later steps.

        It does if one of the two queues could then run to its end, and the other one after it.

        Args:
            queue: the queue.
            at: for each queue the number of steps that are over.
        """
        other = self.other[queue]
        if other is None or self.limit == inf:
            return True
        own, theirs = self.most[queue], self.most[other]
        i, j = at[queue], at[other]
        holds = self.after[other][j]
        # The step itself, and then either queue to its end.
        if own[i] + holds <= self.limit:
            return True
        now = self.during[queue][i] + holds
        return max(now, theirs[j] + self.after[queue][i + 1]) <= self.limit
