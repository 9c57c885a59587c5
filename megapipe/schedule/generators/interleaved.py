"""Several chunks of the model on each rank, dealt round-robin, so that ramps are shorter by the number of chunks.

Forwards and backwards each go through one list of (chunk, microbatch): groups of `microbatch_group_size_per_vp_stage`
microbatches pass one chunk after the other. The schedules differ in the groups, the warm-up and when W are paid.
"""

from __future__ import annotations

from megapipe.errors import ScheduleError
from megapipe.schedule.generators.turns import in_turns
from megapipe.schedule.passes import Schedule


def interleaved(
    ranks: int,
    microbatches: int,
    chunks: int = 2,
    microbatch_group_size_per_vp_stage: int | None = None,
) -> Schedule:
    """Interleaved 1F1B (Narayanan et al. 2021, sec. 2.2): bubble (p-1)(F+B+W)/v, memory p + (p-1)/v on rank 0.

    Args:
        chunks: stages on each rank, v.
        microbatch_group_size_per_vp_stage: microbatches that pass one chunk before the next begins; p if None. A rest
            of at least p makes a smaller group of its own, less is spread over the others.
    """
    groups = _groups("interleaved", ranks, microbatches, chunks, microbatch_group_size_per_vp_stage)
    return in_turns("interleaved", ranks, groups, chunks, ahead=(chunks - 1) * groups[0], slope=2)


def breadth_first(ranks: int, microbatches: int, chunks: int = 2) -> Schedule:
    """All microbatches through a chunk before the next one (Lamy-Poirier 2022): bubble (p-1)(F+B+W)/v, memory m.

    Every parameter is needed once forward and once backward, so that gathering or reducing it costs least.
    """
    return in_turns("breadth-first", ranks, [microbatches], chunks, ahead=chunks * microbatches)


def group_interleaved(
    ranks: int,
    microbatches: int,
    chunks: int = 2,
    microbatch_group_size_per_vp_stage: int | None = None,
) -> Schedule:
    """Interleaved by groups smaller than p (Wan et al. 2025, PipeOffload): memory (p + (v-1) g) / v.

    The warm-up is as deep as 1F1B's, and each B is sent before its W runs.

    Args:
        microbatch_group_size_per_vp_stage: group g, from p/2 to p; p/2 rounded up if None. A rest makes groups larger.
    """
    least = (ranks + 1) // 2
    size = (
        least if microbatch_group_size_per_vp_stage is None else microbatch_group_size_per_vp_stage
    )
    if not least <= size <= ranks:
        raise ScheduleError(
            f"group-interleaved needs a microbatch_group_size_per_vp_stage from {least} to {ranks}, got {size}."
        )
    # A group below p/2 would wait for its own last forward for ever: a rest is spread over the others.
    number = min(-(-microbatches // size), max(1, microbatches // least))
    groups = [microbatches // number + (i < microbatches % number) for i in range(number)]
    return in_turns(
        "group-interleaved", ranks, groups, chunks, ahead=(chunks - 1) * groups[0], slope=1, lag=0
    )


def interleaved_zb(
    ranks: int,
    microbatches: int,
    chunks: int = 2,
    microbatch_group_size_per_vp_stage: int | None = None,
) -> Schedule:
    """Interleaved with a split backward, as torch has it: bubble (p-1)(F+B-W)/v at the memory of 1F1B for any v.

    The warm-up is as deep as 1F1B's; rank r owes r weight gradients before it starts to pay the oldest after each B.
    """
    groups = _groups(
        "interleaved-zb", ranks, microbatches, chunks, microbatch_group_size_per_vp_stage
    )
    return in_turns(
        "interleaved-zb", ranks, groups, chunks, ahead=(chunks - 1) * groups[0], slope=1, lag=1
    )


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
