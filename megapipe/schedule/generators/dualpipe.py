"""Two streams of microbatches in opposite directions, each one's forward overlapped with the other's backward.

DualPipe (DeepSeek-V3 report, sec. 3.2.1) runs them through two copies of the model. Cut in half (Qi et al. 2025,
"DualPipe could be better without the Dual") one copy folded to a V is enough: the stream that comes down meets itself
going up. Both are one order of eight sections; what differs is the number of ranks that share a fold.
"""

from __future__ import annotations

from megapipe.errors import ScheduleError
from megapipe.schedule.generators.recorder import Recorder
from megapipe.schedule.generators.waves import mirror, vee
from megapipe.schedule.passes import Schedule, Step


def dualpipe(ranks: int, microbatches: int) -> Schedule:
    """DualPipe: bubble (p/2-1)(F&B+B-2W) at F = B = W, memory p+1, two copies of the parameters.

    Half of the microbatches go each way.
    """
    if ranks % 2:
        raise ScheduleError(
            f"dualpipe needs an even number of ranks, got {ranks}; the nearest is {ranks + 1}."
        )
    if microbatches % 2 or microbatches < 2 * ranks:
        nearest = max(2 * ranks, microbatches + 1)
        raise ScheduleError(
            f"dualpipe on {ranks} ranks needs an even number of at least {2 * ranks} microbatches, got {microbatches}; "
            f"the nearest is {nearest}."
        )
    half = microbatches // 2
    rows = []
    for rank in range(ranks):
        near, far = rank, 2 * ranks - 1 - rank
        depth = min(rank, ranks - 1 - rank)
        if rank >= ranks // 2:
            near, far = far, near
        first = {stage: half * (stage // ranks) for stage in (near, far)}
        rows.append(_eight_sections(near, far, ranks // 2, depth, half - ranks + depth + 1, first))
    return Schedule("dualpipe", mirror(ranks), microbatches, tuple(rows))


def dualpipe_v(ranks: int, microbatches: int) -> Schedule:
    """DualPipe cut in half: bubble (p-1)/2 (F&B+B-2W) at F = B = W, memory p+1/2, one copy, twice the messages."""
    if microbatches < 2 * ranks:
        raise ScheduleError(
            f"dualpipe-v on {ranks} ranks needs at least {2 * ranks} microbatches, got {microbatches}; "
            f"the nearest is {2 * ranks}."
        )
    rows = [
        _eight_sections(
            rank, 2 * ranks - 1 - rank, ranks, rank, microbatches - 2 * ranks + rank + 1, {}
        )
        for rank in range(ranks)
    ]
    return Schedule("dualpipe-v", vee(ranks), microbatches, tuple(rows))


def _eight_sections(
    s0: int, s1: int, fold: int, depth: int, main: int, first: dict[int, int]
) -> tuple[Step, ...]:
    """One rank's order.

    Args:
        s0: the stage whose stream enters on this side; s1: the stage of the other stream.
        fold: ranks between the entry and the fold; depth: how many of them lie before this one.
        main: rounds of the overlapped section.
        first: first microbatch of each stage.
    """
    rec = Recorder(first)
    behind = fold - depth - 1
    for _ in range(2 * behind):  # 1  F0
        rec.f(s0)
    for _ in range(depth + 1):  # 2  F0 F1
        rec.f(s0)
        rec.f(s1)
    for _ in range(behind):  # 3  B1 W F1
        rec.b(s1)
        rec.w()
        rec.f(s1)
    for i in range(main):  # 4  F0&B1 F1&B0
        if i == 0 and behind == 0:
            # Next to the fold B1 is not there yet: F0 need not wait for it.
            rec.f(s0)
            rec.bw(s1)
        else:
            rec.f_bw(s0, s1)
        rec.f_bw(s1, s0)
    for _ in range(behind):  # 5  B1 F1&B0
        rec.bw(s1)
        rec.f_bw(s1, s0)
    for i in range(2 * (depth + 1)):  # 6  B1 B0, split in the second half
        backward = rec.bw if i <= depth else rec.b
        backward(s0 if i % 2 else s1)
    for _ in range(behind):  # 7  W B0
        rec.w()
        rec.b(s0)
    rec.pay()  # 8  W
    return tuple(rec.steps)
