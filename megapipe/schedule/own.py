"""A schedule made by a function of the user's: what is wrong with it is said as plainly as for a file.

The function takes (ranks, microbatches), and of chunks, costs and memory those that it names, and returns a Schedule.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from megapipe.errors import ConfigError, ScheduleError
from megapipe.named import find_named, place_of
from megapipe.schedule.passes import Kind, Pass, Placement, Schedule, Step


def own_generator(name: str) -> Callable[..., Schedule]:
    """The function that FILE.py:NAME or MODULE:NAME names.

    Raises: ScheduleError if there is no such file or function, or it takes other arguments.
    """
    try:
        found: Callable[..., Schedule] = find_named(name, "--pipeline-schedule", "my_schedule:make")
    except ConfigError as error:
        raise ScheduleError(error.problems) from None
    signature = inspect.signature(found)
    try:
        signature.bind(1, 1)
    except TypeError:
        raise ScheduleError(
            f"{name} takes {signature}, but what makes a schedule takes (ranks, microbatches), and of chunks, costs "
            "and memory, by keyword, those that it names."
        ) from None
    return found


def own_schedule(
    source: str, generate: Callable[[], Any], ranks: int, microbatches: int, chunks: int | None = None
) -> Schedule:
    """The schedule that `generate` makes, its rows and steps as tuples. `source` names it in errors.

    chunks: the stages of each rank that it was asked for; None: it was not asked.

    Raises: ScheduleError if the user's code fails, or what it returns is no table for these numbers.
    """
    try:
        made = generate()
    except ScheduleError as error:
        raise ScheduleError(f"{source}: {error}") from error
    except Exception as error:  # whatever the user's code raises
        told = f"{source} failed for {ranks} ranks and {microbatches} microbatches: {place_of(error)}"
        raise ScheduleError(told) from error
    problems: list[str] = []
    if isinstance(made, Schedule):
        problems += _number_problems(made, ranks, microbatches, chunks)
    else:
        problems.append(
            f"it returned a {type(made).__name__}, not a Schedule(name, placement, num_microbatches, ranks)"
        )
    if not problems:
        rows = tuple(tuple(_steps(row, rank, problems)) for rank, row in enumerate(made.ranks))
    if problems:
        raise ScheduleError(f"{source} is not a schedule:" + "".join(f"\n  {problem}" for problem in problems))
    placement = Placement(tuple(made.placement.rank_of), made.placement.chain, made.placement.vocabulary)
    return Schedule(made.name, placement, microbatches, rows, cuts=tuple(made.cuts), documents=made.documents)


def placement_problems(rank_of: Iterable[int], chain: int, ranks: int) -> Iterator[str]:
    """Reasons why there is no placement of these numbers."""
    stages = list(rank_of)
    if set(stages) != set(range(ranks)):
        yield f"rank_of must name every rank from 0 to {ranks - 1} and no other, got {stages}"
    if chain < 1 or len(stages) % chain:
        yield f"chain {chain} must divide the number of stages, {len(stages)}"


def _number_problems(made: Schedule, ranks: int, microbatches: int, chunks: int | None) -> Iterator[str]:
    if not isinstance(made.placement, Placement):
        yield f"placement is a {type(made.placement).__name__}, not a Placement(rank_of, chain)"
        return
    yield from placement_problems(made.placement.rank_of, made.placement.chain, ranks)
    if made.num_microbatches != microbatches:
        yield f"num_microbatches is {made.num_microbatches}, not the {microbatches} that were asked for"
    stages = len(made.placement.rank_of)
    if chunks is not None and stages != chunks * ranks:
        yield (
            f"it has {stages} stages, not {chunks} chunks on each of {ranks} ranks. Make as many, refuse other numbers "
            "with a ScheduleError, or do not name chunks as an argument"
        )
    if len(made.ranks) != ranks:
        yield f"it has rows for {len(made.ranks)} ranks, not for the {ranks} that were asked for"


def _steps(row: Iterable[Any], rank: int, problems: list[str]) -> Iterator[Step]:
    """The steps of a row; a pass alone is a step of one."""
    if not isinstance(row, Iterable):
        problems.append(f"rank {rank}: {row!r} is no row of steps")
        return
    for i, step in enumerate(row):
        passes = [step] if isinstance(step, Pass) else step
        try:
            yield tuple(
                Pass(Kind(kind), int(stage), int(microbatch), *map(int, (x for x in piece if x is not None)))
                for kind, stage, microbatch, *piece in passes
            )
        except (TypeError, ValueError):
            problems.append(
                f"rank {rank}, step {i}, {step!r}: a step is a tuple of passes, such as (Pass(Kind.F, 0, 3),)"
            )
