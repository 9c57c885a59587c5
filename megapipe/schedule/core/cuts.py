"""Where to cut a sequence into slices: equal lengths, or equal work of F, B and W together.

A token attends to all tokens before it, so slices of equal work become shorter towards the end (Sun
et al. 2024, Seq1F1B, sec. 3.3). If attention is a share a of the work, the first x of the sequence
takes the share (1 - a) x + a x^2 of it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate, pairwise

from megapipe.errors import ScheduleError
from megapipe.schedule.costs import Costs
from megapipe.schedule.families.family import mean

CUTS = ("equal", "work")
"""Ways to cut. Runs also have "documents": cut by work, then move cuts to borders of documents."""


@dataclass(frozen=True)
class Cutting:
    """A way to cut sequences into slices. `begins` returns the slices that begin a document.

    Attributes:
        count: number of slices.
        how: "equal" for slices of equal length, "work" for slices of equal compute time.
        documents: number of documents in a sequence, all of one length.
    """

    count: int
    how: str = "work"
    documents: int = 1

    @property
    def begins(self) -> tuple[tuple[int, ...], ...]:
        """Return the slices, other than slice 0, that begin a document, as in `Schedule.documents`.

        The result is ((2, 4),) for 6 slices of 3 documents, one row that counts for all
        microbatches, and () for one document.

        Raises: ScheduleError if a document has no whole number of slices.
        """
        if self.count % self.documents:
            more = -(-self.count // self.documents) * self.documents
            raise ScheduleError(
                f"{self.documents} documents of one length cannot share {self.count} slices "
                f"equally: take {more} slices."
            )
        # Slice 0 begins a document anyway.
        begins = range(0, self.count, self.count // self.documents)[1:]
        if not begins:
            return ()
        return (tuple(begins),)


MOST_SLICES = 64
"""Most slices of a microbatch: messages between stages have 6 bits for the number of a slice."""


def shares(count: int, how: str, costs: Costs, documents: int = 1) -> tuple[float, ...]:
    """Return the lengths of `count` slices as shares of the sequence.

    Args:
        how: "equal" for slices of equal length, "work" for slices of equal compute time.
        costs: for "work", these say which part of the time is attention.
        documents: number of documents in the sequence, all of one length.
    Raises: ScheduleError for more slices than MOST_SLICES.
    """
    if count > MOST_SLICES:
        raise ScheduleError(
            f"{count:,} slices of a microbatch: {MOST_SLICES} are the most. Use that, or fewer."
        )
    if how == "equal":
        return (1 / count,) * count
    # A document is a shorter sequence, so attention is a smaller share of its work.
    if documents > 1:
        part = shares(count // documents, how, _shorter(costs, documents))
        return tuple(length / documents for length in part) * documents
    a = attention_of_all(costs)
    # Each slice has the same share of the work, so slice k ends where k / count of it is done.
    ends = [k / count for k in range(count + 1)]
    if a > 0:
        # Solve (1 - a) x + a x^2 = done for x.
        ends = [(math.sqrt((1 - a) ** 2 + 4 * a * done) - (1 - a)) / (2 * a) for done in ends]
    return tuple(end - begin for begin, end in pairwise(ends))


def _shorter(costs: Costs, times: int) -> Costs:
    """Return costs with attention's share of the time as in a shorter sequence.

    Only attention_f, attention_b and attention_w are set in them; all other fields have defaults.

    Args:
        times: the shorter sequence has 1/times of the length.
    """
    # A token attends to 1 / times as many tokens. All other work of a token stays.
    a = attention_of_all(costs) / times
    share = a / (a + 1 - a * times)
    return Costs(attention_f=share, attention_b=share, attention_w=share)


def attention_of_all(costs: Costs) -> float:
    """Return attention's share of the time of F, B and W together, from 0 to 1.

    The shares of F, B and W differ, but one cut serves all three.
    """
    times = [mean(getattr(costs, name)) for name in ("f", "b", "w")]
    parts = [mean(getattr(costs, f"attention_{name}")) for name in ("f", "b", "w")]
    return sum(t * a for t, a in zip(times, parts, strict=True)) / (sum(times) or 1.0)


def in_tokens(wanted: tuple[float, ...], length: int, multiple: int = 1) -> tuple[int, ...]:
    """Return lengths of slices in tokens, as near as possible to the wanted ones.

    Args:
        wanted: lengths in any unit.
        length: tokens of the sequence.
        multiple: number of ranks that share each slice. The length of a slice is a multiple of it.
    Raises: ScheduleError if a slice would be empty, or `length` is no multiple of `multiple`.
    """
    count = len(wanted)
    if length % multiple or length < count * multiple:
        raise ScheduleError(
            f"{count} slices of {length} tokens, each a multiple of {multiple}, cannot be: "
            f"the length must be a multiple of {multiple} and at least {count * multiple}."
        )
    pieces = length // multiple
    whole = sum(wanted)
    ends = [0]
    for k in range(1, count + 1):
        # The end is rounded, not the length: errors of the lengths would add up.
        nearest = round(sum(wanted[:k]) / whole * pieces)
        # At least one piece for this slice, and one for each later slice.
        ends.append(min(max(nearest, ends[-1] + 1), pieces - (count - k)))
    return tuple((end - begin) * multiple for begin, end in pairwise(ends))


@lru_cache(maxsize=64)  # all passes and messages of a microbatch ask for the same lengths
def at_borders(
    lengths: tuple[int, ...], borders: tuple[int, ...], multiple: int
) -> tuple[int, ...]:
    """Return the tokens of each slice after moving cuts to the borders of documents.

    A cut moves to the nearest border that is a multiple of `multiple`. A cut moves at most half of
    the way to the next cut on either side. If there is no such border, the cut stays.

    Args:
        lengths: tokens of each slice before.
        borders: tokens at which documents begin.
        multiple: number of ranks that share each slice. The length of a slice is a multiple of it.
    """
    ends = [0, *accumulate(lengths)]
    moved = [0]
    for before, at, after in zip(ends, ends[1:], ends[2:], strict=False):
        # Two cuts move by less than half of the way between them, so no slice is empty.
        between = [x for x in borders if before + at < 2 * x < at + after]
        near = [x for x in between if x % multiple == 0]
        moved.append(min(near, key=lambda x: abs(x - at), default=at))
    return tuple(b - a for a, b in pairwise([*moved, ends[-1]]))
