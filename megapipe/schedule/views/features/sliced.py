"""Recipes of schedules with microbatches in slices, and lines that describe them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace

from megapipe.errors import ScheduleError
from megapipe.schedule.catalogue import SCHEDULES, build, entry_of, is_file
from megapipe.schedule.core.cuts import Cutting, shares
from megapipe.schedule.costs import Costs
from megapipe.schedule.ingredients import FixedCosts, Search, placements
from megapipe.schedule.memory.held import memory_steps
from megapipe.schedule.passes import Schedule
from megapipe.schedule.patterns import SLICED
from megapipe.schedule.recipe import Recipe
from megapipe.schedule.simulate import run_clock
from megapipe.schedule.text import load
from megapipe.schedule.views.scene import short

_EFFORT = 4.0
"""The effort of a search, about seconds of one core."""


def most_keys(schedule: Schedule, costs: Costs) -> tuple[float, float]:
    """Return the most keys and values that a rank holds: (alone, together with their gradients).

    The unit is the keys and values of one microbatch in 1/p of the model, on p ranks.
    """
    # A microbatch leaves keys and values and nothing else, in the unit of one microbatch. Costs by
    # stage and plain ones cannot be mixed, so costs of offload are plain here.
    counted = replace(
        costs,
        mem_b=1.0,
        mem_w=0.0,
        mem_s=0.0,
        mem_k=1.0,
        wide_k=1.0,
        mem_o=None,
        mem_r=0.0,
        mem_a=0.0,
        mem_g=0.0,
        o=0.0,
        l=0.0,
    )
    # Passes keep the times of the given costs; only the memory is counted in another way.
    clock = run_clock(schedule, costs)

    def most(*, without_gradients: bool) -> float:
        curves = memory_steps(schedule, counted, clock, without_gradients=without_gradients)
        return max(held for curve in curves for _, held, _ in curve)

    return most(without_gradients=True), most(without_gradients=False)


def references(
    name: str,
    ranks: int | None,
    microbatches: int | None,
    costs: Costs,
    *,
    cutting: Cutting,
    chunks: int | None = None,
) -> dict[str, Schedule]:
    """Return {name to print: table to compare with a sliced table}.

    "undivided" is the table without slices, if there is one; TeraPipe, Seq1F1B and SlimPipe have
    none. If `cutting` has several documents, "in one document" is the table with as many slices of
    a single document. For a searched schedule the dict is empty.

    Args:
        name: name of a built-in schedule, a file, or FILE.py:NAME.
        ranks, microbatches: the size; a file has its own, and needs neither.
        cutting: number of slices, how their lengths are chosen, and number of documents.
        chunks: stages on each rank; None for the schedule's default.
    """
    if name.lower() in SCHEDULES and SCHEDULES[name.lower()].searched:
        return {}
    tables = {}
    if cutting.documents > 1:
        alone = replace(cutting, documents=1)
        recipe = in_slices(name, ranks, microbatches, costs, cutting=alone, chunks=chunks)
        tables["in one document"] = recipe.build(FixedCosts(costs)).table
    if is_file(name):
        tables["undivided"] = load(name)
    elif name.lower() not in SLICED and ranks and microbatches:
        # A schedule may exist for the number of slices but not for so few whole microbatches.
        with suppress(ScheduleError):
            whole = build(name, ranks, microbatches, chunks=chunks, costs=costs)
            tables["undivided"] = whole
    return tables


def describe_keys(table: Schedule, others: Mapping[str, Schedule], costs: Costs) -> str:
    """Return a line on the most keys and values that a rank holds, with other tables' numbers.

    Args:
        others: {name: table to compare with}.
    """
    alone, both = most_keys(table, costs)
    line = (
        f"keys and values: a rank holds at most {short(alone)} of a microbatch, "
        f"with their gradients {short(both)}"
    )
    for what, other in others.items():
        its = most_keys(other, costs)
        parts = " and ".join(f"{x / y:.2f}" for x, y in zip((alone, both), its, strict=True))
        line += f"; {what} {short(its[0])} and {short(its[1])}, this is {parts} of these"
    return line


def describe_slices(cutting: Cutting, cuts: Sequence[float]) -> list[str]:
    """Return [a line on the lengths of the slices].

    Args:
        cutting: number of slices, how their lengths are chosen, and number of documents.
        cuts: the lengths of the slices, in any unit.
    """
    documents = ""
    if cutting.documents > 1:
        documents = f", {cutting.documents} documents"
    whole = sum(cuts)
    shown = " ".join(f"{cut / whole:.1%}" for cut in cuts)
    return [f"slices, {cutting.how}: {shown} of the sequence{documents}"]


def in_slices(
    name: str,
    ranks: int | None,
    microbatches: int | None,
    costs: Costs,
    *,
    cutting: Cutting,
    chunks: int | None = None,
    memory: float | None = None,
) -> Recipe:
    """Return the `Recipe` that makes a schedule with its microbatches cut into slices.

    Args:
        name: name of a built-in schedule, a file, or FILE.py:NAME.
        ranks, microbatches: the size; a file has its own, and needs neither.
        cutting: number of slices, how their lengths are chosen, and number of documents.
        chunks: stages on each rank; None for the schedule's default.
        memory: limit on a rank's activation. Forwards run earlier than they must, as far as it
            allows; None lets no forward run earlier.
    Raises: ScheduleError for a schedule that cannot be cut into slices.
    """
    begins = cutting.begins
    cuts = shares(cutting.count, cutting.how, costs, cutting.documents)
    # A file's table keeps its order of passes: each pass becomes its slices, one after another.
    if is_file(name):
        table = load(name)
        size = table.placement.num_ranks, table.num_microbatches
        return Recipe(name, *size, cuts=cuts, documents=begins)
    if ranks is None or microbatches is None:
        raise ScheduleError(
            f"show {name} --slices needs --pp and --microbatches, such as --pp 4 --microbatches 8"
        )
    recipe = Recipe(
        name,
        ranks,
        microbatches,
        chunks,
        fitted=costs,
        cuts=cuts,
        documents=begins,
        room_of_slices=memory,
    )
    # TeraPipe, Seq1F1B and SlimPipe are orders of slices. All other orders are made for n times the
    # microbatches and read as slices.
    if name.lower() in SLICED:
        if begins:
            raise ScheduleError(
                f"{name} has slices of its own. Leave out --documents, or take 1f1b or interleaved."
            )
        return replace(recipe, options=(("slices", cutting.count),))
    # The search itself makes n times the microbatches, see `core.sliced_search`.
    if entry_of(name).searched:
        places = placements(ranks, microbatches, None, chunks, costs, "makespan")
        return replace(recipe, search=Search(tuple(places), effort=_EFFORT))
    return recipe
