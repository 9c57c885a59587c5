"""Chimera and Hanayo, schedules whose microbatches run in waves over the ranks.

Chimera and Hanayo are one picture: each pass has a slot of its own, and the slots of a group of
microbatches tile the plane. F and BW take one slot each. Let s be a stage in a chain of n stages,
and i a microbatch of a group. The forward is in slot s + 2i, the backward in slot 2n - 1 - s + 2i.
The next group follows 2n slots later. The stages of a rank alternate between even and odd numbers.
So no two of its passes share a slot, and between the ramps no slot is free.
"""

from __future__ import annotations

from megapipe.errors import ScheduleError
from megapipe.schedule.passes import Kind, Pass, Placement, Schedule
from megapipe.schedule.placement import mirror, wave


def chimera(ranks: int, microbatches: int) -> Schedule:
    """Return Chimera (Li and Hoefler 2021, sec. 3.1 and 3.5): two 1F1B in opposite directions.

    Half of the microbatches run through each copy of the model. At F = BW the bubble is (p-2)F. The
    outer ranks hold p/2+1 microbatches, the inner ones up to p. On 4 ranks, with a prime on the
    copy whose first stage is on rank 3, and backwards in brackets:

        rank 0   0       1   2' [2'] 3' [3'][0]     [1]
        rank 1       0   2'  1   3' [2'][0] [3'][1]
        rank 2       2'  0   3'  1  [0] [2'][1] [3']
        rank 3   2'      3'  0  [0]  1  [1] [2']    [3']

    Raises: ScheduleError for an odd number of ranks or microbatches.
    """
    if ranks % 2:
        raise ScheduleError(
            f"chimera needs an even number of ranks, got {ranks}; the nearest is {ranks + 1}."
        )
    if microbatches % 2:
        raise ScheduleError(
            f"chimera needs an even number of microbatches, got {microbatches}; "
            f"the nearest is {microbatches + 1}."
        )
    return _tiled("chimera", mirror(ranks), microbatches, ranks // 2)


def hanayo(ranks: int, microbatches: int, chunks: int = 4) -> Schedule:
    """Return Hanayo (Liu et al. 2023, sec. 3): Chimera with one copy, which runs down and up.

    The bubble of p ranks is 2(p-1)F/v at F = BW, for microbatches that fill groups of p. A rank
    holds at most p microbatches.

    Args:
        chunks: stages on each rank, v: two for each wave down and up.
    Raises: ScheduleError for an odd number of chunks.
    """
    if chunks % 2 or chunks < 2:
        near = max(2, chunks + chunks % 2)
        raise ScheduleError(
            f"hanayo needs an even number of chunks per rank, got {chunks}; the nearest is {near}."
        )
    return _tiled("hanayo", wave(ranks, chunks // 2), microbatches, ranks)


def _tiled(name: str, placement: Placement, microbatches: int, group: int) -> Schedule:
    """Return the table in which every rank runs its passes in the order of their time slots.

    Microbatches run in groups. Stage s of n runs the forward of microbatch i of a group in slot s +
    2i, and the backward in slot 2n - 1 - s + 2i. The next group follows 2n slots later.

    Args:
        name: name of the table.
        group: number of microbatches in a group, which all run through the same copy of the model.
    """
    n = placement.chain
    each = microbatches // placement.num_chains
    timed: list[list[tuple[int, Pass]]] = [[] for _ in range(placement.num_ranks)]
    for stage, rank in enumerate(placement.rank_of):
        chain, at = divmod(stage, n)
        for k in range(each):
            # The slot in which the microbatch enters its chain.
            slot = 2 * n * (k // group) + 2 * (k % group)
            # Microbatches are numbered through both chains, the first chain's first.
            microbatch = chain * each + k
            timed[rank].append((slot + at, Pass(Kind.F, stage, microbatch)))
            timed[rank].append((slot + 2 * n - 1 - at, Pass(Kind.BW, stage, microbatch)))
    rows = []
    for row in timed:
        rows.append(tuple((item,) for _, item in sorted(row)))
    return Schedule(name, placement, microbatches, tuple(rows))
