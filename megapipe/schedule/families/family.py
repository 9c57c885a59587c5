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
    """The part of `Costs` that a family uses: `by_stage` returns one field for each stage."""

    def by_stage(self, name: str, placement: Placement) -> list[float]:
        """Return the field `name` of the costs as one value for each stage of the placement."""
        ...


class Times(Protocol):
    """The part of a finished simulation that a family uses: when each step starts and ends.

    Both lists are indexed [rank][step of the rank's row], in the time unit of the costs.
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
    """Return a field of costs, `whole`, multiplied by `share`: a number, or one for each stage."""
    if isinstance(whole, tuple):
        return tuple(share * x for x in whole)
    return share * whole


@dataclass(frozen=True)
class Family:
    """The answers of a family, a group of kinds of pass, to what the core asks about a table.

    Each callable takes the Schedule first, except `of_slice`. Clock and verifier call them.

    Attributes:
        name: its folder here, in `pipeline_parallel.families` and in `plan.families`.
        kinds: its kinds of pass.
        problems: yields a sentence for each mistake in its passes. It takes, for each pass, the
            index of its step in its rank's row.
        needs: returns which passes make a result that a pass needs with Where.RUN. The keys are
            (pass that needs it, result).
        instead: returns the passes that hold other memory than their kind says. The value is the
            letter of the costs field `mem_<letter>` that they hold.
        whole: yields further changes of a rank's memory as (time, size, step of its row). It takes
            costs, the start and end of each step, and the rank.
        evaluated: returns the pass that takes the place of a pass in an evaluation; None leaves it
            out.
        of_slice: returns its costs of a slice by name. It takes the costs of a microbatch by name,
            then the length of the slice as a share of the sequence. The third argument is, if a
            document ends with the slice, the length of that document as such a share; else 0.
        of_a_rank: names of its costs whose plain number is per rank, for any number of stages.
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
