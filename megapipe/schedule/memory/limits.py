"""Memory limits of ranks."""

from __future__ import annotations

from collections.abc import Iterable


def by_rank(memory: float | tuple[float, ...], ranks: int) -> tuple[float, ...]:
    """Return the memory limit of each rank.

    Args:
        memory: one limit for all ranks, or one for each.
        ranks: the number of ranks.
    """
    if isinstance(memory, tuple):
        return memory
    return (memory,) * ranks


def within(peak: Iterable[float], limits: Iterable[float]) -> bool:
    """Return whether the peak of every rank is at most its limit, up to rounding."""
    return all(held <= most * (1 + 1e-9) for held, most in zip(peak, limits, strict=True))
