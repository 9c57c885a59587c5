"""ZB-V (Qi et al. 2023, "Zero Bubble Pipeline Parallelism", sec. 6): the split backward on the V."""

from __future__ import annotations

from megapipe.schedule.costs import Costs
from megapipe.schedule.generators.fit import shortest
from megapipe.schedule.generators.recorder import Recorder
from megapipe.schedule.generators.waves import vee
from megapipe.schedule.passes import Schedule


def zb_v(ranks: int, microbatches: int, costs: Costs | None = None) -> Schedule:
    """ZB-V: no bubble at F = B = W, at memory p as 1F1B: rank 0 holds both ends, so its first B follows F at once.

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
