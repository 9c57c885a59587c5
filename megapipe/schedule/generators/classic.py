"""The schedules with one stage on each rank: naive, GPipe, 1F1B, ZB-H1 and ZB-H2.

1F1B on 4 ranks at F = BW. A number is the forward of a microbatch, in brackets its backward:

    rank 0   0   1   2   3              [0]  4  [1]
    rank 1       0   1   2          [0]  3  [1]  4
    rank 2           0   1      [0]  2  [1]  3  [2]
    rank 3               0  [0]  1  [1]  2  [2]  3
"""

from __future__ import annotations

from megapipe.schedule.generators.turns import in_turns
from megapipe.schedule.passes import Schedule


def naive(ranks: int, microbatches: int) -> Schedule:
    """Return a table with one microbatch at a time in the whole model.

    Each of p ranks computes for 1/p of the time.
    """
    # Without a warm-up each forward is followed by its own backward.
    return in_turns("naive", ranks, [microbatches])


def gpipe(ranks: int, microbatches: int) -> Schedule:
    """Return GPipe (Huang et al. 2019, figure 2c): all forwards, then all backwards.

    With p ranks and m microbatches the bubble is (p-1)/(m+p-1) of the time. A rank holds the
    activations of m microbatches.
    """
    # Every rank runs all its forwards in the warm-up, so every rank holds m.
    return in_turns("gpipe", ranks, [microbatches], ahead=microbatches)


def one_f_one_b(ranks: int, microbatches: int) -> Schedule:
    """Return 1F1B (Narayanan et al. 2019; PipeDream-Flush, 2021): each backward as soon as it can.

    Rank r of p runs p-1-r forwards, then a forward and a backward in turns, then the other
    backwards. The bubble is (p-1)(F+B+W). Rank 0 holds p microbatches.
    """
    # A forward more for each later rank: its first gradient takes that much longer to come back.
    return in_turns("1f1b", ranks, [microbatches], slope=1)


def zb_h1(ranks: int, microbatches: int) -> Schedule:
    """Return ZB-H1 (Qi et al. 2023, "Zero Bubble Pipeline Parallelism", sec. 2.1, figure 3).

    W runs at a moment in which its rank would otherwise wait. The bubble is (p-1)(F+B-W). Each rank
    holds p microbatches, as rank 0 of 1F1B. Here [i] is B and (i) is W of microbatch i:

        rank 0  0   1   2          [0] (0)  3  [1] (1)  4  [2] (2) [3] (3) [4] (4)
        rank 1      0   1      [0]  2  [1] (0)  3  [2] (1)  4  [3] (2) [4] (3) (4)
        rank 2          0  [0]  1  [1]  2  [2] (0)  3  [3] (1)  4  [4] (2) (3) (4)
    """
    # Rank r has r forwards fewer in flight than rank 0. With r pending W it holds p as well.
    return in_turns("zb-h1", ranks, [microbatches], slope=1, lag=1)


def zb_h2(ranks: int, microbatches: int) -> Schedule:
    """Return ZB-H2: ZB-H1 with a warm-up twice as deep (Qi et al. 2023, sec. 2.2, figure 3).

    The bubble is (p-1)(F+B-2W), so 0 at F = B = W. A rank holds 2p-1 microbatches, where 1F1B holds
    p. Here [i] is B and (i) is W of microbatch i:

        rank 0  0   1   2   3   4  [0] (0) [1] (1) [2] (2) [3] (3) [4] (4)
        rank 1      0   1   2  [0]  3  [1]  4  [2] (0) [3] (1) [4] (2) (3) (4)
        rank 2          0  [0]  1  [1]  2  [2]  3  [3]  4  [4] (0) (1) (2) (3) (4)
    """
    # 2 (p-1-r) forwards fill the wait for the first gradient, 2r pending W the end of the row.
    return in_turns("zb-h2", ranks, [microbatches], slope=2, lag=2)
