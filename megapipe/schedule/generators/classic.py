"""The schedules whose backward is never split: naive, GPipe, 1F1B."""

from __future__ import annotations

from collections.abc import Callable

from megapipe.schedule.generators.recorder import Recorder
from megapipe.schedule.passes import Schedule, loop


def naive(ranks: int, microbatches: int) -> Schedule:
    """One microbatch at a time through the whole model: a rank computes 1/p of the time."""

    def write(rec: Recorder, rank: int) -> None:
        for _ in range(microbatches):
            rec.f(rank)
            rec.bw(rank)

    return _looped("naive", ranks, microbatches, write)


def gpipe(ranks: int, microbatches: int) -> Schedule:
    """All forwards, then all backwards (Huang et al. 2019): (p-1)/(m+p-1) of the time is bubble; memory m."""

    def write(rec: Recorder, rank: int) -> None:
        for _ in range(microbatches):
            rec.f(rank)
        for _ in range(microbatches):
            rec.bw(rank)

    return _looped("gpipe", ranks, microbatches, write)


def one_f_one_b(ranks: int, microbatches: int) -> Schedule:
    """Each backward as soon as it can (Narayanan et al. 2019, PipeDream-Flush 2021): bubble (p-1)(F+B+W), memory p."""

    def write(rec: Recorder, rank: int) -> None:
        warmup = min(ranks - 1 - rank, microbatches)
        for _ in range(warmup):
            rec.f(rank)
        for _ in range(microbatches - warmup):
            rec.f(rank)
            rec.bw(rank)
        for _ in range(warmup):
            rec.bw(rank)

    return _looped("1f1b", ranks, microbatches, write)


def _looped(name: str, ranks: int, microbatches: int, write: Callable[[Recorder, int], None]) -> Schedule:
    recorders = [Recorder() for _ in range(ranks)]
    for rank, rec in enumerate(recorders):
        write(rec, rank)
    return Schedule(name, loop(ranks), microbatches, tuple(tuple(rec.steps) for rec in recorders))
