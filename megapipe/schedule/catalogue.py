"""The catalogue: every schedule by name, for the command line and for `build`."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import replace
from difflib import get_close_matches

from megapipe.errors import ScheduleError
from megapipe.schedule.costs import UNIT, Costs
from megapipe.schedule.generators.own import own_generator
from megapipe.schedule.passes import Schedule
from megapipe.schedule.patterns import OWN, PATTERNS, SLICED, Entry, make
from megapipe.schedule.placement import loop, mirror, vee
from megapipe.schedule.text import load
from megapipe.schedule.verify import verify

PLAIN = "1f1b"
"""The schedule of a run that names none, and the one that others are compared with."""
_SEARCHED = "searched for given costs and memory, p if not given"


def _zb_auto(
    ranks: int,
    microbatches: int,
    *,
    chunks: int | None = None,
    placement: str | None = None,
    costs: Costs = UNIT,
    memory: float | None = None,
    objective: str = "makespan",
    effort: float = 4.0,
    progress: Callable[[float], None] | None = None,
) -> Schedule:
    # Taken first: below, locals() would also have the name of the import.
    given = locals()
    # Only a search takes the time to import it.
    from megapipe.schedule.search.auto import zb_auto

    return zb_auto(**given)


# Lists show zb-auto after the zero-bubble schedules from which it starts.
_PLACE = [*PATTERNS].index("zb-h2") + 1
SCHEDULES: dict[str, Entry] = dict(
    [
        *[*PATTERNS.items()][:_PLACE],
        ("zb-auto", Entry(_zb_auto, "loop or v", None, _SEARCHED, split=True, searched=True)),
        *[*PATTERNS.items()][_PLACE:],
    ]
)


def usual(chunks: int | None) -> str:
    """Return the name of the schedule that a run uses if its user names none.

    Args:
        chunks: stages on each rank; None for one.
    """
    return "interleaved" if (chunks or 1) > 1 else PLAIN


def entry_of(name: str) -> Entry:
    """Return the description of a schedule, given by its name or as a user's function.

    Args:
        name: the name of a built-in schedule, such as 1f1b, in any case; FILE.py:NAME or
            MODULE:NAME for a function.
    Raises: ScheduleError if there is no such schedule, with names that are close.
    """
    entry = (SCHEDULES | SLICED).get(name.lower())
    if entry is not None:
        return entry
    # FILE.py:NAME or MODULE:NAME. The file decides by its arguments whether chunks are a choice.
    if ":" in name:
        made = own_generator(name)
        about = (inspect.getdoc(made) or "a schedule of your own").split("\n")[0]
        takes = inspect.signature(made).parameters
        return Entry(made, OWN, None if "chunks" in takes else 1, about)
    # A typing error is close to one or two names. Otherwise the reader needs the whole list.
    close = get_close_matches(name.lower(), [*SCHEDULES, *SLICED], n=2)
    if close:
        hint = f"did you mean {' or '.join(close)}?"
    else:
        names = ", ".join([*SCHEDULES, *SLICED])
        hint = f"there are {names}, a .json or .csv file, or FILE.py:NAME of a function."
    raise ScheduleError(f"unknown schedule {name or repr(name)}; {hint}")


def own_entry(name: str) -> Entry:
    """Return the description of a user's schedule.

    The placement, the chunks and whether the backward is split are read from the schedule's table.
    A function is called with 4 ranks and 8 microbatches to get its table.

    Args:
        name: a .json or .csv file, FILE.py:NAME or MODULE:NAME.
    """
    if is_file(name):
        made = load(name)
        about = f"{made.placement.num_ranks} ranks, {made.num_microbatches} microbatches"
        entry = Entry(lambda *_: made, "", None, about)
    else:
        entry = entry_of(name)
        made = build(name, 4, 8)
    # The list says what the table itself shows, and not what its author claims.
    place = made.placement
    ranks = place.num_ranks
    chunks: int | None = place.num_stages // ranks
    shapes = {loop(ranks, chunks or 1): "loop", mirror(ranks): "mirror", vee(ranks): "v"}
    # A generator that takes chunks makes any number of them. This table has the default one.
    if not is_file(name) and entry.chunks is None:
        chunks = None
    return replace(
        entry,
        placement=shapes.get(place, "own"),
        chunks=chunks,
        split=any(kind.is_split for kind in made.kinds),
        copies=place.num_chains,
    )


def is_file(name: str) -> bool:
    """Return whether a name is a .json or .csv file, whose table fixes ranks and microbatches."""
    return name.lower().endswith((".json", ".csv"))


def build(
    name: str,
    ranks: int,
    microbatches: int,
    *,
    chunks: int | None = None,
    costs: Costs | None = None,
    memory: float | None = None,
    **options: object,
) -> Schedule:
    """Make a schedule, given by its name, by a user's function, or by a file.

    Args:
        name: a name of the catalogue in any case, FILE.py:NAME of a function, or a .json or .csv
            file.
        chunks: stages on each rank, where the schedule leaves a choice; None for its default.
        costs: a search minimises the time under these costs. Other schedules use these costs to put
            W (weight gradient) where a rank would wait. None keeps the papers' orders of passes.
        memory: limit on a rank's activation, in the unit of the costs. A search respects the limit,
            any other schedule is refused if it holds more. None for no limit; a search then takes
            the memory of 1F1B.
        options: further arguments of the generator, such as microbatch_group_size_per_vp_stage.
    Returns: a schedule that `verify` has passed.
    Raises: ScheduleError if there is no such schedule, if it does not exist for these numbers, or
    if its table cannot run.
    """
    if is_file(name):
        schedule = _from_file(name, ranks, microbatches)
        # `load` has verified it already, but without a memory limit. Errors name the file.
        verify(replace(schedule, name=name), memory=memory, costs=costs or UNIT)
        return schedule
    entry = entry_of(name)
    # Names of files and functions keep their case, which file systems and Python distinguish.
    key = name
    if entry.placement != OWN:
        key = name.lower()
    return make(
        key, entry, ranks, microbatches, chunks=chunks, costs=costs, memory=memory, **options
    )


def _from_file(path: str, ranks: int, microbatches: int) -> Schedule:
    schedule = load(path)
    # A generator would make another size. A file has one, and stretching it is another schedule.
    made_for = schedule.placement.num_ranks, schedule.num_microbatches
    if made_for != (ranks, microbatches):
        raise ScheduleError(
            f"{path} is made for {made_for[0]} ranks and {made_for[1]} microbatches, "
            f"not {ranks} and {microbatches}."
        )
    return schedule
