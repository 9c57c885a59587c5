"""A part of a plan that not all plans have: a family of passes, a shape of tables, or CUDA graphs.

A plan is made by iterating over the list in `parts`, which alone names them all. A part of the same
name in `schedule.families` or `schedule.shapes` answers for tables.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from megapipe.config import Config
from megapipe.errors import ConfigError
from megapipe.plan.plan import OfPlan, Plan
from megapipe.schedule import Schedule
from megapipe.schedule.ingredients import Refused, Terms
from megapipe.schedule.recipe import Recipe

Planner = Callable[[Config], Plan]


class NothingToDo(ConfigError):
    """The error of a part that flags ask for, and that a table of too few microbatches cannot have.

    While a batch grows, its small sizes do without the part.

    Attributes:
        part: its name.
    """

    def __init__(self, part: str, problem: str) -> None:
        super().__init__(problem)
        self.part = part


@dataclass(frozen=True)
class Part:
    """Answers of a part about a plan.

    Attributes:
        name: the key in `Plan.own`, and the field of the recipe if it has one.
        of: returns what a plan has of the part, given the table before and after activations move;
            None for nothing. Without the second table it is still being made; without both there
            is none yet.
        check: raises ConfigError if a table with its ends cannot have what flags ask for.
        check_made: raises NothingToDo if the finished table lacks what flags ask for.
        best: returns the best plan, given how to plan one choice; None if flags leave none open.
        chosen: returns the configuration that says what `best` chose in a plan.
        without: returns the configuration without the flags of the part.
        refused: returns the error that names the flags, given the recipe's.
    """

    name: str
    # A part says what it has to say: by default it adds nothing, and refuses nothing.
    of: Callable[[Config, Schedule | None, Schedule | None], OfPlan | None] = lambda *_: None
    check: Callable[[Config, Schedule, Terms], None] = lambda *_: None
    check_made: Callable[[Config, Schedule, Recipe], None] = lambda *_: None
    best: Callable[[Config, Planner], Plan | None] = lambda *_: None
    chosen: Callable[[Config, Plan], Config] = lambda config, _: config
    without: Callable[[Config], Config] = lambda config: config
    refused: Callable[[Config, Refused], Exception] = lambda _, error: error
