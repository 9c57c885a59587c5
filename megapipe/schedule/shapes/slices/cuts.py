"""Cuts of a sequence into slices: equal lengths, or equal work of the three passes together.

A token attends to all before it, so the slices of equal work become shorter towards the end (Sun et al. 2024, Seq1F1B,
sec. 3.3). With x of the sequence done, and a of the work attention, a share (1 - a) x + a x^2 of it is done.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate, pairwise

from megapipe.errors import ScheduleError
from megapipe.schedule.costs import Costs, PerStage

CUTS, DOCUMENTS = ("equal", "work"), "documents"
"""Ways to cut; the last is of runs, which cut by work and then move each cut to a document's border."""


@dataclass(frozen=True)
class Cutting:
    """A way to cut sequences: in so many slices, how, of `CUTS`, and of how many documents of one length they are."""

    count: int
    how: str = "work"
    documents: int = 1

    @property
    def begins(self) -> tuple[tuple[int, ...], ...]:
        """The slices that begin a document, as a `Schedule` has them.

        Raises: ScheduleError if documents have no whole number of slices.
        """
        if self.count % self.documents:
            raise ScheduleError(
                f"{self.documents} documents of one length are not cut in {self.count} slices alike: take "
                f"{-(-self.count // self.documents) * self.documents} slices."
            )
        begins = range(0, self.count, self.count // self.documents)[1:]
        return (tuple(begins),) if begins else ()


MOST_SLICES = 64
"""Slices of a microbatch at most: messages between stages are numbered by 6 bits of them."""


def shares(count: int, how: str, costs: Costs, documents: int = 1) -> tuple[float, ...]:
    """Return the lengths of `count` slices, as shares of a sequence of so many documents of one length.

    Args:
        how: of `CUTS`.
    Raises: ScheduleError for more slices than MOST_SLICES.
    """
    if count > MOST_SLICES:
        raise ScheduleError(
            f"{count:,} slices of a microbatch: {MOST_SLICES} are the most. Use that, or fewer."
        )
    if how == "equal":
        return (1 / count,) * count
    if documents > 1:  # which each are as a sequence of which attention is a smaller part
        part = shares(count // documents, how, _shorter(costs, documents))
        return tuple(length / documents for length in part) * documents
    a = attention_of_all(costs)
    ends = [k / count for k in range(count + 1)]
    if a > 0:
        ends = [(math.sqrt((1 - a) ** 2 + 4 * a * done) - (1 - a)) / (2 * a) for done in ends]
    return tuple(end - begin for begin, end in pairwise(ends))


def _shorter(costs: Costs, times: int) -> Costs:
    """The costs of a sequence so many times as short, with attention's share of all passes alone."""
    a = attention_of_all(costs) / times
    share = a / (a + 1 - a * times)
    return Costs(attention_f=share, attention_b=share, attention_w=share)


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


@lru_cache(maxsize=64)  # all passes and messages of a microbatch ask for the same
def at_borders(
    lengths: tuple[int, ...], borders: tuple[int, ...], multiple: int = 1
) -> tuple[int, ...]:
    """Return slices cut where documents begin: each cut goes to the border next to it that is a multiple, if there is
    one that lies no further than half of the way to the cuts beside it."""
    ends = [0, *accumulate(lengths)]
    moved = [0]
    for before, at, behind in zip(ends, ends[1:], ends[2:], strict=False):
        near = [
            x for x in borders if 2 * x > before + at and 2 * x < at + behind and x % multiple == 0
        ]
        moved.append(min(near, key=lambda x: abs(x - at), default=at))
    return tuple(b - a for a, b in pairwise([*moved, ends[-1]]))


def _mean(value: PerStage) -> float:
    return sum(value) / len(value) if isinstance(value, tuple) else value
