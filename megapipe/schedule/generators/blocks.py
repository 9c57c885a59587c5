"""V-Half and V-Min: half and a third of 1F1B's activations, from a building block repeated for each microbatch.

Qi et al. 2024, "Pipeline Parallelism with Controllable Memory" (sec. 2 and 3). On the V, what a rank holds is the
lifespans of its two stages in the block together; the offsets choose how soon B follows F, and are the same memory on
every rank. Slots decide the order of F and B; given costs decide where W stand.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from math import ceil

from megapipe.schedule.costs import UNIT, Costs
from megapipe.schedule.generators.fit import shortest
from megapipe.schedule.generators.packing import Block, packed
from megapipe.schedule.generators.waves import vee
from megapipe.schedule.passes import Kind, Pass, Schedule, Step


def v_half(ranks: int, microbatches: int, costs: Costs = UNIT) -> Schedule:
    """Memory (p+2)//2; about half of 1F1B's bubble at F = B = W."""
    patterns, memory = v_half_patterns(ranks, microbatches)
    return shortest(patterns, costs, memory)


def v_min(ranks: int, microbatches: int, costs: Costs = UNIT) -> Schedule:
    """Memory (p+4)//3. Each pass waits for the one before, so that unequal costs add up and make it slow."""
    patterns, memory = v_min_patterns(ranks, microbatches)
    return shortest(patterns, costs, memory)


def v_half_patterns(ranks: int, microbatches: int) -> tuple[list[Schedule], int]:
    """The tables that costs choose from, and the memory."""
    clash = 0 if ranks % 2 else 3

    def block(rank: int) -> Block:
        down, up = 2 * rank, 3 * ranks - rank - 2
        return Block(down, up, 3 * ranks + clash + 2 * rank - 1, 6 * ranks + clash - rank - 2)

    return _patterns("v-half", ranks, microbatches, block, (ranks + 2) // 2)


def v_min_patterns(ranks: int, microbatches: int) -> tuple[list[Schedule], int]:
    """The tables that costs choose from, and the memory."""
    clash = 0 if ranks % 3 else 2

    def block(rank: int) -> Block:
        down, up = rank, 2 * ranks - rank - 1
        return Block(down, up, 2 * ranks + clash + rank, 4 * ranks + clash - rank - 1)

    return _patterns("v-min", ranks, microbatches, block, (ranks + 4) // 3)


def _patterns(
    name: str, ranks: int, microbatches: int, block: Callable[[int], Block], memory: int
) -> tuple[list[Schedule], int]:
    """The block repeated with its ramps packed, and run slot by slot."""
    blocks = [block(rank) for rank in range(ranks)]
    rows = (packed(blocks, microbatches), _squeeze(blocks, microbatches, 2 * memory))
    return [Schedule(name, vee(ranks), microbatches, r) for r in rows], memory


def _squeeze(blocks: list[Block], microbatches: int, limit: int) -> tuple[tuple[Step, ...], ...]:
    """Let each rank run, slot by slot, the first pass of its block that can run, and a W where none can.

    A stage holds no more microbatches than in the repeated block and a rank no more than `limit`. One of them is kept
    from the stage that goes down: so the oldest unfinished microbatch always finds room, and nothing can block.
    """
    stages = 2 * len(blocks)
    ready: dict[tuple[Kind, int, int], int] = {(Kind.F, 0, i): 0 for i in range(microbatches)}
    rows: list[list[Step]] = [[] for _ in blocks]
    ranks = [_Rank(rank, stages - 1 - rank, block, limit) for rank, block in enumerate(blocks)]
    now, left = 0, 6 * microbatches * len(blocks)
    while left:
        for row, rank in zip(rows, ranks, strict=True):
            item = rank.choose(ready, now)
            if item is None:
                continue
            row.append((item,))
            left -= 1
            kind, stage, i, _ = item
            if kind is Kind.F:
                ready[(Kind.F, stage + 1, i) if stage + 1 < stages else (Kind.B, stage, i)] = (
                    now + 1
                )
            elif kind is Kind.B:
                ready[Kind.B, stage - 1, i] = now + 1
        now += 1
    return tuple(tuple(row) for row in rows)


class _Rank:
    """A rank with what it has run and holds."""

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
        # Lifespans from F to the end of W, in whole microbatches.
        self.rooms = {
            down: min(ceil((w0 + 1 - block.f0) / 6), max(1, limit - 1)),
            up: ceil((w1 + 1 - block.f1) / 6),
        }
        self.limit = limit

    def choose(self, ready: dict[tuple[Kind, int, int], int], now: int) -> Pass | None:
        """The pass to run in slot `now`, noted as run; None if nothing can."""
        full = sum(self.held.values()) == self.limit
        can = [
            (self.slots[kind, stage] + 6 * i, kind, stage)
            for (kind, stage), i in self.next.items()
            if ready.get((kind, stage, i), now + 1) <= now
            and (kind is Kind.B or (not full and self.held[stage] < self.rooms[stage]))
        ]
        if not can:
            if not self.owed:
                return None
            self.held[self.owed[0].stage] -= 1
            return self.owed.popleft()
        _, kind, stage = min(can)
        item = Pass(kind, stage, self.next[kind, stage])
        self.next[kind, stage] += 1
        if kind is Kind.F:
            self.held[stage] += 1
        else:
            self.owed.append(item._replace(kind=Kind.W))
        return item
