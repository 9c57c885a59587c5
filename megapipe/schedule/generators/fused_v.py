"""1F1B on the V: the block of V-Half and V-Min with the backward left whole.

Qi et al. 2024, "Pipeline Parallelism with Controllable Memory" (sec. 4 and appendix). Without W to put off, two thirds
of 1F1B's memory is what a V needs for a full middle.
"""

from __future__ import annotations

from megapipe.schedule.generators.packing import RankSlots
from megapipe.schedule.generators.waves import vee
from megapipe.schedule.passes import Kind, Pass, Schedule


def one_f_one_b_v(ranks: int, microbatches: int) -> Schedule:
    """Memory (2p+2)//3, one more where 3 divides p; bubble about (p-1)(F+B+W)/2 and what its ramps lose."""
    stages, rows = 2 * ranks, _repeated(ranks, microbatches)
    at = {item: slot for row in rows for slot, item in row.passes.items()}
    limit = max(held for row in rows for held, _ in row.states)
    for item, slot in sorted(at.items(), key=lambda entry: entry[1]):
        kind, stage, i, _ = item
        row = rows[min(stage, stages - 1 - stage)]
        if kind is Kind.F:
            inputs = at.get(Pass(kind, stage - 1, i), -1), at.get(Pass(kind, stage, i - 1), -1)
            at[item] = row.move(slot, 1 + max(inputs), limit)
        elif kind is Kind.B:  # and its W right behind it
            own = Pass(Kind.F, stage, i) if stage == stages - 1 else Pass(Kind.W, stage + 1, i)
            at[item] = row.move_pair(slot, 1 + max(at[own], at.get(Pass(Kind.W, stage, i - 1), -1)))
            at[Pass(Kind.W, stage, i)] = at[item] + 1
    orders = [[row.passes[slot] for slot in sorted(row.passes)] for row in rows]
    fused = [
        [x._replace(kind=Kind.BW) if x.kind is Kind.B else x for x in row if x.kind is not Kind.W]
        for row in orders
    ]
    return Schedule(
        "1f1b-v", vee(ranks), microbatches, tuple(tuple((x,) for x in row) for row in fused)
    )


def _repeated(ranks: int, microbatches: int) -> list[RankSlots]:
    """Forwards one slot after the other, backwards two slots each; every third one waits, so that periods of 6 fit."""
    stages = 2 * ranks
    slots: list[dict[int, Pass]] = [{} for _ in range(ranks)]
    now = stages + 3 * (ranks % 3 == 0)
    for n, stage in enumerate(reversed(range(stages))):
        row = slots[min(stage, stages - 1 - stage)]
        for i in range(microbatches):
            row[stage + 6 * i] = Pass(Kind.F, stage, i)
            row[now + 6 * i] = Pass(Kind.B, stage, i)
            row[now + 6 * i + 1] = Pass(Kind.W, stage, i)
        now += 2 + 3 * ((n + 1 - ranks - 2) % 3 == 0)
    return [RankSlots(row, weights=True) for row in slots]
