"""Measure the times of a rank's passes, and share them with the other ranks of the pipeline.

A pass costs three reads of the device's clock: before it asks for its input, before it runs, and
after it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch
from torch import Tensor

from megapipe.distributed.axis import Axis
from megapipe.distributed.device import DeviceClock
from megapipe.pipeline_parallel.passes.begin import Begun
from megapipe.schedule import Pass, Schedule
from megapipe.schedule.kinds import COPIES, Lane
from megapipe.schedule.measured.costs import MeasuredPass


class Stopwatch:
    """A stopwatch for the passes of one step, in their order.

    Both passes of an overlapped pair have the same times. `ask`, `note` and `copying` measure times
    and never wait for the device. `times`, `ran`, `copied` and `exposed_communication` return the
    times, once the step is over. A mark is a point in time on the device's clock.

    Attributes:
        schedule: the table of the passes. Only `ran`, `ran_by_all` and `copied_by_all` read it.
        passes: for each pass or pair, (mark when it asked for its input, mark when it had its
            input, mark of its end, number of passes: 1 or 2).
        waits: (mark before, mark after) each wait of a pass for a collective.
        copies: for each copy in order, (pass O or L, a function, waits). The function returns the
            marks of the copy's beginning and end. The waits are (mark before, mark after) each wait
            of a pass for the copy.
    """

    def __init__(self, device: torch.device, schedule: Schedule | None = None) -> None:
        self._clock = DeviceClock(device)
        self._asked = None
        self._schedule = schedule
        #   asked            begin               end
        #     | waits for input | computes, and may |
        #     |                 | wait for a        |
        #     |                 | collective        |
        self.passes: list[tuple[Any, Any, Any, int]] = []
        self.waits: list[tuple[Any, Any]] = []
        self.copies: list[tuple[Pass, Callable[[], tuple[Any, Any]], list[tuple[Any, Any]]]] = []
        self.mark = self._clock.mark
        self.seconds = self._clock.seconds

    @property
    def schedule(self) -> Schedule:
        assert self._schedule is not None
        return self._schedule

    def ask(self) -> None:
        """Mark the time at which the next pass is due and may begin to wait for its input."""
        self._asked = self.mark()

    def note(self, begin: Any, passes: int = 1) -> None:
        """Note a pass that has ended, or a pair.

        Args:
            begin: the mark at which the pass had its input.
            passes: 2 for a pair, else 1.
        """
        self.passes.append((self._asked, begin, self.mark(), passes))

    def copying(self, item: Pass, begin: Any, begun: Begun) -> Begun:
        """Note a copy that has begun. Return it with a `wait` whose time is measured.

        Args:
            item: the pass, O or L.
            begin: the mark before the call that began the copy.
            begun: the copy.
        """
        assert begun.span is not None
        # The call itself keeps passes from running too.
        kept = [(begin, self.mark())]
        self.copies.append((item, begun.span, kept))

        def wait() -> None:
            at = self.mark()
            begun.wait()
            kept.append((at, self.mark()))

        return Begun(wait)

    def restart(self) -> None:
        """Drop all times, because the step begins again."""
        self.passes.clear()
        self.waits.clear()
        self.copies.clear()

    @property
    def exposed_communication(self) -> float:
        """Return the seconds in which a pass waited for a collective while no other pass ran."""
        return sum(self.seconds(end) - self.seconds(begin) for begin, end in self.waits)

    def times(self) -> list[tuple[float, float, float]]:
        """Return, for every pass, the times in seconds of (request for its input, start, end).

        These are the passes of the compute stream, in the order of the table.
        """
        rows: list[tuple[float, float, float]] = []
        # A pair has one row of marks, and a row of times for each of its passes.
        for asked, begin, end, passes in self.passes:
            row = (self.seconds(asked), self.seconds(begin), self.seconds(end))
            rows += [row] * passes
        return rows

    def copied(self) -> list[MeasuredPass]:
        """Return the measured copies O and L.

        The `waited` of a copy is the time in seconds in which passes waited for the copy.
        """
        seconds = self.seconds
        rows = []
        for item, span, kept in self.copies:
            begin, end = map(seconds, span())
            waited = sum(seconds(b) - seconds(a) for a, b in kept)
            rows.append(MeasuredPass(item, begin, end, waited))
        return rows

    def ran(self, rank: int) -> list[MeasuredPass]:
        """Return this rank's measured passes on the compute stream.

        `rank` is this rank's position in the pipeline.
        """
        return [_ran(*row) for row in zip(_timed(self.schedule, rank), self.times(), strict=True)]


def ran_by_all(steps: Sequence[Stopwatch], pp: Axis) -> list[list[list[MeasuredPass]]]:
    """Return [step][pipeline rank] the measured passes on the compute stream. Collective over pp.

    `steps` are this rank's stopwatches of some steps, all with one table.
    """
    rows = [_timed(steps[0].schedule, rank) for rank in range(pp.size)]
    mine = [watch.times() for watch in steps]
    for times in mine:
        assert len(times) == len(rows[pp.rank]), "every pass of the table is timed"
    return _gathered(mine, rows, pp, _ran)


def copied_by_all(steps: Sequence[Stopwatch], pp: Axis) -> list[list[list[MeasuredPass]]]:
    """Return [step][pipeline rank] the measured copies out (O) and back (L). Collective over pp.

    `steps` are this rank's stopwatches of some steps, all with one table. A copy that a rank did
    not measure, as if it is emulated, has zeros for its times.
    """
    rows = [_timed(steps[0].schedule, rank, COPIES) for rank in range(pp.size)]
    mine = []
    for watch in steps:
        copies = watch.copied()
        items = [ran.item for ran in copies]
        assert items == rows[pp.rank][: len(items)], "copies begin in the order of the table"
        mine.append([ran[1:] for ran in copies])
    return _gathered(mine, rows, pp, lambda item, times: MeasuredPass(item, *times))


def exposed_by_all(steps: Sequence[Stopwatch], pp: Axis) -> float:
    """Return the mean over steps and ranks of `exposed_communication`, in seconds.

    Collective over pp. `steps` are this rank's stopwatches of some steps.
    """
    # The mean over this rank's steps of the sum over ranks.
    mine = torch.tensor([watch.exposed_communication for watch in steps], dtype=torch.float64)
    return float(pp.all_reduce(mine.to(pp.device)).mean()) / pp.size


def _gathered(
    mine: Sequence[Sequence[Sequence[float]]],
    rows: Sequence[Sequence[Pass]],
    pp: Axis,
    make: Callable[[Pass, Sequence[float]], MeasuredPass],
) -> list[list[list[MeasuredPass]]]:
    """Return [step][pipeline rank] the measured passes. Collective over pp.

    Args:
        mine: [step][pass] three times in seconds, for this rank's passes.
        rows: for each pipeline rank, its passes.
        make: takes a pass and its three times, and returns the measured pass.
    """
    # Padded to the longest row of any rank, so that one all-gather takes all. In float64, because
    # a host's clock may have run for months: float32 would round it to seconds.
    padded = torch.zeros(len(mine), max(map(len, rows)), 3, dtype=torch.float64)
    for step, times in enumerate(mine):
        own = torch.tensor(times, dtype=torch.float64)
        padded[step, : len(times)] = own.reshape(len(times), 3)
    everyone: Tensor = pp.all_gather(padded.to(pp.device)[None]).cpu()
    found = []
    for by_rank in everyone.transpose(0, 1).tolist():
        ranks = []
        for row, padded_times in zip(rows, by_rank, strict=True):
            pairs = zip(row, padded_times, strict=False)
            ranks.append([make(item, times) for item, times in pairs])
        found.append(ranks)
    return found


def _ran(item: Pass, marks: Sequence[float]) -> MeasuredPass:
    asked, begin, end = marks
    return MeasuredPass(item, begin, end, begin - asked)


def _timed(schedule: Schedule, rank: int, lanes: Collection[Lane] = (Lane.COMPUTE,)) -> list[Pass]:
    """Return the passes of a rank's row that run on some streams; by default the compute stream."""
    return [p for step in schedule.ranks[rank] for p in step if p.kind.traits.lane in lanes]
