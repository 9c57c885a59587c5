"""V-Half and V-Min: half and a third of 1F1B's activations, from a repeated building block.

Qi et al. 2024, "Pipeline Parallelism with Controllable Memory" (sec. 2 and 3). The memory of a rank
follows from the lifespans of its two stages in the block. On the V the lifespans of a rank's two
stages add up to the same on every rank. The offsets in the block choose how soon B follows F. They
fix the order of F and B; costs decide where W runs.

The V-Min block of 4 ranks. Capital letters are the stage on the way down the V, small letters the
stage on the way up:

    rank 0  F . . . . . . f b . w . . . . B . W
    rank 1  . F . . . . f . . b w . . . B . . W
    rank 2  . . F . . f . . . . b . w B . W
    rank 3  . . . F f . . . . . . b B w W

The next microbatch runs the same block 6 slots later. Modulo 6 the six passes of a rank have six
different slots, so a rank never waits between the ramps.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from functools import lru_cache
from math import ceil

from megapipe.schedule.core.fit import shortest
from megapipe.schedule.costs import UNIT, Costs
from megapipe.schedule.generators.packing import Block, packed
from megapipe.schedule.passes import Kind, Pass, Schedule, Step
from megapipe.schedule.placement import vee


def v_half(ranks: int, microbatches: int, costs: Costs = UNIT) -> Schedule:
    """Return V-Half for p ranks: half of 1F1B's memory, and less than half its bubble at F = B = W.

    A rank holds the activations of (p+2)//2 microbatches.

    Args:
        costs: W (weight gradient) is put where a rank would wait under these costs; F and B keep
            their order.
    """
    patterns, memory = v_half_patterns(ranks, microbatches)
    return shortest(patterns, costs, memory)


def v_min(ranks: int, microbatches: int, costs: Costs = UNIT) -> Schedule:
    """Return V-Min for p ranks: a third of 1F1B's memory, and about 0.6 of its bubble at F = B = W.

    A rank holds the activations of (p+4)//3 microbatches. The rank's order repeats a block of
    passes for each microbatch. In the block each pass waits for the pass before it, so unequal
    costs add up and make the table slow.

    Args:
        costs: W (weight gradient) is put where a rank would wait under these costs; F and B keep
            their order.
    """
    patterns, memory = v_min_patterns(ranks, microbatches)
    return shortest(patterns, costs, memory)


# A search asks for the same tables under several costs.
@lru_cache(maxsize=4)
def v_half_patterns(ranks: int, microbatches: int) -> tuple[tuple[Schedule, ...], int]:
    """Return (two V-Half tables, memory). `v_half` takes the faster table under its costs.

    The tables differ in their warm-up and cool-down. The memory is the most activation of a rank,
    in microbatches.
    """
    # With an even number of ranks some passes of a rank would share a slot modulo 6. A delay of the
    # backwards by half a block separates them.
    clash = 3 if ranks % 2 == 0 else 0

    def block(rank: int) -> Block:
        # Passes take 2 slots for each rank away from rank 0, and 1 on the way back. The lifespans
        # of both stages add up to 6p slots: p microbatches of a stage, which is half of a share.
        return Block(
            f0=2 * rank,
            f1=3 * ranks - rank - 2,
            b1=3 * ranks + clash + 2 * rank - 1,
            b0=6 * ranks + clash - rank - 2,
        )

    return _patterns("v-half", ranks, microbatches, block, (ranks + 2) // 2)


@lru_cache(maxsize=4)
def v_min_patterns(ranks: int, microbatches: int) -> tuple[tuple[Schedule, ...], int]:
    """Return (two V-Min tables, memory). `v_min` takes the faster table under its costs.

    The tables differ in their warm-up and cool-down. The memory is the most activation of a rank,
    in microbatches.
    """
    # The same for V-Min, where passes would share a slot if 3 divides the number of ranks.
    clash = 2 if ranks % 3 == 0 else 0

    def block(rank: int) -> Block:
        # Each pass follows the one before it directly, so lifespans are the shortest: 4p slots.
        return Block(
            f0=rank,
            f1=2 * ranks - rank - 1,
            b1=2 * ranks + clash + rank,
            b0=4 * ranks + clash - rank - 1,
        )

    return _patterns("v-min", ranks, microbatches, block, (ranks + 4) // 3)


def _patterns(
    name: str, ranks: int, microbatches: int, block: Callable[[int], Block], memory: int
) -> tuple[tuple[Schedule, ...], int]:
    """Return (two tables that repeat a building block, the memory limit as given).

    In the first table the passes of warm-up and cool-down are moved to earlier free slots. In the
    second each rank runs, slot by slot, the first pass that can run. A slot is the time of one
    pass.

    Args:
        name: name of both tables.
        block: takes a rank and returns its building block.
        memory: limit on a rank's activation, in microbatches.
    """
    blocks = [block(rank) for rank in range(ranks)]
    # Neither is always the shorter one. At F = B = W, p = 8 and m = 16, V-Half takes 56.5 packed
    # and 57.5 slot by slot, V-Min 61.5 and 60.5. A stage of the V is half of a device share, so
    # `memory` shares are twice as many microbatches of a stage.
    rows = (packed(blocks, microbatches), _squeeze(blocks, microbatches, 2 * memory))
    return tuple(Schedule(name, vee(ranks), microbatches, r) for r in rows), memory


def _squeeze(blocks: list[Block], microbatches: int, limit: int) -> tuple[tuple[Step, ...], ...]:
    """Return each rank's steps: in each slot the rank runs the first pass of its block that can.

    A slot is the time of one pass. Where neither F nor B can run, the rank runs a pending W. A
    stage holds no more microbatches than in the repeated block. Of the memory for both stages, the
    stage on the way down the V always leaves one microbatch to the stage on the way up. So the
    oldest unfinished microbatch always fits, and no rank deadlocks.

    Args:
        blocks: the building block of each rank.
        limit: most microbatches that a rank holds, counted for both of its stages.
    """
    stages = 2 * len(blocks)
    # The slot from which on a pass's input is there.
    ready: dict[tuple[Kind, int, int], int] = {(Kind.F, 0, i): 0 for i in range(microbatches)}
    rows: list[list[Step]] = [[] for _ in blocks]
    ranks = [_Rank(rank, stages - 1 - rank, block, limit) for rank, block in enumerate(blocks)]
    now = 0
    # F, B and W of both stages.
    left = 6 * microbatches * len(blocks)
    while left:
        for row, rank in zip(rows, ranks, strict=True):
            item = rank.choose(ready, now)
            if item is None:
                continue
            row.append((item,))
            left -= 1
            # Results of this slot can be used in the next one, whichever rank is asked first.
            kind, stage, i, _ = item
            if kind is Kind.F and stage + 1 < stages:
                ready[Kind.F, stage + 1, i] = now + 1
            elif kind is Kind.F:
                ready[Kind.B, stage, i] = now + 1
            elif kind is Kind.B:
                ready[Kind.B, stage - 1, i] = now + 1
        now += 1
    return tuple(tuple(row) for row in rows)


class _Rank:
    """The state of a rank while its passes are chosen, slot by slot.

    The state has the next microbatch of each kind and stage, the pending W, and the microbatches
    held by each stage. `choose` returns the pass to run in a slot.

    Args:
        down: the rank's stage from which a forward goes down the V.
        up: the rank's stage from which a forward goes up the V.
        block: slots of the rank's passes for microbatch 0.
        limit: most microbatches that both stages together may hold.
    """

    def __init__(self, down: int, up: int, block: Block, limit: int) -> None:
        w0, w1 = block.weights()
        self.slots = {
            (Kind.F, down): block.f0,
            (Kind.F, up): block.f1,
            (Kind.B, up): block.b1,
            (Kind.B, down): block.b0,
        }
        self.next = dict.fromkeys(self.slots, 0)
        self.owed: deque[Pass] = deque()
        self.held = {down: 0, up: 0}
        # Lifespans from F to the end of W, rounded up to whole microbatches. If forwards going down
        # filled the rank, the forward going up that leads to their backwards could not run.
        self.rooms = {
            down: min(ceil((w0 + 1 - block.f0) / 6), max(1, limit - 1)),
            up: ceil((w1 + 1 - block.f1) / 6),
        }
        self.limit = limit

    def choose(self, ready: dict[tuple[Kind, int, int], int], now: int) -> Pass | None:
        """Return the pass to run in slot `now` and record it as run; None if no pass can run.

        Args:
            ready: {(kind, stage, microbatch): the first slot in which that pass has its input}.
        """
        full = sum(self.held.values()) == self.limit
        can = []
        for (kind, stage), i in self.next.items():
            if ready.get((kind, stage, i), now + 1) > now:
                continue
            # Only F takes memory. Its microbatch holds it until W.
            if kind is Kind.F and (full or self.held[stage] >= self.rooms[stage]):
                continue
            can.append((self.slots[kind, stage] + 6 * i, kind, stage))
        # W has no slot of its own here: it takes any slot that would be idle.
        if not can:
            if not self.owed:
                return None
            self.held[self.owed[0].stage] -= 1
            return self.owed.popleft()
        # The pass that the repeated blocks have first.
        _, kind, stage = min(can)
        item = Pass(kind, stage, self.next[kind, stage])
        self.next[kind, stage] += 1
        if kind is Kind.F:
            self.held[stage] += 1
        else:
            self.owed.append(item._replace(kind=Kind.W))
        return item
