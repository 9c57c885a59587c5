"""Schedules that split the backward: the weight gradient waits for a moment in which the rank would have nothing to do.

Qi et al. 2023, "Zero Bubble Pipeline Parallelism": ZB-H1 and ZB-H2 (sec. 2), ZB-V (sec. 6).
"""

from __future__ import annotations

from megapipe.schedule.costs import Costs
from megapipe.schedule.generators.fit import shortest
from megapipe.schedule.generators.recorder import Recorder
from megapipe.schedule.passes import Schedule, loop, vee


def zb_h1(ranks: int, microbatches: int) -> Schedule:
    """Bubble (p-1)(F+B-W) at the memory of 1F1B, p, on every rank."""
    return _handcrafted("zb-h1", ranks, microbatches, depth=1)


def zb_h2(ranks: int, microbatches: int) -> Schedule:
    """Bubble (p-1)(F+B-2W), none at F = B = W, at almost twice the memory, 2p-1."""
    return _handcrafted("zb-h2", ranks, microbatches, depth=2)


def _handcrafted(name: str, ranks: int, microbatches: int, depth: int) -> Schedule:
    """Warm up `depth` times as deep as 1F1B, and owe `depth` weight gradients for each rank before this one."""
    rows = []
    for rank in range(ranks):
        rec = Recorder()
        warmup = min(depth * (ranks - rank) - (depth - 1), microbatches)
        for _ in range(warmup):
            rec.f(rank)
        for i in range(microbatches):
            rec.b(rank)
            if len(rec.owed) > depth * rank:
                rec.w()
            if warmup + i < microbatches:
                rec.f(rank)
        rec.pay()
        rows.append(tuple(rec.steps))
    return Schedule(name, loop(ranks), microbatches, tuple(rows))


def zb_v(ranks: int, microbatches: int, costs: Costs | None = None) -> Schedule:
    """No bubble at F = B = W, at memory p as 1F1B: rank 0 holds both ends, so that its first B follows F at once.

    The order is made for at least 2p-1 microbatches; with fewer, those that do not exist are left out.

    Args:
        costs: W are refilled where that is shorter under them; None: the paper's table as it is.
    """
    rows = []
    for rank in range(ranks):
        rec = Recorder()
        down, up = rank, 2 * ranks - 1 - rank
        forwards = max(2 * ranks - 1, microbatches)
        for _ in range(2 * (ranks - rank) - 1):
            rec.f(down)
        for _ in range(rank):
            rec.f(up)
            rec.f(down)
        for _ in range(ranks - rank):
            rec.f(up)
            rec.b(up)
            rec.w()
        # The down stage has run 2p-1-r forwards; the up stage p, of which it has finished p-r.
        for i in range(forwards - ranks):
            if 2 * ranks - 1 - rank + i < forwards:
                rec.f(down)
            rec.b(down)
            rec.w()
            rec.f(up)
            rec.b(up)
            rec.w()
        for _ in range(rank):
            rec.b(down)
            rec.b(up)
        for _ in range(ranks - rank):
            rec.b(down)
            rec.w(down)
        for _ in range(rank):
            rec.w(up)
        for _ in range(rank):
            rec.w(down)
        rows.append(tuple(step for step in rec.steps if step[0].microbatch < microbatches))
    pattern = Schedule("zb-v", vee(ranks), microbatches, tuple(rows))
    return pattern if costs is None else shortest([pattern], costs, ranks)
