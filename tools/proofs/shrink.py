"""Draw cases by Hypothesis until the time is up. The first that fails is made smaller, and is tried
first next time.

A fuzzer draws from a `random.Random`, as before. The one that it gets here asks Hypothesis for
every number, so that Hypothesis can leave parts of a failing case out: it tries the first of each
choice, and False of each chance.
"""

from __future__ import annotations

import math
import os
import random
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, NoReturn, TypeVar

from hypothesis import HealthCheck, Phase, given, reject, seed, settings
from hypothesis import strategies as st
from hypothesis.database import DirectoryBasedExampleDatabase

KEPT = Path(__file__).parents[2] / "runs" / "failed"
"""Where failing cases are kept, a folder for each fuzzer."""
T = TypeVar("T")


@dataclass(frozen=True)
class Draws:
    """Flags of a tool that draws cases."""

    cases: float = math.inf
    """How many at most."""
    seconds: float = math.inf
    """How long to go on."""
    seed: int = 0
    """Of the draws."""


class Dice(random.Random):
    """A Random whose numbers Hypothesis draws."""

    def __new__(cls, draw: Callable[[int], int]) -> Dice:
        return super().__new__(cls)

    def __init__(self, draw: Callable[[int], int]) -> None:
        super().__init__(0)
        # draw: returns a number from 0 to the one that it is given, 0 for the simplest.
        self.draw = draw

    def getrandbits(self, k: int) -> int:
        return self.draw(2**k - 1)

    def _randbelow(self, n: int) -> int:
        return self.draw(n - 1)

    def random(self) -> float:
        # The simplest is next to 1, because fuzzers ask whether it is below a share. Two draws,
        # because Hypothesis prefers small numbers where there are more than 127.
        return 1 - (32 * self.draw(31) + self.draw(31) + 1) / 1024


class _Differs(Exception):
    """A case that fails, for Hypothesis."""


class _Over(BaseException):
    """The time is up. It is no Exception, which Hypothesis would take for another failure."""


def found_by(run: Callable[[T], Sequence[str]], case: T) -> Sequence[str]:
    """Return the differences of a case, or the traceback of what its run raises."""
    try:
        return run(case)
    except Exception:
        return [traceback.format_exc()]


class Fuzzer(Generic[T]):
    """Draws cases and runs them.

    Args:
        name: names the folder of failing cases.
        draw: returns a case, drawn from a Random; None where it has drawn none.
        run: returns the differences of a case, or raises one.
        wanted: whether a case is to be run.

    Attributes:
        count: cases that have run, without those of the shrinking.
        failed: the smallest case that fails.
        found: its differences.
    """

    def __init__(
        self,
        name: str,
        draw: Callable[[random.Random], T | None],
        run: Callable[[T], Sequence[str]],
        wanted: Callable[[T], bool] = lambda case: True,
    ) -> None:
        self.name, self.draw, self.run, self.wanted = name, draw, run, wanted
        self.count = 0
        self.failed: T | None = None
        self.found: Sequence[str] = ()

    def fuzz(self, number: int, *, seconds: float = math.inf, most: float = math.inf) -> bool:
        """Run cases until the time is up, there are enough or one fails; that one is shrunk for as
        long again.

        number: the seed. Returns: whether none has failed.
        """
        began = said = time.monotonic()
        until = began + seconds

        # The seed below the settings: above them it would take the folder away.
        @settings(
            max_examples=10**9,
            deadline=None,
            database=DirectoryBasedExampleDatabase(KEPT / self.name),
            phases=(Phase.reuse, Phase.generate, Phase.shrink),
            suppress_health_check=list(HealthCheck),
            report_multiple_bugs=False,
            print_blob=False,
        )
        @seed(number)
        @given(st.data())
        def one(data: st.DataObject) -> None:
            nonlocal said, until
            # Drawn before the time is asked: Hypothesis wants the same draws of the same choices.
            case = self.draw(Dice(lambda most: data.draw(st.integers(0, most))))
            now = time.monotonic()
            if now > until or (self.failed is None and self.count >= most):
                raise _Over
            if case is None or not self.wanted(case):
                reject()
            found = found_by(self.run, case)
            self.count += self.failed is None
            if found:
                if self.failed is None:
                    until = time.monotonic() + max(min(seconds, 300), time.monotonic() - began)
                self.failed, self.found = case, found
                raise _Differs
            if self.failed is None and now - said > 10:
                said = now
                print(f"{self.count} cases in {now - began:.0f} s, no difference", flush=True)

        # Without a key Hypothesis keeps nothing of a function that has a name in a function.
        one._hypothesis_internal_database_key = self.name.encode()  # type: ignore[attr-defined]
        try:
            one()
        except _Over:
            pass
        except Exception:
            # Hypothesis also raises where a case fails once and not again, which is a finding too.
            if self.failed is None:
                raise
        return self.failed is None

    def prove(self, flags: Draws, told: Callable[[T], str] = str) -> None:
        """Fuzz. If a case fails, print it with its differences and end the process with status 1.

        told: returns the text that stands for the case.
        """
        if self.fuzz(flags.seed, seconds=flags.seconds, most=flags.cases):
            return
        assert self.failed is not None
        fail(f"case {self.count} of seed {flags.seed}", self.found, told(self.failed))


def fail(name: str, found: Sequence[str], text: str) -> NoReturn:
    """Print what is wrong with a case, and the text that stands for it; end with status 1."""
    print(f"{name} fails:", *found[:20], text, sep="\n", flush=True)
    os._exit(1)  # threads may wait for a rank that failed
