"""A part of a plan that not all plans have: a family of passes, a shape of tables, or CUDA graphs.

A plan is made by iterating over the list in `parts`, which alone names them all. A file of the same
name in `schedule.families` or `schedule.shapes` makes the passes of the feature.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from megapipe.config import Config
from megapipe.errors import ConfigError
from megapipe.plan.plan import OfPlan, Plan
from megapipe.schedule import Schedule
from megapipe.schedule.ingredients import CostModel, Refused
from megapipe.schedule.recipe import Recipe

Planner = Callable[[Config], Plan]


class NothingToDo(ConfigError):
    """The error for a feature, such as offload, that flags ask for but this table cannot have.

    A table of few microbatches may have nothing to offload, for example. A run whose batch size
    grows catches the error, and runs small batches without the feature.

    Attributes:
        part: the name of the feature, as in `PlanFeature.name`.
    """

    def __init__(self, part: str, problem: str) -> None:
        super().__init__(problem)
        self.part = part


@dataclass(frozen=True)
class PlanFeature:
    """An optional feature of plans, such as offload: a record of functions that make and check it.

    To make a plan, the functions are called for each feature in `parts.PARTS`. The first argument
    of each function is the configuration.

    Attributes:
        name: the key in `Plan.own`, and the field of the table's `Recipe` if it has one.
        of: returns what the feature adds to a plan; None for nothing. The second argument is the
            schedule before offload and sharding, the third the finished one. Each is None if it
            does not exist yet.
        check: takes the table and its costs, and raises ConfigError if flags ask for something that
            this table cannot have.
        check_made: raises NothingToDo if flags ask for the feature and the finished table lacks it.
        best: if the flags leave a choice open, returns the best plan; else None. The second
            argument makes the plan of a configuration in which the choice is made.
        chosen: takes a plan that `best` returned, and returns the configuration with flags that ask
            for the same choice.
        without: returns the configuration without the flags of the feature.
        refused: takes an error that names a field of the recipe, and returns one that names the
            flags.
    """

    name: str
    # A part says what it has to say: by default it adds nothing, and refuses nothing.
    of: Callable[[Config, Schedule | None, Schedule | None], OfPlan | None] = lambda *_: None
    check: Callable[[Config, Schedule, CostModel], None] = lambda *_: None
    check_made: Callable[[Config, Schedule, Recipe], None] = lambda *_: None
    best: Callable[[Config, Planner], Plan | None] = lambda *_: None
    chosen: Callable[[Config, Plan], Config] = lambda config, _: config
    without: Callable[[Config], Config] = lambda config: config
    refused: Callable[[Config, Refused], Exception] = lambda _, error: error
