"""A building block repeated, its warm-up and cool-down packed into the slots that stay free.

Qi et al. 2024, "Pipeline Parallelism with Controllable Memory" (sec. 3: repeat, squeeze, reorder). In the steady middle
every slot is taken; in the ramps a pass goes to the earliest free slot behind its input that does not raise the peak.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from megapipe.schedule.costs import Costs
from megapipe.schedule.generators.waves import vee
from megapipe.schedule.passes import Kind, Pass, Schedule, Step
from megapipe.schedule.simulate import simulate


@dataclass(frozen=True)
class Block:
    """The slots of a rank's passes of microbatch 0; microbatch i runs 6 i later. Chunk 0 goes down, chunk 1 up."""

    f0: int
    f1: int
    b1: int
    b0: int

    def weights(self) -> tuple[int, int]:
        """Slots of (W0, W1): the first that stay free behind their B, the earlier B first."""
        taken = {slot % 6 for slot in (self.f0, self.f1, self.b1, self.b0)}
        slots = {}
        for backward in sorted((self.b0, self.b1)):
            slot = next(s for s in range(backward + 1, backward + 7) if s % 6 not in taken)
            taken.add(slot % 6)
            slots[backward] = slot
        return slots[self.b0], slots[self.b1]


def packed(blocks: Sequence[Block], microbatches: int) -> tuple[tuple[Step, ...], ...]:
    """The steps of each rank.

    First warm-up and cool-down are packed with each W in its slot; then the cool-down once more without W, which take
    what F and B leave.
    """
    slots = _pack(_with_weights(_repeated(blocks, microbatches)), microbatches, weights=True)
    slots = _pack(_without_weights(slots), microbatches, weights=False)
    return _steps(_with_weights(_without_weights(slots)))


Slots = list[dict[int, Pass]]
"""The pass in each slot that is taken, for each rank."""


def _repeated(blocks: Sequence[Block], microbatches: int) -> Slots:
    slots: Slots = []
    for down, block in enumerate(blocks):
        up = 2 * len(blocks) - 1 - down
        passes = (
            (block.f0, Kind.F, down),
            (block.f1, Kind.F, up),
            (block.b1, Kind.B, up),
            (block.b0, Kind.B, down),
        )
        slots.append(
            {
                s + 6 * i: Pass(kind, stage, i)
                for s, kind, stage in passes
                for i in range(microbatches)
            }
        )
    return slots


def _pack(slots: Slots, microbatches: int, weights: bool) -> Slots:
    """Passes of the ramps go to the earliest free slot; of the cool-down alone if there are no `weights`."""
    last = 2 * len(slots) - 1
    rows = [RankSlots(row, weights) for row in slots]
    at = {item: slot for row in slots for slot, item in row.items()}
    # The middle repeats and is packed by its building block: only the ramps have room.
    steady = range(at[Pass(Kind.B, 0, 0)], at[Pass(Kind.F, 0, microbatches - 1)] + 1)
    limit = max(held for row in rows for held, _ in row.states)
    for item, slot in sorted(at.items(), key=lambda entry: entry[1]):
        if slot in steady or (slot < steady.start and not weights):
            continue
        kind, stage, i, _ = item
        before = Pass(kind, stage - 1 if kind is Kind.F else stage + 1, i)
        if kind is Kind.W or (kind is Kind.B and stage == last):
            before = Pass(Kind.B if kind is Kind.W else Kind.F, stage, i)
        earliest = 1 + max(at.get(before, -1), at.get(Pass(kind, stage, i - 1), -1))
        at[item] = rows[min(stage, last - stage)].move(slot, earliest, limit)
    packed_slots = [row.passes for row in rows]
    return _squeezed(packed_slots if weights else _with_weights(packed_slots), microbatches)


class RankSlots:
    """The slots of a rank, and (microbatches of a stage held, W owed) after each of them.

    Without `weights` each free slot pays a W that is owed.
    """

    def __init__(self, passes: dict[int, Pass], weights: bool) -> None:
        self.passes, self.weights = dict(passes), weights
        self.states = [(0, 0)] * (max(passes) + 1)
        self.states = self._after(0, len(self.states))

    def move(self, slot: int, earliest: int, limit: int) -> int:
        """The place of a slot's pass: the first free slot from `earliest` on that keeps to the limit, or none."""
        item = self.passes.pop(slot)
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
        """The place of the passes of a slot and the next: the first two free slots in a row."""
        first, second = self.passes.pop(slot), self.passes.pop(slot + 1)
        free = next(
            s
            for s in range(earliest, slot + 1)
            if s not in self.passes and s + 1 not in self.passes
        )
        self.passes |= {free: first, free + 1: second}
        if free < slot:
            states = self._after(free, slot + 1)
            self.states[free : free + len(states)] = states
        return free

    def _after(self, first: int, last: int) -> list[tuple[int, int]]:
        """States from slot `first` on, until beyond `last` nothing changes."""
        held, owed = self.states[first - 1] if first else (0, 0)
        states = []
        for slot in range(first, len(self.states)):
            item = self.passes.get(slot)
            if item is None:
                if owed and not self.weights:
                    held, owed = held - 1, owed - 1
            else:
                held += (item.kind is Kind.F) - (item.kind is Kind.W)
                owed += item.kind is Kind.B
            states.append((held, owed))
            # As before from here on: most moves change a few slots, and there are thousands.
            if slot > last and states[-1] == self.states[slot]:
                break
        return states


def _squeezed(slots: Slots, microbatches: int) -> Slots:
    """Slots in the same order, every pass as soon as it can; a slot is one unit of time."""
    time = simulate(
        Schedule("packed", vee(len(slots)), microbatches, _steps(slots)), Costs(2, 2, 2)
    )
    return [{round(time.start[item]): item for item in row.values()} for row in slots]


def _with_weights(slots: Slots) -> Slots:
    """W in the slots that are free behind their B; of two owed that of the stage that goes up, which came first."""
    filled = []
    for down, row in enumerate(slots):
        full, owed_up, owed_down = dict(row), deque[Pass](), deque[Pass]()
        slot, end = 0, max(row)
        while slot <= end or owed_up or owed_down:
            item = row.get(slot)
            if item is None and (owed_up or owed_down):
                full[slot] = (owed_up or owed_down).popleft()
            elif item is not None and item.kind is Kind.B:
                (owed_down if item.stage == down else owed_up).append(item._replace(kind=Kind.W))
            slot += 1
        filled.append(full)
    return filled


def _without_weights(slots: Slots) -> Slots:
    return [{slot: item for slot, item in row.items() if item.kind is not Kind.W} for row in slots]


def _steps(slots: Slots) -> tuple[tuple[Step, ...], ...]:
    return tuple(tuple((row[slot],) for slot in sorted(row)) for row in slots)
