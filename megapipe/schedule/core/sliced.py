"""Schedules that cut microbatches into slices along the sequence: TeraPipe, Seq1F1B, SlimPipe.

Each is a schedule of whole microbatches with a slice in the place of a microbatch. On each stage a
slice runs after the earlier slices of its microbatch, and attends to their keys and values.
Backwards run in reverse order.
"""

from __future__ import annotations

from megapipe.errors import ScheduleError
from megapipe.schedule.generators.classic import gpipe, one_f_one_b
from megapipe.schedule.generators.interleaved import interleaved
from megapipe.schedule.passes import Schedule
from megapipe.schedule.shapes.slices.slices import of_one_length


def terapipe(ranks: int, microbatches: int, slices: int = 4) -> Schedule:
    """Return TeraPipe (Li et al. 2021): GPipe with each microbatch in n slices of equal length.

    The bubble of p ranks is (p-1)(F+B+W)/n. A rank holds all microbatches.

    Args:
        slices: slices of a microbatch, n.
    """
    # GPipe for m n microbatches, read as m of n slices each.
    return of_one_length("terapipe", lambda count: gpipe(ranks, count), microbatches, slices)


def seq1f1b(ranks: int, microbatches: int, slices: int = 4) -> Schedule:
    """Return Seq1F1B (Sun et al. 2024): 1F1B with each microbatch in n slices of equal length.

    The bubble of p ranks is (p-1)(F+B+W)/n. Rank 0 holds 1 + (p-1)/n microbatches.

    Args:
        slices: slices of a microbatch, n.
    """
    return of_one_length("seq1f1b", lambda count: one_f_one_b(ranks, count), microbatches, slices)


def slimpipe(ranks: int, microbatches: int, chunks: int = 2, slices: int | None = None) -> Schedule:
    """Return SlimPipe (Li et al. 2025): interleaved 1F1B with each microbatch in n slices.

    The bubble of p ranks is (p-1)(F+B+W)/(v n). Rank 0 holds 1 + 2 (p-1) / (v n) microbatches.

    Args:
        chunks: stages on each rank, v.
        slices: slices of a microbatch, n, a multiple of the ranks; None for as many as ranks.
    Raises: ScheduleError if `slices` is no multiple of the ranks.
    """
    count = ranks if slices is None else slices
    # Interleaved runs groups of p microbatches, here of p slices, and a microbatch is whole groups.
    if count % ranks:
        more = -(-count // ranks) * ranks
        raise ScheduleError(
            f"slimpipe takes a multiple of {ranks} slices, one for each rank, got {count}. "
            f"Use {more}."
        )
    return of_one_length(
        "slimpipe", lambda number: interleaved(ranks, number, chunks), microbatches, count
    )
