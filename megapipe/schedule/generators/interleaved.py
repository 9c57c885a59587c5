"""Several chunks of the model on each rank, dealt round-robin, so that ramps are shorter by the number of chunks.

Forwards and backwards each go through one list of (chunk, microbatch): groups of `microbatch_group_size_per_vp_stage`
microbatches pass one chunk after the other. The schedules differ in the groups, the warm-up and when W are paid.
"""

from __future__ import annotations

from megapipe.errors import ScheduleError
from megapipe.schedule.generators.recorder import Recorder
from megapipe.schedule.passes import Schedule, loop


def interleaved(
    ranks: int, microbatches: int, chunks: int = 2, microbatch_group_size_per_vp_stage: int | None = None
) -> Schedule:
    """Interleaved 1F1B (Narayanan et al. 2021, sec. 2.2): bubble (p-1)(F+B+W)/v, memory p + (p-1)/v on rank 0.

    Args:
        chunks: stages on each rank, v.
        microbatch_group_size_per_vp_stage: microbatches that pass one chunk before the next begins; p if None. A rest
            of at least p makes a smaller group of its own, less is spread over the others.
    """
    groups = _groups("interleaved", ranks, microbatches, chunks, microbatch_group_size_per_vp_stage)
    rows = []
    for rank in range(ranks):
        rec = Recorder()
        forwards = _stages(rank, ranks, range(chunks), groups)
        backwards = _stages(rank, ranks, range(chunks)[::-1], groups)
        warmup = min(2 * (ranks - 1 - rank) + (chunks - 1) * groups[0], len(forwards))
        for stage in forwards[:warmup]:
            rec.f(stage)
        for i, stage in enumerate(backwards):
            if warmup + i < len(forwards):
                rec.f(forwards[warmup + i])
            rec.bw(stage)
        rows.append(tuple(rec.steps))
    return Schedule("interleaved", loop(ranks, chunks), microbatches, tuple(rows))


def breadth_first(ranks: int, microbatches: int, chunks: int = 2) -> Schedule:
    """All microbatches through a chunk before the next one (Lamy-Poirier 2022): bubble (p-1)(F+B+W)/v, memory m.

    Every parameter is needed once forward and once backward, so that gathering or reducing it costs least.
    """
    groups = [microbatches]
    rows = []
    for rank in range(ranks):
        rec = Recorder()
        for stage in _stages(rank, ranks, range(chunks), groups):
            rec.f(stage)
        for stage in _stages(rank, ranks, range(chunks)[::-1], groups):
            rec.bw(stage)
        rows.append(tuple(rec.steps))
    return Schedule("breadth-first", loop(ranks, chunks), microbatches, tuple(rows))


def group_interleaved(
    ranks: int, microbatches: int, chunks: int = 2, microbatch_group_size_per_vp_stage: int | None = None
) -> Schedule:
    """Interleaved by groups smaller than p (Wan et al. 2025, PipeOffload): memory (p + (v-1) g) / v.

    The warm-up is as deep as 1F1B's, and each B is sent before its W runs.

    Args:
        microbatch_group_size_per_vp_stage: group g, from p/2 to p; p/2 rounded up if None. A rest makes groups larger.
    """
    least = (ranks + 1) // 2
    size = least if microbatch_group_size_per_vp_stage is None else microbatch_group_size_per_vp_stage
    if not least <= size <= ranks:
        raise ScheduleError(
            f"group-interleaved needs a microbatch_group_size_per_vp_stage from {least} to {ranks}, got {size}."
        )
    # A group below p/2 would wait for its own last forward for ever: a rest is spread over the others.
    number = min(-(-microbatches // size), max(1, microbatches // least))
    groups = [microbatches // number + (i < microbatches % number) for i in range(number)]
    return _split("group-interleaved", ranks, microbatches, chunks, groups, lag=0)


def interleaved_zb(
    ranks: int, microbatches: int, chunks: int = 2, microbatch_group_size_per_vp_stage: int | None = None
) -> Schedule:
    """Interleaved with a split backward, as torch has it: bubble (p-1)(F+B-W)/v at the memory of 1F1B for any v.

    The warm-up is as deep as 1F1B's; rank r owes r weight gradients before it starts to pay the oldest after each B.
    """
    groups = _groups("interleaved-zb", ranks, microbatches, chunks, microbatch_group_size_per_vp_stage)
    return _split("interleaved-zb", ranks, microbatches, chunks, groups, lag=1)


def _split(name: str, ranks: int, microbatches: int, chunks: int, groups: list[int], lag: int) -> Schedule:
    """A warm-up as deep as 1F1B's; then F, B, and the oldest W once `lag` are owed for each rank before this one."""
    rows = []
    for rank in range(ranks):
        rec = Recorder()
        forwards = _stages(rank, ranks, range(chunks), groups)
        backwards = _stages(rank, ranks, range(chunks)[::-1], groups)
        warmup = min(ranks - 1 - rank + (chunks - 1) * groups[0], len(forwards))
        for stage in forwards[:warmup]:
            rec.f(stage)
        for i, stage in enumerate(backwards):
            if warmup + i < len(forwards):
                rec.f(forwards[warmup + i])
            rec.b(stage)
            if len(rec.owed) > lag * rank:
                rec.w()
        rec.pay()
        rows.append(tuple(rec.steps))
    return Schedule(name, loop(ranks, chunks), microbatches, tuple(rows))


def _groups(name: str, ranks: int, microbatches: int, chunks: int, size: int | None) -> list[int]:
    """Sizes of the groups, the largest first."""
    if chunks < 1:
        raise ScheduleError(f"{name} needs at least 1 chunk per rank, got {chunks}.")
    if size is not None and size < ranks:
        raise ScheduleError(
            f"{name} needs a microbatch_group_size_per_vp_stage of at least {ranks}, the number of ranks, got {size}."
        )
    full, rest = divmod(microbatches, size or ranks)
    if full == 0:
        return [microbatches]
    groups = [size or ranks] * full
    if rest >= ranks:
        return [*groups, rest]
    # A group below p would starve the last rank: its next chunk waits for the ring to come round.
    return [group + rest // full + (i < rest % full) for i, group in enumerate(groups)]


def _stages(rank: int, ranks: int, chunks: range, groups: list[int]) -> list[int]:
    """The stage of each pass in turn; its microbatch is the next of that stage."""
    return [chunk * ranks + rank for size in groups for chunk in chunks for _ in range(size)]
