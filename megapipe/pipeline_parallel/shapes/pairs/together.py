"""Run two passes of a rank together: one computes while the other waits for a collective.

Each pass has a thread, and one of the two has the turn. So both together use what one pass uses of
the host, and the one stream of a device.

    first    F0 . . . . F1 . . . .      . the collective is under way,
    second        B0 . . . . B1         and the other pass has the turn

A pass gives the turn away where it waits (`distributed.axis.Pending`), and W between its products.
It does so whether or not the collective is over. So both start their collectives in the same order
on all ranks of a group. Each pass has its own saved tensors, masks and deferred products, which the
other one never reaches. So its results are bitwise equal to a run without the other.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import copy_context
from dataclasses import dataclass, field
from enum import Enum
from functools import partial
from threading import Lock, Thread
from typing import Any, TypeVar

import torch

from megapipe.distributed.axis import Watch, at_waits
from megapipe.distributed.device import same_stream
from megapipe.schedule import Kind, Pass

T = TypeVar("T")
U = TypeVar("U")
GRACE_S = 5.0
"""Seconds to wait for the second pass to end after a signal has ended the first."""


class _Ended(BaseException):
    """An exception that ends one pass of a pair because the other one has failed."""


class How(Enum):
    """The way in which two passes run: together, or one after the other.

    ONE_BEGINS and OTHER_BEGINS run them together: ONE, the pass that the table has first, or OTHER
    runs first, up to its first wait for a collective. The third way runs one after the other.
    """

    ONE_BEGINS, OTHER_BEGINS, APART = range(3)


_TURNS = {Kind.B: 0, Kind.BW: 0, Kind.F: 1, Kind.W: 2}
"""The kinds that may run together; of two passes the one with the smaller number begins.

