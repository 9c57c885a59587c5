"""One order for loops of stages: a warm-up of forwards, then a forward and a backward in turns.

Naive, GPipe, 1F1B, ZB-H1, ZB-H2 and the interleaved schedules are such orders. They differ in the
length of the warm-up and in when the weight gradients of a split backward run.
"""

from __future__ import annotations

from itertools import zip_longest

from megapipe.schedule.generators.recorder import Recorder
from megapipe.schedule.passes import Schedule
from megapipe.schedule.placement import loop


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
    """Return a table with a warm-up of forwards, then a forward and a backward in turns.

    Stages are on the ranks round-robin: stage s is on rank s modulo the number of ranks.

    Args:
        name: name of the table.
        groups: sizes of the groups of microbatches. A group goes through a rank's first chunk, then
            through its next one.
        chunks: stages on each rank.
        ahead: number of warm-up forwards on the last rank. After the warm-up of a rank come one
            more forward, if any is left, and the first backward.
        slope: number of warm-up forwards that each rank has more than the next rank. Rank r of p
            has ahead + slope * (p-1-r) of them.
        lag: splits the backward into B and W. After a B, rank r runs its oldest W if more than lag
            * r W are pending. None keeps the backward fused.
    """
    rows = []
    for rank in range(ranks):
        rec = Recorder()
        # The stage of each forward and of each backward. Backwards begin with the last chunk.
        down = []
        up = []
        for size in groups:
            for chunk in range(chunks):
                down += [chunk * ranks + rank] * size
                up += [(chunks - 1 - chunk) * ranks + rank] * size
        # Earlier ranks wait longer for their first gradient, so they run more forwards before it.
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
            # Later ranks defer more W, which fill their waits at the end of the table.
            if len(rec.owed) > lag * rank:
                rec.w()
        rec.pay()
        rows.append(tuple(rec.steps))
    return Schedule(name, loop(ranks, chunks), sum(groups), tuple(rows))
