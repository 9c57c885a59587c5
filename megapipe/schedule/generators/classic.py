"""The schedules of one stage a rank: naive, GPipe, 1F1B, these in slices, and with a split backward ZB-H1 and ZB-H2."""

from __future__ import annotations

from megapipe.schedule.generators.turns import in_turns
from megapipe.schedule.passes import Schedule
from megapipe.schedule.shapes.slices.slices import of_one_length


def naive(ranks: int, microbatches: int) -> Schedule:
    """One microbatch at a time through the whole model: a rank computes 1/p of the time."""
    return in_turns("naive", ranks, [microbatches])


def gpipe(ranks: int, microbatches: int) -> Schedule:
    """All forwards, then all backwards (Huang et al. 2019): (p-1)/(m+p-1) of the time is bubble; memory m."""
    return in_turns("gpipe", ranks, [microbatches], ahead=microbatches)


def one_f_one_b(ranks: int, microbatches: int) -> Schedule:
    """Each backward as soon as it can (Narayanan et al. 2019, PipeDream-Flush 2021): bubble (p-1)(F+B+W), memory p."""
    return in_turns("1f1b", ranks, [microbatches], slope=1)


def terapipe(ranks: int, microbatches: int, slices: int = 4) -> Schedule:
    """GPipe with microbatches in slices of their sequences (Li et al. 2021): bubble (p-1)(F+B+W)/n, memory m."""
    return of_one_length("terapipe", lambda count: gpipe(ranks, count), microbatches, slices)


def seq1f1b(ranks: int, microbatches: int, slices: int = 4) -> Schedule:
    """1F1B with microbatches in slices (Sun et al. 2024): bubble (p-1)(F+B+W)/n, memory 1 + (p-1)/n."""
    return of_one_length("seq1f1b", lambda count: one_f_one_b(ranks, count), microbatches, slices)


def zb_h1(ranks: int, microbatches: int) -> Schedule:
    """Bubble (p-1)(F+B-W) at the memory of 1F1B, p, on every rank: W waits for a moment in which the rank would have
    nothing to do (Qi et al. 2023, "Zero Bubble Pipeline Parallelism", sec. 2)."""
    return in_turns("zb-h1", ranks, [microbatches], slope=1, lag=1)


def zb_h2(ranks: int, microbatches: int) -> Schedule:
    """ZB-H1 with a warm-up twice as deep: bubble (p-1)(F+B-2W), none at F = B = W, memory 2p-1, almost twice."""
    return in_turns("zb-h2", ranks, [microbatches], slope=2, lag=2)
