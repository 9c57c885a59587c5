"""DualPipe and DualPipeV: two streams of microbatches in opposite directions.

The forward of one stream overlaps with the backward of the other. DualPipe (DeepSeek-V3 report,
sec. 3.2.1) runs the streams through two copies of the model. "DualPipe could be better without the
Dual" (Qi et al. 2025) cuts it in half: one copy on the V is enough, because the stream down meets
itself going up. Both are one order of eight sections. They differ in the number of ranks between
the ends of the model and the fold, where a stream passes to the other direction.
"""

from __future__ import annotations

from megapipe.errors import ScheduleError
from megapipe.schedule.generators.recorder import Recorder
from megapipe.schedule.passes import Schedule, Step
from megapipe.schedule.placement import mirror, vee


def dualpipe(ranks: int, microbatches: int) -> Schedule:
    """Return DualPipe: bubble (p/2-1)(F&B+B-2W) at F = B = W, with p+1 microbatches on a rank.

    F&B is the time of a forward overlapped with a fused backward; B and W are an input and a weight
    gradient alone. There are two copies of the parameters, and half of the microbatches run in each
    direction.

    Raises: ScheduleError for an odd number of ranks or microbatches, or too few microbatches.
    """
    if ranks % 2:
        raise ScheduleError(
            f"dualpipe needs an even number of ranks, got {ranks}; the nearest is {ranks + 1}."
        )
    if microbatches % 2 or microbatches < 2 * ranks:
        nearest = max(2 * ranks, microbatches + 1)
        raise ScheduleError(
            f"dualpipe on {ranks} ranks needs an even number of at least {2 * ranks} microbatches, "
            f"got {microbatches}; the nearest is {nearest}."
        )
    half = microbatches // 2
    rows = []
    for rank in range(ranks):
        near = rank
        far = 2 * ranks - 1 - rank
        depth = min(rank, ranks - 1 - rank)
        # The second half of the ranks is the mirror of the first: its stream enters at the end.
        if rank >= ranks // 2:
            near, far = far, near
        # The second chain carries the second half of the microbatches.
        first = {stage: half * (stage // ranks) for stage in (near, far)}
        rows.append(_eight_sections(near, far, ranks // 2, depth, half - ranks + depth + 1, first))
    return Schedule("dualpipe", mirror(ranks), microbatches, tuple(rows))


def dualpipe_v(ranks: int, microbatches: int) -> Schedule:
    """Return DualPipeV: bubble (p-1)/2 (F&B+B-2W) at F = B = W, with p+1/2 microbatches on a rank.

    F&B is the time of a forward overlapped with a fused backward; B and W are an input and a weight
    gradient alone. There is one copy of the parameters, and a rank sends twice the messages of
    DualPipe.

    Raises: ScheduleError for too few microbatches.
    """
    if microbatches < 2 * ranks:
        raise ScheduleError(
            f"dualpipe-v on {ranks} ranks needs at least {2 * ranks} microbatches, "
            f"got {microbatches}; the nearest is {2 * ranks}."
        )
    rows = []
    for rank in range(ranks):
        # As in DualPipe, with m in place of m/2 for each stream, and p ranks to the fold, not p/2.
        main = microbatches - 2 * ranks + rank + 1
        rows.append(_eight_sections(rank, 2 * ranks - 1 - rank, ranks, rank, main, {}))
    return Schedule("dualpipe-v", vee(ranks), microbatches, tuple(rows))


def _eight_sections(
    s0: int, s1: int, fold: int, depth: int, main: int, first: dict[int, int]
) -> tuple[Step, ...]:
    """Return one rank's steps, in the eight sections of figure 5 of the DeepSeek-V3 report.

    Args:
        s0: the rank's stage for the microbatches that enter the pipeline on its side.
        s1: the rank's stage for microbatches that go in the opposite direction.
        fold: number of ranks from the side where microbatches of s0 enter to where both directions
            meet: p/2 in DualPipe, p in DualPipeV.
        depth: how many of these `fold` ranks come before this rank.
        main: number of rounds of section 4, in which F and B overlap. This section runs all
            remaining forwards of s0.
        first: {stage: number of its first microbatch}; 0 for a stage that is not in it.
    """
    # The sections of rank 0 for DualPipeV on 2 ranks, with 4 microbatches. [i] is a backward, (i)
    # its W, and a prime marks s1:
    #
    #     1     2      3               4               5               6         7         8
    #     0 1   2 0'   [0'] (0') 1'   3&[1'] 2'&[0]   [2'] 3'&[1]     [3'] [2]  (2) [3]   (3)
    rec = Recorder(first)
    after = fold - depth - 1  # ranks between this one and the fold
    for _ in range(2 * after):  # 1  F0
        rec.f(s0)
    for _ in range(depth + 1):  # 2  F0 F1
        rec.f(s0)
        rec.f(s1)
    # No forward is there to overlap with. The backward is split, so the gradient leaves sooner.
    for _ in range(after):  # 3  B1 W F1
        rec.b(s1)
        rec.w()
        rec.f(s1)
    for i in range(main):  # 4  F0&B1 F1&B0
        if i == 0 and after == 0:
            # At the fold the first B1 has not arrived yet, and F0 need not wait for it.
            rec.f(s0)
            rec.bw(s1)
        else:
            rec.f_bw(s0, s1)
        rec.f_bw(s1, s0)
    for _ in range(after):  # 5  B1 F1&B0
        rec.bw(s1)
        rec.f_bw(s1, s0)
    # No forward is left. The later backwards are split too, and their W fill sections 7 and 8.
    for i in range(2 * (depth + 1)):  # 6  B1 B0, split in the second half
        backward = rec.bw if i <= depth else rec.b
        backward(s0 if i % 2 else s1)
    for _ in range(after):  # 7  W B0
        rec.w()
        rec.b(s0)
    rec.pay()  # 8  W
    return tuple(rec.steps)
