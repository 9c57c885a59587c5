"""Placements in waves over the ranks, and one picture for Chimera and Hanayo: each pass in a slot of its own, and a
group's slots tile the plane.

With F and BW of one slot each, microbatch i of a group runs forward through stage s in slot s + 2i and backward in slot
2n - 1 - s + 2i of a chain of n stages; the next group follows 2n slots later. Where the chain is folded so that a
rank's stages alternate between even and odd numbers, no two passes of a rank meet, and between ramps no slot is free.
"""

from __future__ import annotations

from megapipe.errors import ScheduleError
from megapipe.schedule.passes import Kind, Pass, Placement, Schedule


def loop(ranks: int, chunks: int = 1) -> Placement:
    """Stages dealt round-robin: naive, GPipe, 1F1B, interleaved, ZB-H1, ZB-H2."""
    return Placement(tuple(range(ranks)) * chunks, ranks * chunks)


def vee(ranks: int) -> Placement:
    """Down and up again, so that rank 0 holds both ends: ZB-V, V-Half, V-Min, DualPipeV."""
    return Placement((*range(ranks), *reversed(range(ranks))), 2 * ranks)


def wave(ranks: int, waves: int) -> Placement:
    """The V several times over: Hanayo. A wave begins on the rank where the one before ended."""
    return Placement((*range(ranks), *reversed(range(ranks))) * waves, 2 * ranks * waves)


def mirror(ranks: int) -> Placement:
    """Two copies of the model in opposite directions: DualPipe. The V's rank_of, cut in two chains."""
    return Placement((*range(ranks), *reversed(range(ranks))), ranks)


def chimera(ranks: int, microbatches: int) -> Schedule:
    """Two 1F1B in opposite directions (Li and Hoefler 2021, sec. 3.1 and 3.5): p-2 slots of bubble at F = BW.

    Half of the microbatches run through each copy of the model. Memory p/2+1 on the outer ranks to p on the inner.
    """
    if ranks % 2:
        raise ScheduleError(
            f"chimera needs an even number of ranks, got {ranks}; the nearest is {ranks + 1}."
        )
    if microbatches % 2:
        raise ScheduleError(
            f"chimera needs an even number of microbatches, got {microbatches}; the nearest is {microbatches + 1}."
        )
    return _tiled("chimera", mirror(ranks), microbatches, ranks // 2)


def hanayo(ranks: int, microbatches: int, chunks: int = 4) -> Schedule:
    """Chimera with one copy: the other direction is the way back up (Liu et al. 2023, sec. 3).

    Bubble 2(p-1)F/v at F = BW, for microbatches that fill groups of p; memory p.

    Args:
        chunks: stages on each rank, v: two for each wave down and up.
    """
    if chunks % 2 or chunks < 2:
        near = max(2, chunks + chunks % 2)
        raise ScheduleError(
            f"hanayo needs an even number of chunks per rank, got {chunks}; the nearest is {near}."
        )
    return _tiled("hanayo", wave(ranks, chunks // 2), microbatches, ranks)


def _tiled(name: str, placement: Placement, microbatches: int, group: int) -> Schedule:
    """The slots of every pass, each rank in the order of its own."""
    n, each = placement.chain, microbatches // placement.num_chains
    timed: list[list[tuple[int, Pass]]] = [[] for _ in range(placement.num_ranks)]
    for stage, rank in enumerate(placement.rank_of):
        chain, at = divmod(stage, n)
        for k in range(each):
            slot = 2 * n * (k // group) + 2 * (k % group)
            microbatch = chain * each + k
            timed[rank].append((slot + at, Pass(Kind.F, stage, microbatch)))
            timed[rank].append((slot + 2 * n - 1 - at, Pass(Kind.BW, stage, microbatch)))
    return Schedule(
        name,
        placement,
        microbatches,
        tuple(tuple((item,) for _, item in sorted(row)) for row in timed),
    )
