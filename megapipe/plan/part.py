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

    A run whose batch grows catches it, and does its small sizes without the part.

    Attributes:
        part: its name.
    """

    def __init__(self, part: str, problem: str) -> None:
        super().__init__(problem)
        self.part = part


@dataclass(frozen=True)
class Part:
    """An optional part of plans, as functions that answer for it.

    A plan is made by calling them for each part in `parts.PARTS`.

    Attributes:
        name: the key in `Plan.own`, and the field of the recipe if it has one.
        of: returns what the part adds to a plan; None for nothing. Its tables are the schedule
            before and after activations move. The second is None while it is being made, and both
            are None before there is one.
        check: raises ConfigError if flags ask for what this table cannot have.
        check_made: raises NothingToDo if the finished table lacks what flags ask for.
        best: plans each open choice by calling its second argument, and returns the best plan; None
            if the flags leave no choice.
        chosen: returns the configuration with flags for the choice that `best` made in a plan.
        without: returns the configuration without the flags of the part.
        refused: returns an error that names the flags, given the recipe's error.
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
