"""Dependencies: the passes of a table that must be done before a pass can start, by the rules of `kinds`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import pairwise

from megapipe.schedule.families import FAMILIES
from megapipe.schedule.kinds import OF_SLICES, Kind, Made, Need, Where
from megapipe.schedule.passes import Pass, Schedule

_MAKERS: Mapping[Made, tuple[Kind, ...]] = {
    made: tuple(kind for kind in Kind if made in kind.traits.makes) for made in Made
}
_OF_MICROBATCH = {Where.OWN, Where.PREV, Where.NEXT, *OF_SLICES}


class Dependencies:
    """The needs of a table's passes.

    Args:
        schedule: the table; its passes are looked at once.
    """

    def __init__(self, schedule: Schedule) -> None:
        self._schedule = schedule
        self._there = {*schedule.passes()}
        self._of_rows = dict[tuple[Pass, Made], tuple[Pass, ...]]()
        for family in FAMILIES:
            self._of_rows.update(family.needs(schedule))
        self._before = {item: before for lane in schedule.shared for before, item in pairwise(lane.order)}

    def of(self, item: Pass, *, beyond: bool = False) -> list[Pass]:
        """The passes that must be done before `item`; those that the table lacks are among them, as B, W, ...

        beyond: only those that are not of its own microbatch.
        """
        needs = self._schedule.needs[item.kind]
        wanted = [need for need in needs if is_beyond(item.kind, need)] if beyond else needs
        makers = [maker for need in wanted for maker in self._makers(item, need)]
        return [*makers, self._before[item]] if item in self._before else makers

    def beyond_microbatch(self) -> dict[Pass, list[Pass]]:
        """The needs of each pass that are not of its own microbatch."""
        return {item: makers for item in self._there if (makers := self.of(item, beyond=True))}

    def _makers(self, item: Pass, need: Need) -> Iterator[Pass]:
        if need.where is Where.RUN:
            yield from self._of_rows.get((item, need.made), ())
            return
        for stage in self._schedule.placement.needed(item.stage, need):
            for number in self._numbers(item, need, stage):
                makers = [Pass(kind, stage, *number) for kind in _MAKERS[need.made]]
                # A result may come of one of several kinds: a gradient of B, or of BW.
                there = next((maker for maker in makers if maker in self._there), None)
                if there is not None or not need.optional:
                    yield there or makers[0]

    def _numbers(self, item: Pass, need: Need, stage: int) -> list[tuple[int, int | None]]:
        """The microbatches, or steps, and slices that are meant."""
        schedule, number, piece = self._schedule, item.microbatch - need.back, item.slice
        if need.where is Where.STEP:
            return [(item.microbatch // schedule.num_microbatches - need.back, None)]
        if need.where is Where.MICROBATCHES:
            return [(i, j) for i in _carried(stage, number, schedule) for j in schedule.slices]
        if need.where is Where.BEHIND:
            return [(number, n) for n in schedule.document(item) if n > (piece or 0)]
        if need.where in OF_SLICES:
            piece = (piece or 0) + (1 if need.where is Where.LATER else -1)
            return [(number, piece)] if piece in schedule.document(item) else []
        return [(number, piece)]


def wrong_documents(schedule: Schedule) -> str | None:
    """The reason why documents cannot begin where the table says."""
    n, rows = len(schedule.cuts), schedule.documents
    if len(rows) not in (0, 1, m := schedule.num_microbatches):
        return f"documents has {len(rows)} rows; it has one, or one for each of {m} microbatches"
    if any(rows) and n < 2:
        return "documents begin at slices, but microbatches are not cut: leave out documents, or name several cuts"
    for row in rows:
        if list(row) != sorted({*row} & {*range(1, n)}):
            return f"documents begin at slices {[*row]}: name them in ascending order, from 1 to {n - 1}"
    return None


def closed_prefix(schedule: Schedule) -> list[int]:
    """The number of each rank's first steps that all ranks together can run a second time.

    They write no gradient, and what they need of any rank is among those of that rank: the forwards at the beginning of
    a step, which are run again when the weights under them turn out to be wrong.
    """
    needs = Dependencies(schedule)
    cuts = [
        next((i for i, step in enumerate(row) if not all(can_repeat(x.kind) for x in step)), len(row))
        for row in schedule.ranks
    ]
    # A step that is cut off takes those with it that need it, on any rank: again until none falls.
    while True:
        inside = {x for row, cut in zip(schedule.ranks, cuts, strict=True) for step in row[:cut] for x in step}
        open_at = [
            next(
                (i for i, step in enumerate(row[:cut]) if any(n not in inside for x in step for n in needs.of(x))), cut
            )
            for row, cut in zip(schedule.ranks, cuts, strict=True)
        ]
        if open_at == cuts:
            return cuts
        cuts = open_at


def share_of_window(schedule: Schedule, n: int) -> tuple[frozenset[int], ...]:
    """The microbatches of each stage that are n of those it has between F and B, whenever it has the most.

    Megatron-LM's choice among outstanding microbatches (max_outstanding_backprops): the first n of every window.
    """
    begun: list[list[int]] = [[] for _ in range(schedule.placement.num_stages)]
    most, done = [0] * len(begun), [0] * len(begun)
    for item in schedule.passes():
        kind, stage = item[:2]
        if kind.is_forward:
            begun[stage].append(schedule.number(item))
            most[stage] = max(most[stage], len(begun[stage]) - done[stage])
        done[stage] += kind.is_backward
    return tuple(
        frozenset(m for i, m in enumerate(order) if i % window < n) for order, window in zip(begun, most, strict=True)
    )


def can_repeat(kind: Kind) -> bool:
    """Does a second run of such a pass leave what the first did?"""
    return kind.traits.evaluates or kind.traits.repeats


def is_beyond(kind: Kind, need: Need) -> bool:
    """Is it of another pass than of the same microbatch, or one that not every microbatch has?"""
    return kind.traits.per_stage or need.optional or need.where not in _OF_MICROBATCH


def _carried(stage: int, step: int, schedule: Schedule) -> list[int]:
    """The microbatches of a step that run through a stage."""
    m, chain = schedule.num_microbatches, stage // schedule.placement.chain
    return [i for i in range(step * m, (step + 1) * m) if schedule.chain_of(i) == chain]
