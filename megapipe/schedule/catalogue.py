"""Every schedule by name, for the command line and for `build`."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from difflib import get_close_matches

from megapipe.errors import ScheduleError
from megapipe.schedule.costs import UNIT, Costs
from megapipe.schedule.generators.blocks import v_half, v_min
from megapipe.schedule.generators.classic import gpipe, naive, one_f_one_b
from megapipe.schedule.generators.dualpipe import dualpipe, dualpipe_v
from megapipe.schedule.generators.interleaved import interleaved, interleaved_zb
from megapipe.schedule.generators.zero_bubble import zb_h1, zb_h2, zb_v
from megapipe.schedule.passes import Schedule
from megapipe.schedule.text import load
from megapipe.schedule.verify import verify


@dataclass(frozen=True)
class Entry:
    """One schedule of the catalogue.

    Attributes:
        generate: takes (ranks, microbatches) and those of chunks, costs, memory and further options it names.
        placement: loop, v or mirror; for a search also "loop or v".
        chunks: stages on each rank; None: any number.
        about: one line.
        split: do input and weight gradient run apart?
        copies: of the parameters.
    """

    generate: Callable[..., Schedule]
    placement: str
    chunks: int | None
    about: str
    split: bool = False
    copies: int = 1


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
    # Only who searches pays for loading the search.
    from megapipe.schedule.search.auto import zb_auto

    return zb_auto(
        ranks,
        microbatches,
        chunks=chunks,
        placement=placement,
        costs=costs,
        memory=memory,
        objective=objective,
        effort=effort,
        progress=progress,
    )


SCHEDULES: dict[str, Entry] = {
    "naive": Entry(naive, "loop", 1, "one microbatch at a time; a rank computes 1/p of the time"),
    "gpipe": Entry(gpipe, "loop", 1, "all forwards, then all backwards; bubble (p-1)(F+B+W), memory m"),
    "1f1b": Entry(one_f_one_b, "loop", 1, "backward as soon as possible; bubble (p-1)(F+B+W), memory p"),
    "interleaved": Entry(interleaved, "loop", None, "1F1B over v chunks; bubble (p-1)(F+B+W)/v, memory p + (p-1)/v"),
    "interleaved-zb": Entry(interleaved_zb, "loop", None, "split; bubble (p-1)(F+B-W)/v, memory p", split=True),
    "zb-h1": Entry(zb_h1, "loop", 1, "bubble (p-1)(F+B-W), memory p", split=True),
    "zb-h2": Entry(zb_h2, "loop", 1, "bubble (p-1)(F+B-2W), memory 2p-1", split=True),
    "zb-auto": Entry(_zb_auto, "loop or v", None, "searched for given costs and memory, p if not given", split=True),
    "zb-v": Entry(zb_v, "v", 2, "no bubble at F = B = W, memory p", split=True),
    "v-half": Entry(v_half, "v", 2, "memory (p+2)//2, about half of 1F1B's bubble", split=True),
    "v-min": Entry(v_min, "v", 2, "memory (p+4)//3", split=True),
    "dualpipe": Entry(dualpipe, "mirror", 2, "bubble (p/2-1)(F&B+B-3W), memory p+1", split=True, copies=2),
    "dualpipe-v": Entry(dualpipe_v, "v", 2, "bubble (p-1)/2 (F&B+B-3W), memory p+1/2", split=True),
}


def build(
    name: str,
    ranks: int,
    microbatches: int,
    *,
    chunks: int | None = None,
    costs: Costs = UNIT,
    memory: float | None = None,
    **options: object,
) -> Schedule:
    """Make a schedule by its name, in any case, or read it from a .json or .csv file.

    Args:
        chunks: stages on each rank, where the schedule leaves a choice. None: the schedule's own default.
        costs: for schedules that are searched.
        memory: limit for a searched schedule; any other is refused if it holds more.
        options: further arguments of the generator, such as microbatch_group_size_per_vp_stage.
    Raises: ScheduleError in one line if there is no such schedule or it cannot mean these numbers.
    """
    key = name.lower()
    if key.endswith((".json", ".csv")):
        return _from_file(name, ranks, microbatches, memory, costs)
    if key not in SCHEDULES:
        close = get_close_matches(key, SCHEDULES, n=2)
        hint = (
            f"did you mean {' or '.join(close)}?"
            if close
            else f"There are {', '.join(SCHEDULES)}, or a .json or .csv file."
        )
        raise ScheduleError(f"unknown schedule {name}; {hint}")
    if ranks < 1 or microbatches < 1:
        raise ScheduleError(f"{key} needs at least 1 rank and 1 microbatch, got {ranks} and {microbatches}.")
    entry = SCHEDULES[key]
    takes = inspect.signature(entry.generate).parameters
    unknown = [option for option in options if option not in takes]
    if unknown:
        raise ScheduleError(f"{key} takes no option {', '.join(unknown)}.")
    if chunks is not None and "chunks" in takes:
        options["chunks"] = chunks
    elif chunks not in (None, 1, entry.chunks):
        raise ScheduleError(f"{key} has {entry.chunks} chunk(s) per rank, not {chunks}.")
    if "costs" in takes:
        return entry.generate(ranks, microbatches, costs=costs, memory=memory, **options)
    schedule = entry.generate(ranks, microbatches, **options)
    if memory is not None:
        verify(schedule, memory=memory, costs=costs)
    return schedule


def _from_file(path: str, ranks: int, microbatches: int, memory: float | None, costs: Costs) -> Schedule:
    schedule = load(path)
    made_for = schedule.placement.num_ranks, schedule.num_microbatches
    if made_for != (ranks, microbatches):
        raise ScheduleError(
            f"{path} is made for {made_for[0]} ranks and {made_for[1]} microbatches, not {ranks} and {microbatches}."
        )
    if memory is not None:
        verify(schedule, memory=memory, costs=costs)
    return schedule
