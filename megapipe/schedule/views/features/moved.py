"""Lines on tables with offload, recomputation or sharded weights: what they save and cost."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace

from megapipe.errors import ScheduleError
from megapipe.notebook import aligned
from megapipe.schedule.costs import Costs
from megapipe.schedule.families import OFFLOAD, SHARDING
from megapipe.schedule.families.family import times
from megapipe.schedule.kinds import Kind, Made
from megapipe.schedule.passes import Schedule
from megapipe.schedule.simulate import Timeline, simulate
from megapipe.schedule.views.scene import short

_HEAD = ("rank", "held", "copied", "again", "peak", "without", "copies take", "again takes")
_SHARES = ("rank", "gathers", "sums", "whole at most", "peak", "they take")


def price_copies(costs: Costs, ratio: float) -> Costs:
    """Return costs in which each copy to or from the host takes `ratio` times a forward's time."""
    copy = times(ratio, costs.f)
    return replace(costs, o=copy, l=copy)


def describe_shards(made: Schedule, costs: Costs) -> list[str]:
    """Return lines on a table with sharded weights or gradients, one for each rank.

    A line has the number of gathers and reductions, the memory of gathered weights and gradients,
    the peak, and the time of the collectives.

    Args:
        made: the table with sharding.
    """
    before = simulate(made.without(SHARDING.kinds), costs)
    time = simulate(made, costs)
    # With all other memory at 0, what remains are gathered weights and gradients.
    own = replace(costs, **{f"mem_{letter}": 0.0 for letter in "bwsorkp"})
    whole = simulate(made, own).peak
    duration = costs.durations(made.placement)
    rows = [_SHARES]
    for rank, row in enumerate(made.ranks):
        beside = [x for step in row for x in step if x.kind in SHARDING.kinds]
        # Time on the stream of collectives. Only the makespans say how much of it delays passes.
        took = sum(duration[x.kind][x.stage] for x in beside)
        sums = sum(Made.SCATTERED in x.kind.traits.makes for x in beside)
        shown = map(short, (whole[rank], time.peak[rank], took))
        rows.append((str(rank), str(len(beside) - sums), str(sums), *shown))  # type: ignore[arg-type]
    return [
        "weights and gradients are whole for runs of passes: "
        f"the step takes {short(time.makespan)}, "
        f"where each rank keeps them {short(before.makespan)}",
        *aligned(rows),
    ]


def describe_moves(
    made: Schedule,
    costs: Costs,
    *,
    held: Callable[[float], str] = short,
    takes: Callable[[float], str] = short,
    also: Callable[[Timeline, Timeline], str] | None = None,
) -> list[str]:
    """Return lines on the offload and recomputation of each rank: the memory saved, and the time.

    Args:
        made: the table with offload or recomputation.
        held: returns the text of an amount of memory.
        takes: returns the text of a time.
        also: (timeline without offload and recomputation, timeline with them) -> the end of the
            first line. None: it ends with the makespan and memory without them.
    """
    # The same order without the moves: what it would take and hold.
    plain = made.without(OFFLOAD.kinds)
    before = simulate(plain, costs)
    now = simulate(made, costs)
    place = plain.placement
    # Slices differ in attention, so each part of a microbatch has durations of its own.
    duration = {
        part: costs.of_slice(made.cuts, part).durations(place) for part in (*made.parts, None)
    }
    rows = [_HEAD]
    verbs = {Kind.O: "copied to the host and back", Kind.R: "computed again"}
    total: Counter[Kind] = Counter()
    for rank, row in enumerate(made.ranks):
        passes = [x for step in row for x in step]
        count = Counter(x.kind for x in passes)
        total += count
        copies = 0.0
        again = 0.0
        for x in passes:
            time = duration[made.part(x)][x.kind][x.stage]
            if x.kind in (Kind.O, Kind.L):
                copies += time
            if x.kind is Kind.R:
                again += time
        # Each forward is in one of three columns: its activations stay, are copied, or recomputed.
        numbers = (count[Kind.F] - count[Kind.O] - count[Kind.R], count[Kind.O], count[Kind.R])
        peaks = map(held, (now.peak[rank], before.peak[rank]))
        times = map(takes, (copies, again))
        rows.append((str(rank), *map(str, numbers), *peaks, *times))  # type: ignore[arg-type]
    # A table of zeros would hide the one fact: there was nothing to move.
    if not any(total[kind] for kind in verbs):
        return [
            f"{made.name} holds everything: nothing has to leave, or no copy would be back in time"
        ]
    chosen = " and ".join(f"{total[kind]} {what}" for kind, what in verbs.items() if total[kind])
    if also is None:
        end = f"; without, {short(before.makespan)} at a memory of {short(max(before.peak))}"
    else:
        end = also(before, now)
    part = "microbatch"
    if made.cuts:
        part = "slice"
    return [
        f"of {total[Kind.F]} activations of a stage and {part} {chosen}{end}",
        *aligned(rows),
    ]


def refuse_unfinished(
    ratio: float | None, solved: bool, switch: int | None, memory: float | None
) -> None:
    """Check flags of the command `show` that need or exclude other flags.

    Args:
        ratio: the value of --copy-ratio; None if it is not given.
        solved: --solve is given.
        switch: the value of --switch, the number of ranks that share a PCIe switch; None if not
            given.
        memory: the value of --memory; None if it is not given.
    Raises: ScheduleError that names the missing flag, or the flags that exclude each other.
    """
    if ratio is None and (solved or switch):
        flag = "--switch"
        if solved:
            flag = "--solve"
        raise ScheduleError(
            f"{flag} is about copies: add --copy-ratio 0.5, the time of a copy as a share of F"
        )
    if solved and memory is None:
        raise ScheduleError(
            "--solve chooses at a memory limit: add --memory 4; 1F1B peaks at the number of ranks"
        )
    if solved and switch:
        raise ScheduleError(
            "--solve knows no streams that ranks share yet: leave out --switch, or --solve"
        )
