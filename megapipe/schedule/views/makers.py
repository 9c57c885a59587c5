"""Functions that make the schedules of a comparison, by the labels of their rows."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Sequence
from itertools import count

from megapipe.errors import ScheduleError
from megapipe.schedule.catalogue import build, entry_of, is_file
from megapipe.schedule.core.cuts import Cutting
from megapipe.schedule.costs import Costs
from megapipe.schedule.ingredients import FixedCosts
from megapipe.schedule.passes import Schedule
from megapipe.schedule.recipe import Recipe
from megapipe.schedule.recipe_line import parts_line
from megapipe.schedule.views.divided import over_stages
from megapipe.schedule.views.features.sliced import in_slices

Make = Callable[[Callable[[float], None]], Schedule]
"""Makes a schedule, given the function to call with the share of the work done."""
_CHUNKS = (2, 4)
"""Stages of a rank, where a schedule leaves a choice."""


def makers_of(
    names: Iterable[str | Schedule | Recipe],
    ranks: int,
    microbatches: int,
    costs: Costs,
    memory: float | None,
    effort: float,
) -> tuple[dict[str, Make], dict[str, Make]]:
    """Return two dicts {label: function that makes the schedule}: of all schedules, of searches.

    The first dict contains the second. Each function is called with a progress callback, to
    which it reports the fraction of its work done. Labels are the names in a comparison.

    Args:
        names: names of built-in schedules, files, functions FILE.py:NAME, tables, or recipes.
        memory: limit on a rank's activation, in the unit of the costs; None for no limit.
        effort: about the seconds to spend on a search.
    """

    def fixed(name: str, chunks: int | None = None) -> Make:
        def made(report: Callable[[float], None]) -> Schedule:
            fitted = costs
            if isinstance(costs.f, tuple) and not is_file(name):
                # Costs that name other stages are divided, and only a table knows how many it has.
                table = build(name, ranks, microbatches, chunks=chunks)
                fitted = over_stages(costs, table.placement.chain)
            return build(name, ranks, microbatches, chunks=chunks, costs=fitted)

        return made

    def searched(name: str, objective: str) -> Make:
        return lambda report: entry_of(name).generate(
            ranks,
            microbatches,
            costs=costs,
            memory=memory,
            objective=objective,
            effort=effort,
            progress=report,
        )

    makers = dict[str, Make]()
    searches = dict[str, Make]()
    for name in names:
        if not isinstance(name, str):
            label, make = _given(name, ranks, microbatches, costs, memory)
            makers[_unused(label, makers)] = make
        # An order that is best with a barrier is seldom best without, so there are two searches.
        elif not is_file(name) and entry_of(name).searched:
            searches |= {
                name.lower(): searched(name, "makespan"),
                f"{name.lower()} period": searched(name, "period"),
            }
            makers |= searches
        elif not is_file(name) and entry_of(name).any_chunks:
            makers |= {f"{name} v={chunks}": fixed(name, chunks) for chunks in _CHUNKS}
        else:
            makers[name] = fixed(name)
    return makers, searches


def _given(
    table: Schedule | Recipe, ranks: int, microbatches: int, costs: Costs, memory: float | None
) -> tuple[str, Make]:
    """Return (label, function that returns the table) for a table or recipe.

    The function raises ScheduleError if the table has other numbers of ranks or microbatches.

    Args:
        table: the table or recipe.
        memory: limit on a rank's activation, in the unit of the costs; None for no limit.
    """
    # Both become recipes, so that a table gets the same treatment as one that flags describe.
    if isinstance(table, Recipe):
        recipe = table
        label = f"{recipe.order} {parts_line(recipe)}".rstrip()
    else:
        size = len(table.ranks), table.num_microbatches
        recipe = Recipe(table.name, *size, table=table)
        label = table.name

    def make(report: Callable[[float], None]) -> Schedule:
        # A study has several sizes, and a table is a row at its own size alone.
        if (recipe.ranks, recipe.microbatches) != (ranks, microbatches):
            raise ScheduleError(
                f"{label} is of {recipe.ranks} ranks and {recipe.microbatches} microbatches, "
                f"not of {ranks} and {microbatches}."
            )
        return recipe.whole(costs, memory)

    return label, make


def _unused(label: str, labels: Container[str]) -> str:
    """Return the label, with a number appended if it is among the labels in use.

    Args:
        labels: the labels in use.
    """
    if label not in labels:
        return label
    numbered = (f"{label} ({n})" for n in count(2))
    return next(x for x in numbered if x not in labels)


def cut_makers(
    names: Iterable[str | Schedule | Recipe],
    ranks: int,
    microbatches: int,
    costs: Costs,
    cutting: Cutting,
) -> dict[str, Make]:
    """Return {label: function that makes the schedule with microbatches in slices}.

    Only schedules given by name are cut, and only if no search finds their order.

    Args:
        names: names of built-in schedules, files, functions FILE.py:NAME, tables, or recipes.
        cutting: number of slices, and how their lengths are chosen.
    """

    # The recipe is made at once: an unknown name is an error of the command, not of a row.
    def made(name: str, chunks: int | None) -> Make:
        recipe = in_slices(name, ranks, microbatches, costs, cutting=cutting, chunks=chunks)
        return lambda report: recipe.build(FixedCosts(costs)).table

    makers = dict[str, Make]()
    for name in names:
        # A given table has its own slices, or none.
        if not isinstance(name, str):
            continue
        choices: Sequence[int | None] = (None,)
        if not is_file(name):
            entry = entry_of(name)
            if entry.searched:
                continue
            if entry.any_chunks:
                choices = _CHUNKS
        for chunks in choices:
            label = name
            if chunks:
                label += f" v={chunks}"
            makers[f"{label} in {cutting.count}"] = made(name, chunks)
    return makers
