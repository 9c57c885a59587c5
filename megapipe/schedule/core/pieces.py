"""The pieces of arithmetic and communication of passes that run together, and their times.

`Costs` computes the time of an overlapped pair from them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple


class Chain(NamedTuple):
    """One pass as a chain of pieces: arithmetic and communication in alternation.

    A turn is one piece of arithmetic and one of communication.

    Attributes:
        compute, link: total time of the arithmetic and of the communication.
        turns: number of turns; 0 for infinitely many, infinitely short ones.
        link_first: a turn begins with its communication, as in a backward.
        follows: this chain is the weight gradient of a BW. This chain's turn i begins when turn i
            of the input gradient, the chain before it in the list, has ended.
    """

    compute: float
    link: float
    turns: int
    link_first: bool
    follows: bool


class Piece(NamedTuple):
    """One piece of arithmetic or communication of a pass.

    Attributes:
        chain: index of its `Chain` in the list of the step's chains.
        link: it is communication, not arithmetic.
        start, end: times from the start of its step, in the unit of the costs.
    """

    chain: int
    link: bool
    start: float
    end: float


def pieces(chains: Sequence[Chain]) -> list[Piece]:
    """Return when each piece runs, given one stream for arithmetic and one for communication.

    The piece that can start first runs first. Of pieces that can start at one time, the one whose
    pass has most work left runs first. If any chain has `turns` 0 (infinitely short pieces),
    everything overlaps: each pass is then one piece on each stream, and neither stream waits for
    the other.

    Args:
        chains: one for each pass that runs together, in order.
    """
    played: list[Piece] = []
    free = [0.0, 0.0]

    def play(i: int, lane: int, after: float, turns: int) -> float:
        start = max(after, free[lane])
        whole = chains[i].link if lane else chains[i].compute
        free[lane] = start + whole / turns
        played.append(Piece(i, bool(lane), start, free[lane]))
        return free[lane]

    # Arbitrarily short pieces overlap completely: each stream is busy from 0 for its own sum.
    if not all(chain.turns for chain in chains):
        for i in range(len(chains)):
            play(i, 0, 0.0, 1)
            play(i, 1, 0.0, 1)
        return played
    # End of each piece of each chain; the first entry stands for the time before the first piece.
    ends = [[0.0] for _ in chains]
    for _ in range(sum(2 * chain.turns for chain in chains)):
        ready: list[tuple[float, float, int, int, float]] = []
        for i, chain in enumerate(chains):
            at = len(ends[i]) - 1
            lane = (at + chain.link_first) % 2
            # Both chains have the same number of turns, two pieces each.
            needed = 2 * (at // 2 + 1) if chain.follows else 0
            if at < 2 * chain.turns and needed < len(ends[i - 1]):
                left = (1 - at / 2 / chain.turns) * (chain.compute + chain.link)
                after = max(ends[i][-1], ends[i - 1][needed])
                ready.append((max(after, free[lane]), -left, i, lane, after))
        _, _, i, lane, after = min(ready)
        ends[i].append(play(i, lane, after, chains[i].turns))
    return played
