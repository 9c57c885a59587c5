"""Say how far a search is: a bar on a terminal, else a line now and then. End it in time."""

from __future__ import annotations

import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from math import inf

from megapipe.commands.progress import Progress
from megapipe.config import Config

_EVERY = 10.0
"""Seconds between two lines."""
_FIRST = 1.5
"""Seconds until the first line on work whose progress is not known."""
_TWICE = 0.3
"""Seconds in which a second interrupt is taken for a copy of the first."""


class TimeIsUp(KeyboardInterrupt):
    """The seconds of a search are over. It ends as by ctrl-C; the text says why it has ended."""

    def __str__(self) -> str:
        return " when its time was over"


@contextmanager
def ends_within(seconds: float) -> Iterator[None]:
    """Raise TimeIsUp in this block after a number of seconds; inf for never.

    An alarm interrupts a process that waits for others, and one in the middle of a long table.
    """
    if seconds == inf:
        yield
        return

    def ring(*_: object) -> None:
        raise TimeIsUp

    before = signal.signal(signal.SIGALRM, ring)
    signal.setitimer(signal.ITIMER_REAL, max(seconds, 1e-3))
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def settle() -> None:
    """Wait until a second copy of an interrupt has come.

    The program `timeout` sends a signal to a process and to its group.
    """
    with suppress(KeyboardInterrupt):
        time.sleep(_TWICE)


def slow(config: Config) -> str:
    """Return, in words, why the plan of a configuration may take minutes; "" if it does not."""
    par = config.parallel
    if par.memory_limit_gib is None:
        return ""
    if par.vocab_parallel_pipeline:
        return "; --memory-limit-gib with --vocab-parallel-pipeline may take minutes"
    if par.overlap_moe_expert_parallel_comm:
        return "; --memory-limit-gib with --overlap-moe-expert-parallel-comm may take minutes"
    return ""


@contextmanager
def goes_on(what: str) -> Iterator[None]:
    """Say on stderr that this block still works: after 1.5 seconds, then every ten.

    Args:
        what: the name of this work in words.
    """
    began = time.monotonic()
    done = threading.Event()

    def tell() -> None:
        seconds = _FIRST
        while not done.wait(seconds):
            took = time.monotonic() - began
            print(f"{took:.0f} s: {what}", file=sys.stderr, flush=True)
            seconds = _EVERY

    # A thread, as the block may be within one table for minutes.
    thread = threading.Thread(target=tell, daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


class Telling:
    """Says on stderr how many plans were looked at, and the best step so far.

    The first line comes with the first plan that fits. Pass the object to `search` as `tell`.
    """

    def __init__(self) -> None:
        self._bar = Progress()
        self._began = time.monotonic()
        self._said = 0.0
        self._what = ""

    def first(self, text: str) -> None:
        """Print a line before the search begins."""
        print(text, file=sys.stderr, flush=True)

    def __call__(self, done: int, among: int, best: float | None, what: str = "plans") -> None:
        found = "no plan fits yet" if best is None else f"best about {best:.3g} s a step"
        if self._bar.shown and among:
            self._bar(done / among, f"{done:,} of {among:,} {what}, {found}")
            return
        now = time.monotonic()
        said_lately = self._said and now - self._said < _EVERY and what == self._what
        # A search that begins has nothing to say, and one that finds nothing still goes on.
        begins = best is None and now - self._began < _EVERY
        if begins or said_lately:
            return
        self._what = what
        took = now - self._began
        tried = "a first plan"
        if among:
            self._said = now
            tried = f"{done:,} of {among:,} {what}"
        print(f"{took:.0f} s: {tried}, {found}", file=sys.stderr, flush=True)
