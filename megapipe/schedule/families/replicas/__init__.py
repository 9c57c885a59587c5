"""Copies of the optimizer's state in the memory of a peer (P), once a step and stage.

A rank that is lost takes its state back from there. Gemini (Wang et al. 2023, SOSP) and NVIDIA's
resiliency extension copy between steps. Here the copy is a pass of the table, in the gaps of the
step.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from megapipe.schedule.families.family import Family, PerStage
from megapipe.schedule.kinds import Kind
from megapipe.schedule.passes import Pass, Schedule


@dataclass(frozen=True, kw_only=True)
class ReplicaCosts:
    """The duration of P, a copy of a stage's state to the memory of a peer.

    Attributes:
        p: time of the copy, in the time unit of the costs. One number is for a device share, 1/p of
            the model on p ranks. A tuple has the value of each stage.
    """

    p: PerStage = 0.0


def with_replicas(schedule: Schedule) -> Schedule:
    """Return a table of one step with P, a copy of the state of each stage to a peer.

    P stands after V, which validates the last update, because V may still undo the update. Without
    V the passes P stand after the rank's first forward. Gathers of weights, which use the same
    stream, then come before them. Rows of two stages without V, then with V:

        A A | F P P F F F B W F B W ...        F F F F | V V P P | B W F B W ...

    A table that has P is returned unchanged.
    """
    if Kind.P in schedule.kinds:
        return schedule
    place = schedule.placement
    rows = []
    for rank, row in enumerate(schedule.ranks):
        kinds = [{x.kind for x in step} for step in row]
        checks = [i for i, found in enumerate(kinds) if Kind.V in found]
        at = next((i for i, found in enumerate(kinds) if Kind.F in found), -1)
        if checks:
            at = checks[-1]
        own = sorted(place.stages_on(rank), key=place.position)
        copies = tuple((Pass(Kind.P, stage, 0),) for stage in own)
        rows.append((*row[: at + 1], *copies, *row[at + 1 :]))
    return replace(schedule, ranks=tuple(rows))


def _late(schedule: Schedule, seen: Mapping[Pass, int]) -> Iterator[str]:
    """Yield a sentence for each P (copy of the state) that stands after its rank's first update.

    Such a P would copy a state that is half old and half new.

    Args:
        seen: {pass: index of its step in its rank's row}.
    """
    place = schedule.placement
    for x, step in seen.items():
        if x.kind is not Kind.P:
            continue
        rank = place.rank_of[x.stage]
        updates = {Pass(Kind.U, stage, x.microbatch) for stage in place.stages_on(rank)}
        if any(seen[y] < step for y in updates & seen.keys()):
            yield f"rank {rank}, step {step}, {x}: stands after an update of its rank"


REPLICAS = Family("replicas", frozenset({Kind.P}), problems=_late)