A backward does: where a layer's forward ends with a collective, its backward begins with one, and
the other pass computes meanwhile. W waits for nothing, so it comes last.
"""


def how(
    one: Pass, other: Pass, same_waits: Callable[[], bool], *, synchronises: bool = False
) -> How:
    """Return the way in which two passes are to run.

    Args:
        one, other: the passes, in the order of the table.
        same_waits: returns whether both passes wait for the same collectives in the same order.
        synchronises: whether a stage's last backward also synchronises gradients, as Megatron's
            does. Then only a pair with a forward runs together, because the gradients of both
            passes would be synchronised.
    """
    kinds = {one.kind, other.kind}
    if not kinds <= set(_TURNS) or (synchronises and Kind.F not in kinds):
        return How.APART
    # Both passes of one stage may add into the gradients of the same weights, and must do so in
    # their order. Two of one kind do: they wait in the same places, so the second stays after the
    # first. B and W of one stage add into gradients of different weights.
    if one.stage == other.stage and Kind.F not in kinds and kinds != {Kind.B, Kind.W}:
        same = len(kinds) == 1 and same_waits()
        if not same:
            return How.APART
    return How.OTHER_BEGINS if _TURNS[other.kind] < _TURNS[one.kind] else How.ONE_BEGINS


# A lock and not a condition: a turn changes at every collective of a pass, and one acquire and one
# release are the least that two threads can do.
def _taken() -> Lock:
    lock = Lock()
    lock.acquire()
    return lock


@dataclass(eq=False)
class _Side:
    """The state of one of the two passes of a pair.

    Attributes:
        go: a lock that is released when the pass may run.
        over: whether the pass has ended, or no pair has been given yet.
        ends: whether the pass must end when it may run next.
    """

    go: Lock = field(default_factory=_taken)
    over: bool = True
    ends: bool = False


@dataclass(eq=False)
class Shared:
    """The state that the threads of the two passes share. Only the thread that runs writes it.

    One pass runs at a time. `to_first` and `to_second` let the first or the second pass run.

    Attributes:
        first, second: the state of each pass.
        job: the function that runs the second pass; None ends its thread.
        turn: whether it is the second pass that runs.
    """

    first: _Side = field(default_factory=_Side)
    second: _Side = field(default_factory=_Side)
    job: Callable[[], None] | None = None
    turn: bool = False

    def to_second(self) -> None:
        """Let the second pass run, until it lets the first one run again or ends."""
        first = self.first
        # Nothing to do if the second pass is over: the first waits for its own collective then.
        if not self.second.over:
            self.turn = True
            self.second.go.release()
            first.go.acquire()
            if first.ends:
                raise _Ended

    def to_first(self) -> None:
        """Let the first pass run, until it lets the second one run again or ends."""
        second = self.second
        if not self.first.over:
            self.turn = False
            self.first.go.release()
            second.go.acquire()
        if second.ends:
            raise _Ended


def _work(pair: Shared) -> None:
    """Run the second pass of every pair, one pair after another, in the second thread.

    Args:
        pair: the state that both threads share.
    """
    torch.autograd.set_multithreading_enabled(False)
    while True:
        pair.second.go.acquire()
        if pair.job is None:
            return
        pair.job()
        pair.job = None
        pair.second.over = True
        pair.turn = False
        pair.first.go.release()


class Together:
    """A runner of two passes at a time. The second thread lives as long as this object.

    `run` runs a pair of passes. `device` is the rank's device.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._pair: Shared | None = None

    def run(
        self, one: Callable[[], T], other: Callable[[], U], how: How, watch: Watch
    ) -> tuple[T, U]:
        """Run two passes and return (result of `one`, result of `other`).

        Args:
            one, other: functions that run the passes.
            how: the way in which they run.
            watch: measures the waits of each pass.
        Raises: the error of either pass, after the other one has ended. If the second pass still
            waits for another rank after GRACE_S seconds, its thread is left to itself.
        """
        if how is How.OTHER_BEGINS:
            made, before = self._run(other, one, watch)
            return before, made
        if how is How.ONE_BEGINS:
            return self._run(one, other, watch)
        with at_waits.do(None, watch):
            return one(), other()

    def _run(self, first: Callable[[], T], second: Callable[[], U], watch: Watch) -> tuple[T, U]:
        """Run two passes together, `first` in this thread and `second` in the other.

        Args:
            first, second: functions that run the passes.
            watch: measures the waits of each pass.
        Returns: (result of `first`, result of `second`).
        """
        pair = self._pair = self._pair or self._begun()
        made: list[U] = []
        failed: list[BaseException] = []
        # A new thread has its own context variables and torch settings, so it is given this one's.
        context = copy_context()
        settings = _settings(self.device)

        def job() -> None:
            try:
                if not pair.second.ends:
                    with settings(), at_waits.do(pair.to_first, watch):
                        made.append(context.run(second))
            except BaseException as error:
                failed.append(error)
                pair.first.ends = True

        pair.job = job
        pair.first.over = pair.second.over = False
        pair.first.ends = pair.second.ends = False
        try:
            with at_waits.do(pair.to_second, watch):
                done = first()
            pair.first.over = True
            # Returns once the second pass is over: it cannot give the turn back any more.
            pair.to_second()
        except BaseException as error:
            self._end(pair)
            if isinstance(error, _Ended):
                raise failed[0] from None
            raise
        return done, made[0]

    def _begun(self) -> Shared:
        """Start the second thread, and return the state that it shares with this one."""
        pair = Shared()
        Thread(target=_work, args=(pair,), daemon=True).start()
        # Without a job the thread ends. At the end of Python it is a daemon and ends by itself.
        weakref.finalize(self, pair.second.go.release).atexit = False
        return pair

    def _end(self, pair: Shared) -> None:
        """End the second pass after an error of the first one.

        At this time the second pass waits for a collective, or has not begun. `pair` is the state
        that both threads share.
        """
        pair.first.over = True
        pair.second.ends = True
        while not pair.second.over:
            # A signal may have ended the first pass while the second has the turn.
            if not pair.turn:
                pair.turn = True
                pair.second.go.release()
            if not pair.first.go.acquire(timeout=GRACE_S):
                # It waits for another rank. Its thread ends after that, and a next pair of passes
                # gets a new one.
                self._pair = None
                return


def _settings(device: torch.device) -> Callable[[], Any]:
    """Return a function for another thread: it makes a context with this thread's settings.

    The settings are grad mode, autocast, and the device's current stream.
    """
    grad = torch.is_grad_enabled()
    stream = same_stream(device)
    casts = None
    if torch.is_autocast_enabled(device.type):
        casts = partial(torch.autocast, device.type, torch.get_autocast_dtype(device.type))

    @contextmanager
    def entered() -> Iterator[None]:
        with torch.set_grad_enabled(grad), stream():
            if casts is None:
                yield
            else:
                with casts():
                    yield

    return entered
