"""A family: kinds of pass that belong together, and all that the core asks of them.

The rows of its kinds stand in `kinds`. What no row can say the family answers here, and `families` lists the families
that there are. Clock, verifier, dependencies, memory and lowering iterate over that list and name none.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from megapipe.schedule.kinds import Kind, Made
from megapipe.schedule.passes import Pass, Placement, Schedule

PerStage = float | tuple[float, ...]

Problems = Callable[[Schedule, Mapping[Pass, int]], Iterator[str]]
Needs = Callable[[Schedule], Mapping[tuple[Pass, Made], tuple[Pass, ...]]]
Instead = Callable[[Schedule], Mapping[Pass, str]]
Renamed = Callable[[Schedule], Mapping[Pass, Pass | None]]
OfSlice = Callable[[Mapping[str, Any], float, float], Mapping[str, Any]]


class Prices(Protocol):
    """Costs as a family sees them."""

    def by_stage(self, name: str, placement: Placement) -> list[float]:
        """Return a field of the costs for each stage."""
        ...


class Times(Protocol):
    """A clock that has run, as a family sees it: start and end of every step, [rank][step]."""

    @property
    def start(self) -> list[list[float]]: ...
    @property
    def end(self) -> list[list[float]]: ...


Whole = Callable[[Schedule, Prices, Times, int], Iterator[tuple[float, float, int]]]


def _nothing(*_: Any) -> Any:
    return ()


def _no_change(*_: Any) -> Any:
    return {}


def times(share: float, whole: PerStage) -> PerStage:
    """Return a share of a field of costs."""
    return tuple(share * x for x in whole) if isinstance(whole, tuple) else share * whole


@dataclass(frozen=True)
class Family:
    """Answers of a family about a table.

    Attributes:
        problems: mistakes in its passes, given the step of each pass in its row.
        needs: what single passes need because of their place in a row, where a row of `kinds` says Where.RUN.
        instead: passes that hold other memory than their kind says, and the letter of what they take.
        whole: further changes of what a rank holds, as (time, size, step of its row).
        evaluated: what its passes are called in an evaluation; None for those that it lacks.
        of_slice: its costs of a slice, given those of a microbatch by name, the length of the slice as a share of the
            sequence, and the length of the document that ends with it, 0 if none does.
        of_a_rank: those of its costs whose plain number is what a rank takes, however many stages it has.
    """

    name: str
    kinds: frozenset[Kind]
    problems: Problems = _nothing
    needs: Needs = _no_change
    instead: Instead = _no_change
    whole: Whole = _nothing
    evaluated: Renamed = _no_change
    of_slice: OfSlice = _no_change
    of_a_rank: tuple[str, ...] = ()
