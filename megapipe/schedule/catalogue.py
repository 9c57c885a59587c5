"""Every schedule by name, for the command line and for `build`."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import replace
from difflib import get_close_matches

from megapipe.errors import ScheduleError
from megapipe.schedule.costs import UNIT, Costs
from megapipe.schedule.generators.waves import loop, mirror, vee
from megapipe.schedule.own import own_generator
from megapipe.schedule.passes import Schedule
from megapipe.schedule.patterns import OWN, PATTERNS, SLICED, Entry, make
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
    portable: bool = False,
    progress: Callable[[float], None] | None = None,
) -> Schedule:
    given = locals()
    from megapipe.schedule.search.auto import zb_auto  # only who searches pays for loading the search

    return zb_auto(**given)


_PLACE = [*PATTERNS].index("zb-h2") + 1  # in lists the search stands behind what it begins from
SCHEDULES: dict[str, Entry] = dict(
    [
        *[*PATTERNS.items()][:_PLACE],
        ("zb-auto", Entry(_zb_auto, "loop or v", None, _SEARCHED, split=True, searched=True)),
        *[*PATTERNS.items()][_PLACE:],
    ]
)


def usual(chunks: int | None) -> str:
    """The schedule of a run that names none. chunks: stages on each rank."""
    return "interleaved" if (chunks or 1) > 1 else PLAIN


def entry_of(name: str) -> Entry:
    """The entry of a name, in any case, or of a function of the user's: FILE.py:NAME or MODULE:NAME.

    Raises: ScheduleError if there is none.
    """
    if (entry := (SCHEDULES | SLICED).get(name.lower())) is not None:
        return entry
    if ":" in name:
        made = own_generator(name)
        about = (inspect.getdoc(made) or "a schedule of your own").split("\n")[0]
        takes = inspect.signature(made).parameters
        return Entry(made, OWN, None if "chunks" in takes else 1, about)
    close = get_close_matches(name.lower(), [*SCHEDULES, *SLICED], n=2)
    hint = (
        f"did you mean {' or '.join(close)}?"
        if close
        else f"there are {', '.join([*SCHEDULES, *SLICED])}, a .json or .csv file, or FILE.py:NAME of a function."
    )
    raise ScheduleError(f"unknown schedule {name or repr(name)}; {hint}")


def own_entry(name: str) -> Entry:
    """The list's row of a user's schedule, from the table it makes for 4 ranks and 8 microbatches, or has."""
    if is_file(name):
        made = load(name)
        about = f"{made.placement.num_ranks} ranks, {made.num_microbatches} microbatches"
        entry = Entry(lambda *_: made, "", None, about)
    else:
        entry = entry_of(name)
        made = build(name, 4, 8)
    place = made.placement
    shapes = {mirror(place.num_ranks): "mirror", vee(place.num_ranks): "v"}
    chunks = place.num_stages // place.num_ranks
    placement = shapes.get(place, "loop" if place == loop(place.num_ranks, chunks) else "own")
    split = any(kind.is_split for kind in made.kinds)
    takes_chunks = not is_file(name) and entry.chunks is None
    return replace(
        entry, placement=placement, chunks=None if takes_chunks else chunks, split=split, copies=place.num_chains
    )


def is_file(name: str) -> bool:
    """Is it a table in a file, which knows its ranks and microbatches itself?"""
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
    """Make a schedule by its name, in any case, or by a function FILE.py:NAME, or read it from a .json or .csv file.

    Args:
        chunks: stages on each rank, where the schedule leaves a choice. None: the schedule's own default.
        costs: for schedules that are searched, or put W where these costs leave a wait. None: the papers' tables.
        memory: limit for a searched schedule; any other is refused if it holds more.
        options: further arguments of the generator, such as microbatch_group_size_per_vp_stage.
    Returns: a schedule that `verify` has passed.
    Raises: ScheduleError if there is no such schedule, it cannot mean these numbers, or its table cannot be run.
    """
    if is_file(name):
        schedule = _from_file(name, ranks, microbatches)
        verify(replace(schedule, name=name), memory=memory, costs=costs or UNIT)
        return schedule
    entry = entry_of(name)
    key = name if entry.placement == OWN else name.lower()
    return make(key, entry, ranks, microbatches, chunks=chunks, costs=costs, memory=memory, **options)


def _from_file(path: str, ranks: int, microbatches: int) -> Schedule:
    schedule = load(path)
    made_for = schedule.placement.num_ranks, schedule.num_microbatches
    if made_for != (ranks, microbatches):
        raise ScheduleError(
            f"{path} is made for {made_for[0]} ranks and {made_for[1]} microbatches, not {ranks} and {microbatches}."
        )
    return schedule
