"""Times of a rank's passes: two reads of the device's clock around each, and one before its input is asked for."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch
from torch import Tensor

from megapipe.distributed.axis import Axis
from megapipe.distributed.device import Clock
from megapipe.pipeline_parallel.passes.begin import Begun
from megapipe.schedule import Pass, Schedule
from megapipe.schedule.kinds import COPIES, Lane
from megapipe.schedule.measured.costs import Ran


class Stopwatch:
    """The passes of one step as they were timed, in their order; both of an overlapped pair have the pair's times.

    Nothing waits for the device: read them when the step is over.

    Attributes:
        schedule: the table they are of; only needed to tell others.
        passes: marks when one asked for its input, had it and was over, and whether it was one or a pair.
        waits: marks before and after each wait of a pass for a collective.
        copies: O and L in the order of the table, each with what says when it ran and with marks before and after each
            time that it kept passes from running.
    """

    def __init__(self, device: torch.device, schedule: Schedule | None = None) -> None:
        self._clock, self._asked, self._schedule = Clock(device), None, schedule
        self.passes: list[tuple[Any, Any, Any, int]] = []
        self.waits: list[tuple[Any, Any]] = []
        self.copies: list[tuple[Pass, Callable[[], tuple[Any, Any]], list[tuple[Any, Any]]]] = []
        self.mark, self.seconds = self._clock.mark, self._clock.seconds

    @property
    def schedule(self) -> Schedule:
        assert self._schedule is not None
        return self._schedule

    def ask(self) -> None:
        """The next pass is to run, and may wait for its input."""
        self._asked = self.mark()

    def note(self, begin: Any, passes: int = 1) -> None:
        """A pass has run, or a pair, whose input was there at the mark `begin`."""
        self.passes.append((self._asked, begin, self.mark(), passes))

    def copying(self, item: Pass, begin: Any, begun: Begun) -> Begun:
        """A copy, begun in a call since the mark `begin`, as it is to be waited for."""
        assert begun.span is not None
        kept = [(begin, self.mark())]
        self.copies.append((item, begun.span, kept))

        def wait() -> None:
            at = self.mark()
            begun.wait()
            kept.append((at, self.mark()))

        return Begun(wait)

    def restart(self) -> None:
        """The step begins again."""
        self.passes.clear()
        self.waits.clear()
        self.copies.clear()

    @property
    def exposed_communication(self) -> float:
        """Seconds of the step in which a pass waited for a collective, and none ran beside it."""
        return sum(self.seconds(end) - self.seconds(begin) for begin, end in self.waits)

    def times(self) -> list[tuple[float, float, float]]:
        """(asked, begin, end) of every pass, in seconds."""
        seconds = self.seconds
        rows = [((seconds(asked), seconds(begin), seconds(end)), n) for asked, begin, end, n in self.passes]
        return [row for row, n in rows for _ in range(n)]

    def copied(self) -> list[Ran]:
        """O and L of the step; of each `waited` is how long passes stood still for it."""
        seconds, rows = self.seconds, []
        for item, span, kept in self.copies:
            begin, end = map(seconds, span())
            rows.append(Ran(item, begin, end, sum(seconds(b) - seconds(a) for a, b in kept)))
        return rows

    def ran(self, rank: int) -> list[Ran]:
        """The passes, which are those of a pipeline rank."""
        return [_ran(*row) for row in zip(_timed(self.schedule, rank), self.times(), strict=True)]


def ran_by_all(steps: Sequence[Stopwatch], pp: Axis) -> list[list[list[Ran]]]:
    """[step][rank]: what every rank of the pipeline has timed, under one table. Collective."""
    rows = [_timed(steps[0].schedule, rank) for rank in range(pp.size)]
    # Padded to the longest row of any rank, so that one all-gather takes all.
    mine = torch.zeros(len(steps), max(map(len, rows)), 3, dtype=torch.float64)
    for step, watch in enumerate(steps):
        times = watch.times()
        assert len(times) == len(rows[pp.rank]), "every pass of the table is timed"
        mine[step, : len(times)] = torch.tensor(times, dtype=torch.float64).view(-1, 3)
    everyone: Tensor = pp.all_gather(mine.to(pp.device)[None]).cpu()
    return [
        [
            [_ran(item, marks) for item, marks in zip(row, times, strict=False)]
            for row, times in zip(rows, everyone[:, step].tolist(), strict=True)
        ]
        for step in range(len(steps))
    ]


def copied_by_all(steps: Sequence[Stopwatch], pp: Axis) -> list[list[list[Ran]]]:
    """[step][rank]: the copies of every rank of the pipeline, under one table. Collective."""
    rows = [_timed(steps[0].schedule, rank, COPIES) for rank in range(pp.size)]
    mine = torch.zeros(len(steps), max(map(len, rows)), 3, dtype=torch.float64)
    for step, watch in enumerate(steps):
        for i, (item, *times) in enumerate(watch.copied()):
            assert item == rows[pp.rank][i], "copies begin in the order of the table"
            mine[step, i] = torch.tensor(times, dtype=torch.float64)
    everyone: Tensor = pp.all_gather(mine.to(pp.device)[None]).cpu()
    return [
        [
            [Ran(item, *times) for item, times in zip(row, of_rank, strict=False)]
            for row, of_rank in zip(rows, ranks, strict=True)
        ]
        for ranks in everyone.transpose(0, 1).tolist()
    ]


def exposed_by_all(steps: Sequence[Stopwatch], pp: Axis) -> float:
    """Seconds that a rank of the pipeline waited for collectives of its passes, mean of steps and ranks. Collective."""
    mine = torch.tensor([watch.exposed_communication for watch in steps], dtype=torch.float64)
    return float(pp.all_reduce(mine.to(pp.device)).mean()) / pp.size


def _ran(item: Pass, marks: Sequence[float]) -> Ran:
    asked, begin, end = marks
    return Ran(item, begin, end, begin - asked)


def _timed(schedule: Schedule, rank: int, lanes: Collection[Lane] = (Lane.COMPUTE,)) -> list[Pass]:
    return [p for step in schedule.ranks[rank] for p in step if p.kind.traits.lane in lanes]
