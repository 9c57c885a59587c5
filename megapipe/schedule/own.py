"""A schedule made by a function of the user's: what is wrong with it is said as plainly as for a file.

The function takes (ranks, microbatches), and of chunks, costs and memory those that it names, and returns a Schedule.
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
        more = _more(made, problems)
    if problems:
        raise ScheduleError(f"{source} is not a schedule:" + "".join(f"\n  {problem}" for problem in problems))
    placement = replace(made.placement, rank_of=tuple(made.placement.rank_of))
    return Schedule(made.name, placement, microbatches, rows, **more)


def placement_problems(rank_of: Iterable[int], chain: int, ranks: int) -> Iterator[str]:
    """Reasons why there is no placement of these numbers."""
    stages = list(rank_of)
    named = set(stages)
    if len(named) != ranks or named != set(range(ranks)):  # counted first: a file may ask for any number of ranks
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
    if not 0 <= made.placement.depths < made.placement.chain:
        yield f"depths, the last stages of a chain, must be a number from 0 to {made.placement.chain - 1}"
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
            yield tuple(map(_pass, passes))
        except (TypeError, ValueError):
            problems.append(
                f"rank {rank}, step {i}, {step!r}: a step is a tuple of passes, such as (Pass(Kind.F, 0, 3),)"
            )


def _pass(item: Sequence[Any]) -> Pass:
    """The pass of a Pass, or of a tuple like it. Raises: TypeError or ValueError if it is none."""
    kind, stage, microbatch, *piece = item
    return Pass(Kind(kind), int(stage), int(microbatch), *(int(x) for x in piece if x is not None))


def _more(made: Schedule, problems: list[str]) -> dict[str, Any]:
    """The fields of a Schedule that have defaults, as tuples."""
    shapes: dict[str, tuple[str, Callable[[Any], tuple[Any, ...]]]] = {
        "cuts": ("lengths of slices, such as (1.0, 1.0)", lambda x: tuple(map(float, x))),
        "documents": ("a tuple of slices for each microbatch, or one for all", _documents),
        "shared": ("Shared(lane, ranks, order), each with a tuple of passes", _lanes),
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
    return tuple(Shared(Lane(x.lane), tuple(map(int, x.ranks)), tuple(map(_pass, x.order))) for x in shared)
