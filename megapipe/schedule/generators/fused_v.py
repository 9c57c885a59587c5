"""1F1B-V: 1F1B on the V, the building block of V-Half and V-Min with a fused backward.

Qi et al. 2024, "Pipeline Parallelism with Controllable Memory" (sec. 4 and appendix). Without a W
to defer, two thirds of 1F1B's memory are enough for a steady phase without waits.
"""

from __future__ import annotations

from megapipe.schedule.generators.packing import RankSlots
from megapipe.schedule.passes import Kind, Pass, Schedule
from megapipe.schedule.placement import vee


def one_f_one_b_v(ranks: int, microbatches: int) -> Schedule:
    """Return 1F1B-V for p ranks: two thirds of 1F1B's memory, and at F = B = W a shorter bubble.

    A rank holds (2p+2)//3 microbatches, one more if 3 divides p. The bubble is (p-1)(F+B+W)/2 and
    some waits in warm-up and cool-down, together about 0.8 of 1F1B's.
    """
    last = 2 * ranks - 1
    rows = _repeated(ranks, microbatches)
    # B and its W have a slot each here, and become one BW at the end.
    at = {item: slot for row in rows for slot, item in row.passes.items()}
    # No move may raise the peak of the steady phase.
    limit = max(held for row in rows for held, _ in row.states)
    # Move each pass to the earliest slot after its inputs, in the order of the slots.
    for item, slot in sorted(at.items(), key=lambda entry: entry[1]):
        kind, stage, i, _ = item
        row = rows[min(stage, last - stage)]
        if kind is Kind.F:
            inputs = at.get(Pass(kind, stage - 1, i), -1), at.get(Pass(kind, stage, i - 1), -1)
            at[item] = row.move(slot, 1 + max(inputs), limit)
        elif kind is Kind.B:
            # W keeps the slot after its B: the two become one fused backward.
            own = Pass(Kind.W, stage + 1, i)
            if stage == last:
                own = Pass(Kind.F, stage, i)
            previous = at.get(Pass(Kind.W, stage, i - 1), -1)
            at[item] = row.move_pair(slot, 1 + max(at[own], previous))
            at[Pass(Kind.W, stage, i)] = at[item] + 1
    fused = []
    for row in rows:
        steps = []
        for slot in sorted(row.passes):
            item = row.passes[slot]
            if item.kind is Kind.B:
                item = item._replace(kind=Kind.BW)
            if item.kind is not Kind.W:
                steps.append((item,))
        fused.append(tuple(steps))
    return Schedule("1f1b-v", vee(ranks), microbatches, tuple(fused))


def _repeated(ranks: int, microbatches: int) -> list[RankSlots]:
    """Return each rank's passes by slot of time, with a building block repeated every 6 slots.

    Microbatch i runs 6 i slots after microbatch 0. Forwards follow each other directly. A backward
    takes two slots, here a B and a W. Every third backward comes three slots later, so that no two
    passes of a rank share a slot.
    """
    last = 2 * ranks - 1
    slots: list[dict[int, Pass]] = [{} for _ in range(ranks)]
    # `now` is the slot of a stage's first B. Rank 0 has F of stage 0 in the slots that 6 divides.
    # So its first B must not be in slot 2p if 3 divides p.
    now = 2 * ranks + 3 * (ranks % 3 == 0)
    for n, stage in enumerate(range(last, -1, -1)):
        row = slots[min(stage, last - stage)]
        for i in range(microbatches):
            row[stage + 6 * i] = Pass(Kind.F, stage, i)
            row[now + 6 * i] = Pass(Kind.B, stage, i)
            # The second slot of the backward. Until the end it counts as W, which frees the memory.
            row[now + 6 * i + 1] = Pass(Kind.W, stage, i)
        now += 2 + 3 * ((n + 1 - ranks - 2) % 3 == 0)
    return [RankSlots(row, weights=True) for row in slots]
