"""The interface of a family: kinds of pass that belong together, and what the core asks of them.

The rows of its kinds are in `kinds`. A family answers what no row can say. `families` lists all
families. Clock, verifier, dependencies, memory and lowering iterate over that list and name none.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from megapipe.schedule.kinds import Kind, Made
from megapipe.schedule.passes import Pass, Placement, Schedule

PerStage = float | tuple[float, ...]
"""One value for every device share, or a tuple with the value of each stage of the chain."""

# The types of a family's answers; `Family` says what each of them is for.
Problems = Callable[[Schedule, Mapping[Pass, int]], Iterator[str]]
Needs = Callable[[Schedule], Mapping[tuple[Pass, Made], tuple[Pass, ...]]]
Instead = Callable[[Schedule], Mapping[Pass, str]]
Renamed = Callable[[Schedule], Mapping[Pass, Pass | None]]
OfSlice = Callable[[Mapping[str, Any], float, float], Mapping[str, Any]]


# `Costs` inherits the fields of all families, and the clock asks the families. So neither can be
# imported here, and two protocols say what a family uses.
class Prices(Protocol):
    """The part of `Costs` that a family uses: `by_stage` returns the values of a field."""

    def by_stage(self, name: str, placement: Placement) -> list[float]:
        """Return the field `name` of the costs as one value for each stage of the placement."""
        ...


class Times(Protocol):
    """The part of a finished simulation that a family uses: when each step starts and ends.

    `start[rank][i]` is the start of step i in that rank's row, in the time unit of the costs.
    """

    @property
    def start(self) -> list[list[float]]: ...
    @property
    def end(self) -> list[list[float]]: ...


Whole = Callable[[Schedule, Prices, Times, int], Iterator[tuple[float, float, int]]]


# The answers of a family that adds nothing.
def _nothing(*_: Any) -> Any:
    return ()


def _no_change(*_: Any) -> Any:
    return {}


def times(share: float, whole: PerStage) -> PerStage:
    """Return a field of costs multiplied by a factor.

    Args:
        share: the factor.
        whole: the field, one number or one for each stage.
    """
    if isinstance(whole, tuple):
        return tuple(share * x for x in whole)
    return share * whole


def mean(whole: PerStage) -> float:
    """Return the mean over stages of a field of costs."""
    if isinstance(whole, tuple):
        return sum(whole) / len(whole)
    return whole


@dataclass(frozen=True)
class Family:
    """A group of kinds of pass, with the functions by which core modules ask about its passes.

    A family is, for example, offload with the kinds O, L and R. Simulation and verification call
    the functions. Each takes the Schedule first, except `of_slice`.

    Attributes:
        name: the name of the family's folder in the packages named `families`.
        kinds: the family's kinds of pass.
        problems: yields a sentence for each mistake in the family's passes. The second argument is
            {pass: index of its step in its rank's row}.
        needs: returns {(pass, result): the passes that produce the result}, for needs that depend
            on the rank's row (Where.RUN). For example, the gather that a pass needs depends on the
            gathers before it.
        instead: returns {pass: letter} for passes that hold other memory than usual for their kind.
            A letter "r" stands for the costs field `mem_r`.
        whole: yields further changes of a rank's memory as (time, size, index of the step in its
            row). The function also takes the costs, the times of each step, and the rank.
        evaluated: returns {pass: the pass that replaces it in an evaluation}. None as replacement
            leaves the pass out. Any other pass stays if its kind's `traits.evaluates` is set.
        of_slice: returns {cost field: value for one slice}. The function takes {cost field: value
            for a microbatch} and the length of the slice, a fraction of the sequence. The third
            argument is the length of the document that ends with the slice, also a fraction; 0 if
            none ends.
        of_a_rank: names of cost fields whose single number is for a rank, however many stages it
            has.
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
