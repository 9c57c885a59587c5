"""The schedules that cut microbatches in slices: TeraPipe, Seq1F1B, SlimPipe."""

from __future__ import annotations

from megapipe.errors import ScheduleError
from megapipe.schedule.generators.classic import gpipe, one_f_one_b
from megapipe.schedule.generators.interleaved import interleaved
from megapipe.schedule.passes import Schedule
from megapipe.schedule.shapes.slices.slices import of_one_length


def terapipe(ranks: int, microbatches: int, slices: int = 4) -> Schedule:
    """GPipe with microbatches in slices of their sequences (Li et al. 2021): bubble (p-1)(F+B+W)/n, memory m."""
    return of_one_length("terapipe", lambda count: gpipe(ranks, count), microbatches, slices)


def seq1f1b(ranks: int, microbatches: int, slices: int = 4) -> Schedule:
    """1F1B with microbatches in slices (Sun et al. 2024): bubble (p-1)(F+B+W)/n, memory 1 + (p-1)/n."""
    return of_one_length("seq1f1b", lambda count: one_f_one_b(ranks, count), microbatches, slices)


def slimpipe(ranks: int, microbatches: int, chunks: int = 2, slices: int | None = None) -> Schedule:
    """Interleaved 1F1B with microbatches in slices of one length (Li et al. 2025): a rank holds one microbatch and
    2 (p-1) / (v n) of another, bubble (p-1)(F+B+W)/(v n).

    Args:
        slices: of a microbatch, a multiple of the ranks; as many if None.
    """
    count = ranks if slices is None else slices
    if count % ranks:
        more = -(-count // ranks) * ranks
        raise ScheduleError(
            f"slimpipe takes a multiple of {ranks} slices, one for each rank, got {count}. Use {more}."
        )
    return of_one_length(
        "slimpipe", lambda number: interleaved(ranks, number, chunks), microbatches, count
    )
