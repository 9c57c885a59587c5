"""A building block repeated for each microbatch, with the ramps packed into free slots.

Qi et al. 2024, "Pipeline Parallelism with Controllable Memory" (sec. 3: repeat, squeeze, reorder).
In the steady phase every slot is taken. In warm-up and cool-down a pass moves to the earliest free
slot after its input that does not raise the peak memory.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from megapipe.schedule.costs import Costs
from megapipe.schedule.passes import Kind, Pass, Schedule, Step
from megapipe.schedule.placement import vee
from megapipe.schedule.simulate import simulate


@dataclass(frozen=True)
class Block:
    """The slots of one rank's passes for microbatch 0, in a schedule with the V placement.

    A slot is the time of one pass. The block is repeated: microbatch i runs 6 i slots later.
    `weights` returns the slots of the two W (weight gradients).

    Attributes:
        f0, b0: slots of F and B of the stage on the way down the V.
        f1, b1: slots of F and B of the stage on the way up.
    """

    f0: int
    f1: int
    b1: int
    b0: int

    def weights(self) -> tuple[int, int]:
        """Return (slot of W on the way down the V, slot of W on the way up).

        Each W takes the first free slot after its B. The W of the earlier B chooses first.
        """
        # Slots are equal modulo 6, because every microbatch repeats the block 6 slots later.
        taken = {slot % 6 for slot in (self.f0, self.f1, self.b1, self.b0)}
        slots = {}
        for backward in sorted((self.b0, self.b1)):
            slot = next(s for s in range(backward + 1, backward + 7) if s % 6 not in taken)
            taken.add(slot % 6)
            slots[backward] = slot
        return slots[self.b0], slots[self.b1]


def packed(blocks: Sequence[Block], microbatches: int) -> tuple[tuple[Step, ...], ...]:
    """Return each rank's steps: repeated building blocks with a shortened warm-up and cool-down.

    Warm-up and cool-down are packed: their passes move to earlier free slots. First they are packed
    with each W in its slot. Then the cool-down is packed again without W, and W take the slots that
    F and B leave free.

    Args:
        blocks: the building block of each rank.
    """
    slots = _pack(_with_weights(_repeated(blocks, microbatches)), microbatches, weights=True)
    # In the cool-down other ranks wait for B, and nobody waits for a W. So B comes first.
    slots = _pack(_without_weights(slots), microbatches, weights=False)
    return _steps(_with_weights(_without_weights(slots)))


Slots = list[dict[int, Pass]]
"""The pass in each slot that is taken, for each rank."""


def _repeated(blocks: Sequence[Block], microbatches: int) -> Slots:
    """Repeat the building blocks for all microbatches, without their W.

    Args:
        blocks: the building block of each rank.
    Returns: for each rank {slot: its F or B}. Microbatch i is 6 i slots after microbatch 0.
    """
    slots: Slots = []
    for down, block in enumerate(blocks):
        up = 2 * len(blocks) - 1 - down
        row = {}
        for slot, kind, stage in (
            (block.f0, Kind.F, down),
            (block.f1, Kind.F, up),
            (block.b1, Kind.B, up),
            (block.b0, Kind.B, down),
        ):
            for i in range(microbatches):
                row[slot + 6 * i] = Pass(kind, stage, i)
        slots.append(row)
    return slots


def _pack(slots: Slots, microbatches: int, weights: bool) -> Slots:
    """Return the slots after passes of warm-up and cool-down have moved to the earliest free slots.

    Args:
        slots: for each rank {slot: the pass in it}.
        weights: whether there are W in `slots`. Without W only the cool-down is packed, and W are
            added to the result.
    """
    last = 2 * len(slots) - 1
    rows = [RankSlots(row, weights) for row in slots]
    at = {item: slot for row in slots for slot, item in row.items()}
    # The steady phase repeats the building block, which is packed already.
    steady = range(at[Pass(Kind.B, 0, 0)], at[Pass(Kind.F, 0, microbatches - 1)] + 1)
    # Ramps hold less than the steady phase. Up to its peak they may hold more, and be shorter.
    limit = max(held for row in rows for held, _ in row.states)
    for item, slot in sorted(at.items(), key=lambda entry: entry[1]):
        if slot in steady or (slot < steady.start and not weights):
            continue
        kind, stage, i, _ = item
        # The pass whose result this one takes.
        if kind is Kind.W:
            before = Pass(Kind.B, stage, i)
        elif kind is Kind.B and stage == last:
            before = Pass(Kind.F, stage, i)
        elif kind is Kind.B:
            before = Pass(kind, stage + 1, i)
        else:
            before = Pass(kind, stage - 1, i)
        earliest = 1 + max(at.get(before, -1), at.get(Pass(kind, stage, i - 1), -1))
        at[item] = rows[min(stage, last - stage)].move(slot, earliest, limit)
    packed_slots = [row.passes for row in rows]
    if not weights:
        packed_slots = _with_weights(packed_slots)
    return _squeezed(packed_slots, microbatches)


class RankSlots:
    """The passes of a rank by slot, with the memory after each slot.

    `move` moves a pass to an earlier slot, `move_pair` a B with its W. `states` has, after each
    slot, (microbatches held by both stages, W pending).

    Args:
        passes: {slot: the pass in it}.
        weights: whether there are W among the passes. If not, a W is assumed to run in each free
            slot, as long as W are pending.
    """

    def __init__(self, passes: dict[int, Pass], weights: bool) -> None:
        self.passes = dict(passes)
        self.weights = weights
        self.states = [(0, 0)] * (max(passes) + 1)
        self.states = self._after(0, len(self.states))

    def move(self, slot: int, earliest: int, limit: int) -> int:
        """Move the pass in `slot` to the first free slot that fits a memory limit.

        Args:
            earliest: the first slot that it may take.
            limit: most microbatches held after any slot.
        Returns: the new slot, or the old one if no slot fits.
        """
        item = self.passes.pop(slot)
        # Where the earliest slot exceeds the limit a later one may not: memory goes up and down.
        for free in range(earliest, slot):
            if free in self.passes:
                continue
            self.passes[free] = item
            states = self._after(free, slot)
            if max(held for held, _ in states) <= limit:
                self.states[free : free + len(states)] = states
                return free
            del self.passes[free]
        self.passes[slot] = item
        return slot

    def move_pair(self, slot: int, earliest: int) -> int:
        """Move the passes of `slot` and `slot` + 1 to the first two adjacent free slots.

        Args:
            earliest: the first slot that they may take.
        Returns: the first of the new slots.
        """
        first = self.passes.pop(slot)
        second = self.passes.pop(slot + 1)
        taken = self.passes.keys()
        free = next(s for s in range(earliest, slot + 1) if taken.isdisjoint((s, s + 1)))
        self.passes |= {free: first, free + 1: second}
        if free < slot:
            states = self._after(free, slot + 1)
            self.states[free : free + len(states)] = states
        return free

    def _after(self, first: int, last: int) -> list[tuple[int, int]]:
        """Return (microbatches held, W pending) after slot `first` and after each later slot.

        The list ends at the first entry after slot `last` that equals the same slot's entry in
        `states`: all later entries are equal too. If none is, it goes on to the last slot.

        Args:
            first, last: the first and the last slot in which the pass has changed.
        """
        held, owed = self.states[first - 1] if first else (0, 0)
        states = []
        for slot in range(first, len(self.states)):
            item = self.passes.get(slot)
            if item is not None:
                held += (item.kind is Kind.F) - (item.kind is Kind.W)
                owed += item.kind is Kind.B
            # Without W in the slots, a free one will have the oldest pending W.
            elif owed and not self.weights:
                held -= 1
                owed -= 1
            states.append((held, owed))
            # Later states are as before. Most of thousands of moves change only a few slots.
            if slot > last and states[-1] == self.states[slot]:
                break
        return states


def _squeezed(slots: Slots, microbatches: int) -> Slots:
    """Return the slots with every pass as early as it can run. The order of each rank stays.

    Args:
        slots: for each rank {slot: the pass in it}.
    """
    table = Schedule("packed", vee(len(slots)), microbatches, _steps(slots))
    # A stage of the V is half a device share, so a pass takes one unit of time: one slot.
    time = simulate(table, Costs(2, 2, 2))
    squeezed = []
    for row in slots:
        squeezed.append({round(time.start[item]): item for item in row.values()})
    return squeezed


def _with_weights(slots: Slots) -> Slots:
    """Return the slots with the W of each B added in free slots after it.

    If W of both stages of a rank are pending, the W of the stage with the larger number comes
    first.

    Args:
        slots: for each rank {slot: its F or B}.
    """
    filled = []
    for down, row in enumerate(slots):
        full = dict(row)
        owed_up = deque[Pass]()
        owed_down = deque[Pass]()
        slot = 0
        end = max(row)
        # W that are pending at the end of the row follow it.
        while slot <= end or owed_up or owed_down:
            item = row.get(slot)
            if item is None and (owed_up or owed_down):
                full[slot] = (owed_up or owed_down).popleft()
            elif item is not None and item.kind is Kind.B:
                owed = owed_down if item.stage == down else owed_up
                owed.append(item._replace(kind=Kind.W))
            slot += 1
        filled.append(full)
    return filled


def _without_weights(slots: Slots) -> Slots:
    """Return the slots without the W, so that these slots are free.

    Args:
        slots: for each rank {slot: the pass in it}.
    """
    without = []
    for row in slots:
        without.append({slot: item for slot, item in row.items() if item.kind is not Kind.W})
    return without


def _steps(slots: Slots) -> tuple[tuple[Step, ...], ...]:
    """Return each rank's steps: its passes in the order of their slots, one in each step.

    Args:
        slots: for each rank {slot: the pass in it}.
    """
    rows = []
    for row in slots:
        rows.append(tuple((row[slot],) for slot in sorted(row)))
    return tuple(rows)
