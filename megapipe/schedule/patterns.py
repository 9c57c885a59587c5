"""The papers' schedules by name, all but the searched ones, and how an entry becomes a table.

Bubbles and memory stand in the paper's symbols: p ranks, m microbatches, v chunks on each rank, n
slices. F, B and W are times of a device share, 1/p of the model; F&B is the time of an overlapped
pair. The unit of memory is the activation of one microbatch in one device share.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from typing import Any

from megapipe.errors import ScheduleError
from megapipe.schedule.core.sliced import seq1f1b, slimpipe, terapipe
from megapipe.schedule.costs import UNIT, Costs
from megapipe.schedule.generators.blocks import (
    v_half,
    v_half_patterns,
    v_min,
    v_min_patterns,
)
from megapipe.schedule.generators.classic import gpipe, naive, one_f_one_b, zb_h1, zb_h2
from megapipe.schedule.generators.dualpipe import dualpipe, dualpipe_v
from megapipe.schedule.generators.fused_v import one_f_one_b_v
from megapipe.schedule.generators.interleaved import (
    breadth_first,
    group_interleaved,
    interleaved,
    interleaved_zb,
)
from megapipe.schedule.generators.own import own_schedule
from megapipe.schedule.generators.waves import chimera, hanayo
from megapipe.schedule.generators.zb_v import zb_v
from megapipe.schedule.passes import Placement, Schedule
from megapipe.schedule.placement import loop, vee, wave
from megapipe.schedule.verify import verify

OWN = "own"
GROUP_SIZE = "microbatch_group_size_per_vp_stage"
MOST_CELLS, MOST_STAGES = 4_000_000, 10_000
"""The largest table: 128 ranks with 8 chunks take 4,000 microbatches."""


@dataclass(frozen=True)
class Entry:
    """The description of one schedule, built-in or a user's function.

    `grouped`, `sliced` and `any_chunks` say whether a user may choose the size of groups of
    microbatches, the number of slices, and the number of chunks. `takes` has the names of the
    function's arguments.

    Attributes:
        generate: the function that makes the schedule's table from (ranks, microbatches). If it has
            arguments named chunks, costs or memory, or options of its own, it gets these too.
        placement: which stages a rank has: "loop", "v", "wave" or "mirror"; "loop or v" for the
            search; OWN for a user's function.
        chunks: stages on each rank; None for any number.
        about: a line of description, for lists.
        split: the backward is split into the passes B and W.
        copies: copies of the parameters that the ranks hold together, 2 in DualPipe.
        searched: a search of some seconds finds the order for given costs and memory limit.
        dominated: another schedule takes no longer and holds less, whatever passes cost.
        pairs: the table has overlapped pairs of a forward and a backward.
        choices: for a schedule that takes the fastest of several tables under the costs, such as
            V-Half. The function takes (ranks, microbatches) and returns (the tables, memory limit).
            None for other schedules.
    """

    generate: Callable[..., Schedule]
    placement: str
    chunks: int | None
    about: str
    split: bool = False
    copies: int = 1
    searched: bool = False
    dominated: bool = False
    pairs: bool = False
    choices: Callable[[int, int], tuple[Sequence[Schedule], int]] | None = None

    @property
    def takes(self) -> Collection[str]:
        """Return the names of the arguments of the function that makes the table."""
        return inspect.signature(self.generate).parameters

    @property
    def grouped(self) -> bool:
        """Return whether a user may choose how many microbatches run through a chunk as a group."""
        return GROUP_SIZE in self.takes

    @property
    def sliced(self) -> bool:
        """Return whether a user may choose the number of slices of a microbatch."""
        return "slices" in self.takes

    @property
    def any_chunks(self) -> bool:
        """Return whether a user may choose the number of stages on a rank.

        For a searched schedule it is False, because the search chooses the number.
        """
        return self.chunks is None and not self.searched


PATTERNS: dict[str, Entry] = {
    "naive": Entry(
        naive,
        "loop",
        1,
        "one microbatch at a time; a rank computes 1/p of the time",
        dominated=True,
    ),
    # Huang et al. 2019, "GPipe".
    "gpipe": Entry(
        gpipe,
        "loop",
        1,
        "all forwards, then all backwards; bubble (p-1)(F+B+W), memory m",
        dominated=True,
    ),
    # Narayanan et al. 2020, "Memory-Efficient Pipeline-Parallel DNN Training" (PipeDream-Flush).
    "1f1b": Entry(
        one_f_one_b, "loop", 1, "backward as soon as possible; bubble (p-1)(F+B+W), memory p"
    ),
    # Narayanan et al. 2021, "Efficient Large-Scale Language Model Training", sec. 2.2.2.
    "interleaved": Entry(
        interleaved, "loop", None, "1F1B over v chunks; bubble (p-1)(F+B+W)/v, memory p + (p-1)/v"
    ),
    "interleaved-zb": Entry(
        interleaved_zb, "loop", None, "split; bubble (p-1)(F+B-W)/v, memory p", split=True
    ),
    # Lamy-Poirier 2022, "Breadth-First Pipeline Parallelism".
    "breadth-first": Entry(
        breadth_first,
        "loop",
        None,
        "chunk by chunk; bubble (p-1)(F+B+W)/v, memory m",
        dominated=True,
    ),
    # Wan et al. 2025, "PipeOffload".
    "group-interleaved": Entry(
        group_interleaved, "loop", None, "by groups of g < p; memory (p + (v-1) g) / v", split=True
    ),
    # Qi et al. 2023, "Zero Bubble Pipeline Parallelism", sec. 2; ZB-V is in sec. 6.
    "zb-h1": Entry(zb_h1, "loop", 1, "bubble (p-1)(F+B-W), memory p", split=True),
    "zb-h2": Entry(zb_h2, "loop", 1, "bubble (p-1)(F+B-2W), memory 2p-1", split=True),
    # Qi et al. 2024, "Pipeline Parallelism with Controllable Memory", also V-Half and V-Min.
    "1f1b-v": Entry(one_f_one_b_v, "v", 2, "1F1B on the V, whole backward; memory about 2p/3"),
    # Liu et al. 2023, "Hanayo: Harnessing Wave-like Pipeline Parallelism".
    "hanayo": Entry(
        hanayo, "wave", None, "waves down and up; bubble 2(p-1)F/v at F = BW, memory p"
    ),
    "zb-v": Entry(
        zb_v,
        "v",
        2,
        "no bubble at F = B = W, memory p",
        split=True,
        choices=lambda ranks, microbatches: ([zb_v(ranks, microbatches)], ranks),
    ),
    "v-half": Entry(
        v_half,
        "v",
        2,
        "memory (p+2)//2, below half of 1F1B's bubble at F = B = W",
        split=True,
        choices=v_half_patterns,
    ),
    "v-min": Entry(v_min, "v", 2, "memory (p+4)//3", split=True, choices=v_min_patterns),
    # Li and Hoefler 2021, "Chimera". Two copies of the model, so that ramps meet in the middle.
    "chimera": Entry(
        chimera, "mirror", 2, "1F1B both ways; bubble (p-2)F at F = BW, memory p", copies=2
    ),
    # DeepSeek-AI 2024, "DeepSeek-V3 Technical Report", sec. 3.2.1.
    "dualpipe": Entry(
        dualpipe,
        "mirror",
        2,
        "bubble (p/2-1)(F&B+B-2W) at F = B = W, memory p+1",
        split=True,
        copies=2,
        pairs=True,
    ),
    # Qi et al. 2025, "DualPipe could be better without the Dual".
    "dualpipe-v": Entry(
        dualpipe_v,
        "v",
        2,
        "bubble (p-1)/2 (F&B+B-2W) at F = B = W, memory p+1/2",
        split=True,
        pairs=True,
    ),
}

SLICED: dict[str, Entry] = {
    # Li et al. 2021, "TeraPipe", sec. 3.
    "terapipe": Entry(
        terapipe, "loop", 1, "GPipe in n slices of the sequence; bubble (p-1)(F+B+W)/n, memory m"
    ),
    # Sun et al. 2024, "Seq1F1B".
    "seq1f1b": Entry(
        seq1f1b, "loop", 1, "1F1B in n slices; bubble (p-1)(F+B+W)/n, memory 1 + (p-1)/n"
    ),
    # Li et al. 2025, "SlimPipe".
    "slimpipe": Entry(
        slimpipe,
        "loop",
        None,
        "interleaved in n slices; bubble (p-1)(F+B+W)/(v n), memory 1 + 2(p-1)/(v n)",
    ),
}
"""Schedules with microbatches in slices; transforms of whole microbatches refuse them."""


def fixed(
    ranks: int,
    microbatches: int,
    chunks: int,
    costs: Costs | None = None,
    placement: Placement | None = None,
) -> Iterator[Schedule]:
    """Yield every built-in schedule with one copy of the model that exists for these numbers.

    Schedules that are searched are left out. Tables are not verified, because the caller is a
    search, which makes dozens of them and simulates each anyway.

    Args:
        chunks: stages on each rank.
        costs: used to put W (weight gradient) where a rank would wait; None for the papers' tables.
        placement: yield only schedules with this placement; None for all.
    """
    arguments = ranks, microbatches, chunks, costs, placement
    # Large tables are yielded one by one, so that a search may stop and memory has one at a time.
    if ranks * microbatches * chunks < _KEPT:
        return iter(_fixed(*arguments))
    return _each(*arguments)


_KEPT = 4096
"""Tables of fewer forwards are cached: searches ask for the same small tables repeatedly."""


@lru_cache(maxsize=32)
def _fixed(*arguments: Any) -> tuple[Schedule, ...]:
    return tuple(_each(*arguments))


def _each(
    ranks: int, microbatches: int, chunks: int, costs: Costs | None, placement: Placement | None
) -> Iterator[Schedule]:
    for name, entry in PATTERNS.items():
        if entry.copies > 1 or entry.chunks not in (None, chunks):
            continue
        if placement not in (None, _shape(entry, ranks, chunks)):
            continue
        yield from one_of(name, ranks, microbatches, chunks, costs)


def one_of(
    name: str, ranks: int, microbatches: int, chunks: int, costs: Costs | None = None
) -> Iterator[Schedule]:
    """Yield the unverified table of a schedule, or nothing if there is none for these arguments.

    Args:
        name: name of a built-in schedule.
        chunks: stages on each rank.
        costs: used to put W (weight gradient) where a rank would wait; None for the paper's table.
    """
    with suppress(ScheduleError):
        yield made(name, PATTERNS[name], ranks, microbatches, chunks=chunks, costs=costs)


def _shape(entry: Entry, ranks: int, chunks: int) -> Placement:
    shapes = {
        "loop": loop(ranks, chunks),
        "v": vee(ranks),
        "wave": wave(ranks, max(1, chunks // 2)),
    }
    return shapes[entry.placement]


def check_size(name: str, ranks: int, microbatches: int, chunks: int) -> None:
    """Check that a table is small enough to be made. Raises: ScheduleError if it is not.

    Args:
        name: the schedule's name, for the error.
        chunks: stages on each rank.
    """
    stages = ranks * chunks
    cells = stages * microbatches
    # A typing error, such as a batch in tokens, would otherwise fill the memory of the machine.
    if cells > MOST_CELLS or stages > MOST_STAGES:
        raise ScheduleError(
            f"{name} for {ranks} ranks x {chunks} chunks and {microbatches} microbatches is a "
            f"table of {cells:,} forwards in {stages:,} stages; tables have at most "
            f"{MOST_CELLS:,} in {MOST_STAGES:,}."
        )


def make(
    name: str,
    entry: Entry,
    ranks: int,
    microbatches: int,
    *,
    chunks: int | None,
    costs: Costs | None,
    memory: float | None = None,
    **options: Any,
) -> Schedule:
    """Return the verified table of a built-in schedule.

    Args:
        name: the table's name, also in errors.
        entry: the description of the schedule.
        chunks: stages on each rank; None for the entry's default.
        costs: costs for a search, or for putting W where a rank would wait; None for the paper's
            table.
        memory: limit on a rank's activation, in the unit of the costs. None for no limit, or for a
            search the memory of 1F1B.
        options: further arguments of the generator.
    Raises: ScheduleError if there is no table for these numbers, or if it cannot run.
    """
    size = ranks, microbatches
    schedule = made(name, entry, *size, chunks=chunks, costs=costs, memory=memory, **options)
    verify(replace(schedule, name=name), memory=memory, costs=costs or UNIT)
    return schedule


def made(
    name: str,
    entry: Entry,
    ranks: int,
    microbatches: int,
    *,
    chunks: int | None,
    costs: Costs | None,
    memory: float | None = None,
    **options: Any,
) -> Schedule:
    """Return the table of a schedule, not verified yet.

    Args:
        name: the table's name, also in errors.
        entry: the description of the schedule.
        chunks, costs, memory: number of stages on each rank, costs and limit for the generator;
            None for its defaults.
        options: further arguments of the generator.
    Raises: ScheduleError if there is no table for these numbers.
    """
    check_size(name, ranks, microbatches, chunks or 1)
    if ranks < 1 or microbatches < 1:
        raise ScheduleError(
            f"{name} needs at least 1 rank and 1 microbatch, got {ranks} and {microbatches}."
        )
    # A generator has the arguments that it uses. What a user names and it lacks is an error; what
    # the caller always has, such as costs, is passed only to a generator that takes it.
    takes = entry.takes
    unknown = [option for option in options if option not in takes]
    if unknown:
        raise ScheduleError(f"{name} takes no option {', '.join(unknown)}.")
    if chunks is not None and "chunks" in takes:
        options["chunks"] = chunks
    elif chunks not in (None, 1, entry.chunks):
        raise ScheduleError(f"{name} has {entry.chunks} chunk(s) per rank, not {chunks}.")
    if "memory" in takes:
        options["memory"] = memory
    if "costs" in takes and (costs is not None or entry.placement == OWN):
        options["costs"] = costs or UNIT
    generate = partial(entry.generate, ranks, microbatches, **options)
    # A user's function may return anything, or raise. Its errors name the file and the numbers.
    if entry.placement == OWN:
        return own_schedule(name, generate, ranks, microbatches, options.get("chunks"))
    return generate()
