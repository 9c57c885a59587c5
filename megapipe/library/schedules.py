"""Build, compare, draw and save schedules by one call each. No torch is needed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import overload

from megapipe.data.files import write_complete
from megapipe.errors import ScheduleError
from megapipe.schedule import SCHEDULES, catalogue
from megapipe.schedule.costs import UNIT, Costs
from megapipe.schedule.passes import Schedule
from megapipe.schedule.recipe import Recipe
from megapipe.schedule.recipe_line import to_line
from megapipe.schedule.text import to_csv, to_json
from megapipe.schedule.verify import verify
from megapipe.schedule.views.draw import to_svg
from megapipe.schedule.views.figure import COLUMN, Files
from megapipe.schedule.views.screen import picture
from megapipe.schedule.views.study import Comparison, study
from megapipe.schedule.views.terminal import to_terminal
from megapipe.schedule.views.timeline import draw_schedule

File = str | Path
"""A path of a file."""


# Two signatures: a type checker asks for a size with a name, and refuses one with a recipe.
@overload
def build(
    order: str,
    ranks: int,
    microbatches: int,
    *,
    chunks: int | None = None,
    costs: Costs | None = None,
    memory: float | None = None,
    **options: object,
) -> Schedule: ...


@overload
def build(
    order: Recipe, *, costs: Costs | None = None, memory: float | None = None
) -> Schedule: ...


def build(
    order: str | Recipe,
    ranks: int | None = None,
    microbatches: int | None = None,
    *,
    chunks: int | None = None,
    costs: Costs | None = None,
    memory: float | None = None,
    **options: object,
) -> Schedule:
    """Return the schedule that a name, a file or a recipe describes, verified.

    Args:
        order: the name of a schedule, such as "zb-h1"; a .json or .csv file of a schedule;
            FILE.py:NAME of a function that makes one; or a Recipe, which has its own size and
            options.
        ranks: number of pipeline ranks.
        microbatches: number of microbatches of a step.
        chunks: stages on each rank, where the schedule leaves a choice; None for its default.
        costs: times of passes and messages, for which a searched schedule or a recipe is made as
            fast as possible. In other schedules W passes may move to where ranks wait. None: F, B
            and W take a unit of time each, and schedules that are not searched are as in the
            papers.
        memory: limit on a rank's activation, in the unit of `costs.mem_b`; None for no limit.
        options: further arguments of the function that makes the schedule.
    Raises: ScheduleError if there is no such schedule, or none of this size. ScheduleError if
    fields of a recipe exclude each other, or a rank holds more than the limit. TypeError for a
    name without ranks and microbatches, or a recipe with them.
    """
    if isinstance(order, Recipe):
        if ranks is not None or microbatches is not None or chunks is not None or options:
            raise TypeError("a Recipe has its own ranks, microbatches, chunks and options")
        # Problems name parts by the user's word for them. Here that is the field of the recipe.
        named = {field.name: f"Recipe.{field.name}" for field in fields(order)}
        if problems := list(order.problems(named)):
            raise ScheduleError(problems)
        costs = costs or UNIT
        # The catalogue verifies what it makes. What parts add to it is verified here.
        table = order.whole(costs, memory)
        verify(table, memory=memory, costs=costs)
        return table
    if ranks is None or microbatches is None:
        raise TypeError(f"build needs ranks and microbatches, such as build({order!r}, 4, 8)")
    return catalogue.build(
        order, ranks, microbatches, chunks=chunks, costs=costs, memory=memory, **options
    )


def compare(
    ranks: int,
    microbatches: int,
    among: Sequence[str | Schedule | Recipe] = tuple(SCHEDULES),
    *,
    costs: Costs = UNIT,
    memory: float | None = None,
    effort: float = 4.0,
) -> Comparison:
    """Return a row for each schedule, with advice on which to take. A notebook shows a table.

    Args:
        ranks: number of pipeline ranks.
        microbatches: number of microbatches of a step.
        among: names and files that `build` takes, schedules, and recipes. 1f1b is always added,
            because others are compared with it.
        costs: times of passes and messages.
        memory: limit on a rank's activation, in the unit of `costs.mem_b`; None for no limit.
        effort: about the seconds to spend on each of the two searches of zb-auto.
    Raises: ScheduleError for an unknown name. A schedule that does not exist for this size is a
    row with the reason.
    """

    def silent(share: float, doing: str) -> None:
        """Show no progress: a notebook has no line to overwrite."""

    # A study of one point, so that a table here and `megapipe schedules compare` agree.
    (found,) = study([ranks], [microbatches], [costs], memory, among, effort, silent)
    return found


@dataclass(frozen=True, repr=False)
class Picture:
    """A drawn schedule: shown as SVG in a notebook, and as text where it is printed.

    Attributes:
        schedule: the schedule that is drawn.
        costs: times of passes and messages.
        memory: a limit to draw, in the unit of `costs.mem_b`; None for none. A .png or .pdf has
            none.
    """

    schedule: Schedule
    costs: Costs = UNIT
    memory: float | None = None

    # Pictures are drawn when they are shown: a cell that ends in `;` shows none.
    def _repr_svg_(self) -> str | None:
        return picture(self.schedule, self.costs, self.memory)

    def __repr__(self) -> str:
        return to_terminal(self.schedule, self.costs)


def draw(
    schedule: Schedule,
    costs: Costs = UNIT,
    memory: float | None = None,
    *,
    file: File | None = None,
    width: float = COLUMN,
) -> Picture:
    """Return the picture of a schedule, and write it to a file if one is named.

    Args:
        schedule: the schedule to draw.
        costs: times of passes and messages.
        memory: a limit to draw, in the unit of `costs.mem_b`; None for none. A .png or .pdf has
            none.
        file: a path that ends in .svg, .png or .pdf. The last two need matplotlib.
        width: inches of a .png or .pdf: a column of a paper has 3.4, a page 7.
    Raises: ScheduleError if the file has another ending, matplotlib is missing, the width is not 2
    to 40, or the schedule deadlocks. Without a file a deadlock is raised when the picture is
    shown. DataError if the file cannot be written.
    """
    if file is None:
        return Picture(schedule, costs, memory)
    ending = Path(file).suffix.lower()
    if ending == ".svg":
        # The picture of a screen, as wide as its passes need. It needs no matplotlib.
        write_complete(file, to_svg(schedule, costs, memory))
    elif ending in (".png", ".pdf"):
        # The figure of a paper, in its fonts and as wide as a column.
        figure = Files(**{ending[1:]: str(file)}, width=width)
        figure.check()
        for path, content in draw_schedule(schedule, figure, costs).items():
            write_complete(path, content)
    else:
        raise ScheduleError(f"{file}: a picture ends in .svg, .png or .pdf")
    return Picture(schedule, costs, memory)


def save(
    schedule: Schedule,
    file: File,
    *,
    costs: Costs | None = None,
    recipe: Recipe | None = None,
) -> None:
    """Write a schedule to a file that `load`, `build` and --pipeline-schedule read.

    Args:
        schedule: the schedule to write.
        file: a path that ends in .json, which has everything, or in .csv.
        costs: a .json also gets these costs, the makespan and the start of each step; None for none
            of these.
        recipe: a .json also gets the recipe by which the schedule was made; None for none.
    Raises: ScheduleError for another ending, and for a .csv with costs, with a recipe, or with a
    schedule that CSV cannot express. DataError if the file cannot be written.
    """
    ending = Path(file).suffix.lower()
    if ending == ".json":
        # Costs and recipe say how the table came about. A reader of the table ignores both.
        line = None if recipe is None else to_line(recipe)
        write_complete(file, to_json(schedule, costs, line))
    elif ending != ".csv":
        raise ScheduleError(f"{file}: a schedule file ends in .json or .csv.")
    # Refused and not dropped: a file of a run would have lost its costs in silence.
    elif costs is not None or recipe is not None:
        raise ScheduleError(f"{file}: CSV has no costs and no recipe. Write .json.")
    else:
        write_complete(file, to_csv(schedule))
