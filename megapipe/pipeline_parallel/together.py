"""Two passes of a rank run together: while one would only wait for a collective, the other computes.

Each has a thread and one of the two the turn, so that of the host, and of the one stream of a device, they use what one
pass uses. A pass gives the turn away where it waits (`distributed.axis.Pending`) and between the products of a W pass,
whether the transfer is over or not: the order in which both start their collectives is then the same on all ranks of a
group. What a pass has of its own, saved tensors, masks, products that wait, is never in both threads' reach: each gets
the bits that it has alone.
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
"""How long a pass that waits for another rank is waited for where a signal has ended the other one."""


class _Ended(BaseException):
    """The end of a pass because the other one has failed."""


class How(Enum):
    """The way in which two passes run."""

    ONE_BEGINS, OTHER_BEGINS, APART = range(3)


def how(one: Pass, other: Pass, alike: Callable[[], bool], *, synchronises: bool = False) -> How:
    """Return the way of two passes in their place of a row.

    Args:
        alike: do both microbatches wait in the same places?
        synchronises: is code of Megatron's to synchronise gradients in the last backward of a stage? It sees all
            gradients that arrive meanwhile, so no two backwards run together.

    Of one stage, both may add into the gradients of the same weights, and must in their order. Two of one kind do: they
    wait in the same places, so that the second stays behind. Others must not run together.
    """
    kinds = {one.kind, other.kind}
    if not kinds <= set(_TURNS) or (synchronises and Kind.F not in kinds):
        return How.APART
    if one.stage == other.stage and Kind.F not in kinds:
        same = len(kinds) == 1 and alike()
        if not same and kinds != {Kind.B, Kind.W}:  # which add into those of different weights
            return How.APART
    return How.OTHER_BEGINS if _TURNS[other.kind] < _TURNS[one.kind] else How.ONE_BEGINS


_TURNS = {Kind.B: 0, Kind.BW: 0, Kind.F: 1, Kind.W: 2}
"""Who begins: a backward, whose first piece is a communication where its layers' last one is; W waits for nothing."""


def _taken() -> Lock:
    lock = Lock()
    lock.acquire()
    return lock


@dataclass(eq=False)
class _Side:
    """One of two passes.

    Attributes:
        go: released when it gets the turn.
        over: it has ended, or has not begun. ends: it is to end at its next turn.
    """

    go: Lock = field(default_factory=_taken)
    over: bool = True
    ends: bool = False


@dataclass(eq=False)
class Shared:
    """The state that two threads share. job: of the second pass; None ends its thread. turn: of the second pass?"""

    first: _Side = field(default_factory=_Side)
    second: _Side = field(default_factory=_Side)
    job: Callable[[], None] | None = None
    turn: bool = False

    def to_second(self) -> None:
        """The second pass goes on, until it gives the turn back or is over."""
        first = self.first
        if not self.second.over:
            self.turn = True
            self.second.go.release()
            first.go.acquire()
            if first.ends:
                raise _Ended

    def to_first(self) -> None:
        """The first pass goes on, until it gives the turn back or is over."""
        second = self.second
        if not self.first.over:
            self.turn = False
            self.first.go.release()
            second.go.acquire()
        if second.ends:
            raise _Ended


def _work(pair: Shared) -> None:
    torch.autograd.set_multithreading_enabled(False)
    while True:
        pair.second.go.acquire()
        if pair.job is None:
            return
        pair.job()
        pair.job, pair.second.over, pair.turn = None, True, False
        pair.first.go.release()


class Together:
    """Runs passes of a rank two at a time; its second thread lives as long as this does."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._pair: Shared | None = None

    def run(self, one: Callable[[], T], other: Callable[[], U], how: How, watch: Watch) -> tuple[T, U]:
        """The results of both.

        watch: takes the times at which each waits.
        Raises: what either raises; the other one has ended then.
        """
        if how is How.OTHER_BEGINS:
            made, before = self._run(other, one, watch)
            return before, made
        if how is How.ONE_BEGINS:
            return self._run(one, other, watch)
        with at_waits.do(None, watch):
            return one(), other()

    def _run(self, first: Callable[[], T], second: Callable[[], U], watch: Watch) -> tuple[T, U]:
        pair = self._pair = self._pair or self._begun()
        made: list[U] = []
        failed: list[BaseException] = []
        context, settings = copy_context(), _settings(self.device)

        def job() -> None:
            try:
                if not pair.second.ends:
                    with settings(), at_waits.do(pair.to_first, watch):
                        made.append(context.run(second))
            except BaseException as error:
                failed.append(error)
                pair.first.ends = True

        pair.job, pair.first.over, pair.second.over = job, False, False
        pair.first.ends = pair.second.ends = False
        try:
            with at_waits.do(pair.to_second, watch):
                done = first()
            pair.first.over = True
            pair.to_second()
        except BaseException as error:
            self._end(pair)
            if isinstance(error, _Ended):
                raise failed[0] from None
            raise
        return done, made[0]

    def _begun(self) -> Shared:
        pair = Shared()
        Thread(target=_work, args=(pair,), daemon=True).start()
        weakref.finalize(self, pair.second.go.release).atexit = False
        return pair

    def _end(self, pair: Shared) -> None:
        """End the second pass."""
        pair.first.over, pair.second.ends = True, True
        while not pair.second.over:
            if not pair.turn:
                pair.turn = True
                pair.second.go.release()
            if not pair.first.go.acquire(timeout=GRACE_S):
                self._pair = None  # it waits for another rank, and its thread ends when that is over
                return


def _settings(device: torch.device) -> Callable[[], Any]:
    """The settings that torch keeps for each thread, of the one that calls: for another one to enter."""
    grad, stream = torch.is_grad_enabled(), same_stream(device)
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
