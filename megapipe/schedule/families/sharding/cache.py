"""The full stages of a rank as a cache of a few places, whose future uses are all known.

The row says every use ahead. So the stage that leaves is the one whose next use is farthest (Belady
1966), which makes the fewest gathers.

Three stages of one rank with places for two. Breadth-first runs 2 microbatches forward, then
backward, and gathers four times. Stage 1 is still there for its backwards:

    stage used   0 0   1 1   2 2   2 2   1 1   0 0
    place 1      0 0         2 2   2 2         0 0
    place 2            1 1   1 1   1 1   1 1
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace


@dataclass(frozen=True)
class Stay:
    """An interval of a rank's row in which the full weights or gradient of a stage are held.

    Attributes:
        stage: the number of the stage.
        first, last: indices in the row of the steps with its first and last use.
        room: index of the step after which this stage has room, because another stage was dropped;
            -1 for the start of the row.
    """

    stage: int
    first: int
    last: int
    room: int


def stays(uses: Sequence[set[int]], places: int, *, ahead: bool = False) -> list[Stay]:
    """Return the intervals of a rank's row in which full weights or gradients of stages are held.

    Stages are evicted as from a cache of limited size: the one needed last goes first.

    Args:
        uses: for each step of the row, the stages that it uses.
        places: number of stages that may be held at a time. A step that uses more holds more.
        ahead: do not evict stages that the previous step used, if another can be. A gather into
            their memory would have to wait for the end of that step.
    """
    # The steps of each stage's future uses, the next one last.
    coming: dict[int, list[int]] = {}
    for i in reversed(range(len(uses))):
        for stage in uses[i]:
            coming.setdefault(stage, []).append(i)
    found: list[Stay] = []
    there: dict[int, Stay] = {}
    # The steps after which places have become free.
    free = [-1] * places
    recent: set[int] = set()
    for i, used in enumerate(uses):
        kept: set[int] = set()
        if ahead:
            kept = recent
        for stage in sorted(used):
            coming[stage].pop()
            if stage in there:
                there[stage] = replace(there[stage], last=i)
                continue
            while len(there) >= places:
                gone = _farthest(there, coming, used, kept)
                if gone < 0:
                    break
                found.append(there.pop(gone))
                # Not after a step that used more stages than there are places.
                if len(there) + len(free) < places:
                    free.append(found[-1].last)
            # The place that has been free longest. A step with more stages than places has none.
            room = i - 1
            if free:
                room = min(free)
                free.remove(room)
            there[stage] = Stay(stage, i, i, room)
        # A stage without a further use leaves at once.
        for stage in [stage for stage in there if not coming[stage]]:
            found.append(there.pop(stage))
            if len(there) + len(free) < places:
                free.append(found[-1].last)
        recent = used or recent
    return found


def _farthest(
    there: dict[int, Stay], coming: dict[int, list[int]], used: set[int], recent: set[int]
) -> int:
    """Return the stage to evict: the one whose next use is farthest; -1 if all are in use.

    Args:
        there: {stage: its interval so far} for the stages that are held now.
        coming: {stage: indices of the steps that use it in future, the next one last}.
        used: stages that this step uses.
        recent: stages that the previous step used. These are evicted only if there is no other.
    """
    candidates = [stage for stage in there if stage not in used]
    candidates = [stage for stage in candidates if stage not in recent] or candidates
    return max(candidates, key=lambda stage: coming[stage][-1], default=-1)
