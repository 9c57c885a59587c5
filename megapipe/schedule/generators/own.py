"""A schedule made by a user's function, with errors as plain as for a file.

The function takes (ranks, microbatches) and returns a Schedule. It also gets chunks, costs and
memory if it has arguments of these names.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

from megapipe.errors import ConfigError, ScheduleError
from megapipe.named import find_named, place_of
from megapipe.schedule.kinds import Lane
from megapipe.schedule.passes import Kind, Pass, Placement, Schedule, Shared, Step
from megapipe.schedule.placement import placement_problems


def own_generator(name: str) -> Callable[..., Schedule]:
    """Return the user's function that FILE.py:NAME or MODULE:NAME names.

    The function is called with ranks and microbatches. It also gets chunks, costs and memory if it
    has arguments of these names.

    Args:
        name: FILE.py:NAME or MODULE:NAME.
    Raises: ScheduleError if there is no such file or function, or if it requires other arguments.
    """
    try:
        found: Callable[..., Schedule] = find_named(name, "--pipeline-schedule", "my_schedule:make")
    except ConfigError as error:
        raise ScheduleError(error.problems) from None
    # Asked before the call: a TypeError from within the function would be a mistake of its own.
    signature = inspect.signature(found)
    try:
        signature.bind(1, 1)
    except TypeError:
        raise ScheduleError(
            f"{name} takes {signature}, but a function that makes a schedule takes "
            "(ranks, microbatches), and by keyword any of chunks, costs and memory."
        ) from None
    return found


def own_schedule(
    source: str,
    generate: Callable[[], Any],
    ranks: int,
    microbatches: int,
    chunks: int | None = None,
) -> Schedule:
    """Return the schedule that a user's function makes, with lists in it turned into tuples.

    Args:
        source: name of the function in errors, FILE.py:NAME.
        generate: calls the user's function with its arguments.
        ranks, microbatches: the numbers that the function was asked for.
        chunks: the stages of each rank that the function was asked for; None if it was not asked.
    Raises: ScheduleError if the user's code fails, or returns no table for these numbers.
    """
    try:
        made = generate()
    except ScheduleError as error:
        raise ScheduleError(f"{source}: {error}") from error
    except Exception as error:  # the user's code may raise anything
        size = f"{ranks} ranks and {microbatches} microbatches"
        raise ScheduleError(f"{source} failed for {size}: {place_of(error)}") from error
    # All problems at once, as for a file: a user mends a table in one round.
    problems: list[str] = []
    if isinstance(made, Schedule):
        problems += _number_problems(made, ranks, microbatches, chunks)
    else:
        problems.append(
            f"it returned a {type(made).__name__}, "
            "not a Schedule(name, placement, num_microbatches, ranks)"
        )
    # The user's rows may be lists, but steps are keys of dicts, and tables are compared.
    if not problems:
        rows = tuple(tuple(_steps(row, rank, problems)) for rank, row in enumerate(made.ranks))
        more = _more(made, problems)
    if problems:
        lines = "".join(f"\n  {problem}" for problem in problems)
        raise ScheduleError(f"{source} is not a schedule:{lines}")
    placement = replace(made.placement, rank_of=tuple(made.placement.rank_of))
    return Schedule(made.name, placement, microbatches, rows, **more)


def _number_problems(
    made: Schedule, ranks: int, microbatches: int, chunks: int | None
) -> Iterator[str]:
    """Yield a sentence for each wrong number of stages, depths, ranks or microbatches.

    Args:
        made: the schedule that the user's function returned.
        ranks, microbatches: the numbers that the function was asked for.
        chunks: the stages of each rank that it was asked for; None if it was not asked.
    """
    place = made.placement
    # Every other question needs a placement.
    if not isinstance(place, Placement):
        yield f"placement is a {type(place).__name__}, not a Placement(rank_of, chain)"
        return
    yield from placement_problems(place.rank_of, place.chain, ranks)
    if made.num_microbatches != microbatches:
        yield (
            f"num_microbatches is {made.num_microbatches}, "
            f"not the {microbatches} that were asked for"
        )
    if not 0 <= place.depths < place.chain:
        yield f"depths, the last stages of a chain, must be a number from 0 to {place.chain - 1}"
    stages = len(place.rank_of)
    # --chunks would otherwise be ignored without a word.
    if chunks is not None and stages != chunks * ranks:
        yield (
            f"it has {stages} stages, not {chunks} chunks on each of {ranks} ranks. Make as many, "
            "refuse other numbers with a ScheduleError, or do not name chunks as an argument"
        )
    if len(made.ranks) != ranks:
        yield f"it has rows for {len(made.ranks)} ranks, not for the {ranks} that were asked for"


def _steps(row: Iterable[Any], rank: int, problems: list[str]) -> Iterator[Step]:
    """Yield the steps of a rank's row as tuples of Pass. A lone Pass becomes a step of one.

    Args:
        row: the steps as the user's function made them.
        rank: the number of the rank, for the sentences.
        problems: receives a sentence for each item that is no step.
    """
    if not isinstance(row, Iterable):
        problems.append(f"rank {rank}: {row!r} is no row of steps")
        return
    for i, step in enumerate(row):
        passes = [step] if isinstance(step, Pass) else step
        try:
            yield tuple(map(_pass, passes))
        except (TypeError, ValueError):
            problems.append(
                f"rank {rank}, step {i}, {step!r}: "
                "a step is a tuple of passes, such as (Pass(Kind.F, 0, 3),)"
            )


def _pass(item: Sequence[Any]) -> Pass:
    """Return a Pass made from a tuple (kind, stage, microbatch) with or without a slice.

    Raises: TypeError or ValueError if `item` is no such tuple.
    """
    # The user's numbers may be numpy's, which a JSON file cannot have.
    kind, stage, microbatch, *piece = item
    slices = (int(x) for x in piece if x is not None)
    return Pass(Kind(kind), int(stage), int(microbatch), *slices)


def _more(made: Schedule, problems: list[str]) -> dict[str, Any]:
    """Return {field: value as tuples} for cuts, documents and shared streams of a user's schedule.

    Args:
        made: the schedule that the user's function returned.
        problems: receives a sentence for each field with a value of a wrong type.
    """
    # For each field: the words of its error, and a function that raises if the value is no such.
    shapes: dict[str, tuple[str, Callable[[Any], tuple[Any, ...]]]] = {
        "cuts": ("lengths of slices, such as (1.0, 1.0)", lambda x: tuple(map(float, x))),
        "documents": ("a tuple of slices for each microbatch, or one for all", _documents),
        "shared": ("Shared streams, each with its ranks and a tuple of passes", _lanes),
    }
    found: dict[str, Any] = {}
    for name, (rule, shape) in shapes.items():
        try:
            found[name] = shape(getattr(made, name))
        except (AttributeError, TypeError, ValueError):
            problems.append(f"{name} must be {rule}, got {getattr(made, name)!r}")
    return found


def _documents(rows: Iterable[Iterable[int]]) -> tuple[tuple[int, ...], ...]:
    return tuple(tuple(map(int, row)) for row in rows)


def _lanes(shared: Iterable[Shared]) -> tuple[Shared, ...]:
    found = []
    for lane in shared:
        order = tuple(map(_pass, lane.order))
        found.append(Shared(Lane(lane.lane), tuple(map(int, lane.ranks)), order))
    return tuple(found)
