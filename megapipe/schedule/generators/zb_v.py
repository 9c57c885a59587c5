"""ZB-V (Qi et al. 2023, "Zero Bubble Pipeline Parallelism", sec. 6): a split backward on the V."""

from __future__ import annotations

from megapipe.schedule.core.fit import shortest
from megapipe.schedule.costs import Costs
from megapipe.schedule.generators.recorder import Recorder
from megapipe.schedule.passes import Schedule
from megapipe.schedule.placement import vee


def zb_v(ranks: int, microbatches: int, costs: Costs | None = None) -> Schedule:
    """Return ZB-V: no bubble at F = B = W, with p microbatches on a rank, as in 1F1B.

    Rank 0 has both ends of the model, so its first B follows the last F of its microbatch directly.
    The paper's order needs 2p-1 microbatches. With fewer, the passes of the missing ones are left
    out of that order. Here [i] is B and (i) is W of microbatch i, with a prime on the stage on the
    way up the V:

        rank 0  0   1   2   0' [0'](0') 1' [1'](1')[0] (0)  2' [2'](2')[1] (1) [2] (2)
        rank 1      0   0'  1   1' [0'](0') 2  [0] (0)  2' [1'](1')[1] [2'][2] (1) (2')(2)

    Args:
        costs: W (weight gradient) is put where a rank would wait under these costs, if that is
            faster. None returns the paper's table.
    """
    rows = []
    for rank in range(ranks):
        rec = Recorder()
        down = rank
        up = 2 * ranks - 1 - rank
        # An order of enough microbatches. The ones that the caller lacks are left out at the end.
        forwards = max(2 * ranks - 1, microbatches)
        # Warm-up: forwards down until the first microbatch comes up again.
        for _ in range(2 * (ranks - rank) - 1):
            rec.f(down)
        for _ in range(rank):
            rec.f(up)
            rec.f(down)
        for _ in range(ranks - rank):
            rec.f(up)
            rec.b(up)
            rec.w()
        # The stage down has run 2p-1-r forwards. The stage up has run p, and p-r backwards.
        for i in range(forwards - ranks):
            if 2 * ranks - 1 - rank + i < forwards:
                rec.f(down)
            rec.b(down)
            rec.w()
            rec.f(up)
            rec.b(up)
            rec.w()
        # Cool-down: B first, because other ranks wait for it; W fill the rest.
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
    if costs is None:
        return pattern
    # 1F1B's limit, p on every rank.
    return shortest([pattern], costs, ranks)
