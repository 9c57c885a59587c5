"""The schedules of one stage a rank: naive, GPipe, 1F1B, and with a split backward ZB-H1 and ZB-H2."""

from __future__ import annotations

from megapipe.schedule.generators.turns import in_turns
from megapipe.schedule.passes import Schedule


def naive(ranks: int, microbatches: int) -> Schedule:
    """One microbatch at a time through the whole model: a rank computes 1/p of the time."""
    return in_turns("naive", ranks, [microbatches])


def gpipe(ranks: int, microbatches: int) -> Schedule:
    """All forwards, then all backwards (Huang et al. 2019): (p-1)/(m+p-1) of the time is bubble; memory m."""
    return in_turns("gpipe", ranks, [microbatches], ahead=microbatches)


def one_f_one_b(ranks: int, microbatches: int) -> Schedule:
    """Each backward as soon as it can (Narayanan et al. 2019, PipeDream-Flush 2021): bubble (p-1)(F+B+W), memory p."""
    return in_turns("1f1b", ranks, [microbatches], slope=1)


def zb_h1(ranks: int, microbatches: int) -> Schedule:
    """Bubble (p-1)(F+B-W) at the memory of 1F1B, p, on every rank: W waits for a moment in which the rank would have
    nothing to do (Qi et al. 2023, "Zero Bubble Pipeline Parallelism", sec. 2)."""
    return in_turns("zb-h1", ranks, [microbatches], slope=1, lag=1)


def zb_h2(ranks: int, microbatches: int) -> Schedule:
    """ZB-H1 with a warm-up twice as deep: bubble (p-1)(F+B-2W), none at F = B = W, memory 2p-1, almost twice."""
    return in_turns("zb-h2", ranks, [microbatches], slope=2, lag=2)
