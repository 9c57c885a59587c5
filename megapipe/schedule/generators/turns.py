"""One order for a loop: after a warm-up, a forward and a backward take turns. Naive, GPipe, 1F1B and ZB-H, and those of
several chunks, differ in how long the warm-up is, and in when the weight gradients of a split backward are paid.
"""

from __future__ import annotations

from itertools import zip_longest

from megapipe.schedule.generators.recorder import Recorder
from megapipe.schedule.generators.waves import loop
from megapipe.schedule.passes import Schedule


def in_turns(
    name: str,
    ranks: int,
    groups: list[int],
    chunks: int = 1,
    *,
    ahead: int = 0,
    slope: int = 0,
    lag: int | None = None,
) -> Schedule:
    """The table of a loop.

    Args:
        groups: sizes of the groups of microbatches, each of which passes one chunk after the other.
        ahead: forwards before the first turn on the last rank; slope: how many more on each rank before it.
        lag: split the backward, and pay the oldest W once so many are owed for each rank before this one; None: leave
            it whole.
    """
    rows = []
    for rank in range(ranks):
        rec = Recorder()
        down, up = (
            [chunk * ranks + rank for size in groups for chunk in order for _ in range(size)]
            for order in (range(chunks), range(chunks)[::-1])
        )
        warmup = ahead + slope * (ranks - 1 - rank)
        for stage in down[:warmup]:
            rec.f(stage)
        for forward, backward in zip_longest(down[warmup:], up):
            if forward is not None:
                rec.f(forward)
            if lag is None:
                rec.bw(backward)
                continue
            rec.b(backward)
            if len(rec.owed) > lag * rank:
                rec.w()
        rec.pay()
        rows.append(tuple(rec.steps))
    return Schedule(name, loop(ranks, chunks), sum(groups), tuple(rows))
