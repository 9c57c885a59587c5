"""Cuts of a sequence into slices: equal lengths, or equal work of the three passes together.

A token attends to all before it, so the slices of equal work become shorter towards the end (Sun et al. 2024, Seq1F1B,
sec. 3.3). With x of the sequence done, and a of the work attention, a share (1 - a) x + a x^2 of it is done.
"""

from __future__ import annotations

import math
from itertools import pairwise

from megapipe.errors import ScheduleError
from megapipe.schedule.costs import Costs, PerStage

CUTS = ("equal", "work")


def shares(count: int, how: str, costs: Costs) -> tuple[float, ...]:
    """Lengths of so many slices, as shares of the sequence. how: of `CUTS`."""
    if how == "equal":
        return (1 / count,) * count
    a = attention_of_all(costs)
    ends = [k / count for k in range(count + 1)]
    if a > 0:
        ends = [(math.sqrt((1 - a) ** 2 + 4 * a * done) - (1 - a)) / (2 * a) for done in ends]
    return tuple(end - begin for begin, end in pairwise(ends))


def attention_of_all(costs: Costs) -> float:
    """Attention's share of F, B and W together: one cut serves all three, whose shares differ."""
    times = [_mean(getattr(costs, name)) for name in ("f", "b", "w")]
    parts = [_mean(getattr(costs, f"attention_{name}")) for name in ("f", "b", "w")]
    return sum(t * a for t, a in zip(times, parts, strict=True)) / (sum(times) or 1.0)


def in_tokens(wanted: tuple[float, ...], length: int, multiple: int = 1) -> tuple[int, ...]:
    """Lengths of slices in tokens, each a multiple of what ranks share a slice among, as near as can be.

    Raises: ScheduleError where slices would be empty, or the length is no multiple.
    """
    count = len(wanted)
    if length % multiple or length < count * multiple:
        raise ScheduleError(
            f"{count} slices of {length} tokens, each a multiple of {multiple}, cannot be: the length must be a "
            f"multiple of {multiple} and at least {count * multiple}."
        )
    pieces, whole = length // multiple, sum(wanted)
    ends = [0]
    for k in range(1, count + 1):
        nearest = round(sum(wanted[:k]) / whole * pieces)
        # One piece at least for this slice, and for each behind it.
        ends.append(min(max(nearest, ends[-1] + 1), pieces - (count - k)))
    return tuple((end - begin) * multiple for begin, end in pairwise(ends))


def _mean(value: PerStage) -> float:
    return sum(value) / len(value) if isinstance(value, tuple) else value
