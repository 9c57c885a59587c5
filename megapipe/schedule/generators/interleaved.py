"""Schedules with several chunks on each rank in a loop, which divides the ramps by their number.

Forwards and backwards each follow one list of (chunk, microbatch). A group of
`microbatch_group_size_per_vp_stage` microbatches passes one chunk after another. The schedules
differ in their groups, in the warm-up and in when W runs.
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
    """Return interleaved 1F1B (Narayanan et al. 2021, sec. 2.2.2, figure 4).

    The bubble of p ranks is (p-1)(F+B+W)/v. Rank 0 holds p + (p-1)/v microbatches. On 2 ranks, with
    a prime on the second chunk and backwards in brackets, at F = BW:

        rank 0  0   1   0'  1'  2  [0'] 3  [1'] 2' [0]  3' [1]     [2']    [3'] [2] [3]
        rank 1      0   1   0' [0'] 1' [1'] 2  [0]  3  [1]  2' [2'] 3' [3'] [2] [3]

    Args:
        chunks: stages on each rank, v.
        microbatch_group_size_per_vp_stage: microbatches that pass a chunk before the next chunk
            begins; None for p. If it does not divide the microbatches, a remainder of at least p is
            a group of its own. A smaller remainder is spread over the other groups.
    Raises: ScheduleError for no chunk, or a group below p.
    """
    groups = _groups("interleaved", ranks, microbatches, chunks, microbatch_group_size_per_vp_stage)
    # The warm-up of Megatron-LM: 2 (p-1-r) + (v-1) N forwards on rank r, N the size of a group.
    return in_turns("interleaved", ranks, groups, chunks, ahead=(chunks - 1) * groups[0], slope=2)


def breadth_first(ranks: int, microbatches: int, chunks: int = 2) -> Schedule:
    """Return breadth-first (Lamy-Poirier 2022): all microbatches run through one chunk at a time.

    The bubble of p ranks is (p-1)(F+B+W)/v. A rank holds all microbatches. Each parameter is needed
    once forward and once backward, so gathering or reducing it costs least.

    Args:
        chunks: stages on each rank, v.
    """
    # All forwards come first, so a rank holds every microbatch.
    return in_turns("breadth-first", ranks, [microbatches], chunks, ahead=chunks * microbatches)


def group_interleaved(
    ranks: int,
    microbatches: int,
    chunks: int = 2,
    microbatch_group_size_per_vp_stage: int | None = None,
) -> Schedule:
    """Return interleaved 1F1B in groups smaller than p (Wan et al. 2025, PipeOffload).

    Rank 0 holds (p + (v-1) g) / v microbatches. The warm-up is as deep as in 1F1B. W follows its B
    directly, after the gradient has been sent.

    Args:
        chunks: stages on each rank, v.
        microbatch_group_size_per_vp_stage: group size g from p/2 to p; None for p/2 rounded up. If
            g does not divide the microbatches, groups are nearly equal and of at least p/2.
    Raises: ScheduleError for another group size.
    """
    least = (ranks + 1) // 2
    size = microbatch_group_size_per_vp_stage
    if size is None:
        size = least
    if not least <= size <= ranks:
        raise ScheduleError(
            f"group-interleaved needs a microbatch_group_size_per_vp_stage from {least} to "
            f"{ranks}, got {size}."
        )
    # A group below p/2 would deadlock on its own last forward, so a remainder is spread over the
    # other groups.
    number = min(-(-microbatches // size), max(1, microbatches // least))
    groups = [microbatches // number + (i < microbatches % number) for i in range(number)]
    ahead = (chunks - 1) * groups[0]
    return in_turns("group-interleaved", ranks, groups, chunks, ahead=ahead, slope=1, lag=0)


def interleaved_zb(
    ranks: int,
    microbatches: int,
    chunks: int = 2,
    microbatch_group_size_per_vp_stage: int | None = None,
) -> Schedule:
    """Return interleaved 1F1B with a split backward, as torch.distributed.pipelining has it.

    The bubble is (p-1)(F+B-W)/v. A rank holds p microbatches, as in 1F1B, for any v. The warm-up is
    as deep as in 1F1B. Rank r defers r weight gradients, and then runs the oldest after each B.

    Args:
        chunks: stages on each rank, v.
        microbatch_group_size_per_vp_stage: microbatches that pass a chunk before the next chunk
            begins, at least p; None for p.
    Raises: ScheduleError for no chunk, or a group below p.
    """
    groups = _groups(
        "interleaved-zb", ranks, microbatches, chunks, microbatch_group_size_per_vp_stage
    )
    # One forward for each later rank is enough, as in 1F1B: B alone returns sooner than B and W.
    ahead = (chunks - 1) * groups[0]
    return in_turns("interleaved-zb", ranks, groups, chunks, ahead=ahead, slope=1, lag=1)


def _groups(name: str, ranks: int, microbatches: int, chunks: int, size: int | None) -> list[int]:
    """Return the sizes of the groups of microbatches, the largest first.

    Args:
        name: name of the schedule, for errors.
        chunks: stages on each rank.
        size: microbatches in a group; None for as many as ranks.
    Raises: ScheduleError if `size` is below the number of ranks, or there is no chunk.
    """
    if chunks < 1:
        raise ScheduleError(f"{name} needs at least 1 chunk per rank, got {chunks}.")
    if size is not None and size < ranks:
        raise ScheduleError(
            f"{name} needs a microbatch_group_size_per_vp_stage of at least {ranks}, "
            f"the number of ranks, got {size}."
        )
    full, rest = divmod(microbatches, size or ranks)
    if full == 0:
        return [microbatches]
    groups = [size or ranks] * full
    if rest >= ranks:
        return [*groups, rest]
    # A group below p would idle the last rank while its next chunk waits for the way around the
    # loop.
    return [group + rest // full + (i < rest % full) for i, group in enumerate(groups)]
