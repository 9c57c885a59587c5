"""Dependencies between passes: what must be done before a pass starts, by the rows of `kinds`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import lru_cache
from itertools import pairwise, takewhile

from megapipe.schedule.families import FAMILIES
from megapipe.schedule.kinds import OF_SLICES, Kind, Made, Need, Where
from megapipe.schedule.passes import Pass, Schedule, Step


def _makers_of(made: Made) -> tuple[Kind, ...]:
    return tuple(kind for kind in Kind if made in kind.traits.makes)


_MAKERS: Mapping[Made, tuple[Kind, ...]] = {made: _makers_of(made) for made in Made}
# The clock finds these by arithmetic with keys, see `simulate._wire`. All others it looks up here.
_OF_MICROBATCH = {Where.OWN, Where.PREV, Where.NEXT, *OF_SLICES}


class Dependencies:
    """The dependencies of a table's passes.

    `of` returns the passes that one pass waits for.

    Args:
        schedule: the table; its passes are read once.
    """

    def __init__(self, schedule: Schedule) -> None:
        self._schedule = schedule
        self._there = {*schedule.passes()}
        # Needs of Where.RUN: only the order of a row says which run of passes a pass belongs to.
        self._of_rows = dict[tuple[Pass, Made], tuple[Pass, ...]]()
        for family in FAMILIES:
            self._of_rows.update(family.needs(schedule))
        self._before: dict[Pass, Pass] = {}
        for lane in schedule.shared:
            for before, item in pairwise(lane.order):
                self._before[item] = before

    def of(self, item: Pass, *, beyond: bool = False) -> list[Pass]:
        """Return the passes that must be done before `item`.

        A pass that `item` needs is returned even if the table lacks it, so that errors can name it.

        Args:
            beyond: leave out passes of `item`'s own microbatch.
        """
        makers: list[Pass] = []
        for need in self._schedule.needs[item.kind]:
            if not beyond or is_beyond(item.kind, need):
                makers += self._makers(item, need)
        # On a stream that several ranks share, copies run in one order over all these ranks.
        if item in self._before:
            makers.append(self._before[item])
        return makers

    def _makers(self, item: Pass, need: Need) -> Iterator[Pass]:
        if need.where is Where.RUN:
            yield from self._of_rows.get((item, need.made), ())
            return
        for stage in self._schedule.placement.needed(item.stage, need):
            for number in self._numbers(item, need, stage):
                makers = [Pass(kind, stage, *number) for kind in _MAKERS[need.made]]
                # Several kinds may produce a result: a gradient comes from B or from BW.
                there = next((maker for maker in makers if maker in self._there), None)
                # If the table lacks all of them, an error names the first: "waits for 1B0".
                if there is not None or not need.optional:
                    yield there or makers[0]

    def _numbers(self, item: Pass, need: Need, stage: int) -> list[tuple[int, int | None]]:
        """Return (microbatch or training step, slice) of the needed passes on one stage.

        The slice is None for a pass that is not of a slice.

        Args:
            item: the pass that has the need.
            need: a result that `item` needs.
            stage: stage of the passes that produce the result.
        """
        schedule = self._schedule
        number = item.microbatch - need.back
        piece = item.slice
        if need.where is Where.STEP:
            return [(item.microbatch // schedule.num_microbatches - need.back, None)]
        if need.where is Where.MICROBATCHES:
            carried = _carried(stage, number, schedule)
            return [(i, j) for i in carried for j in schedule.slices]
        if need.where not in OF_SLICES:
            return [(number, piece)]
        # Slices of a document attend to earlier ones, so F needs EARLIER and B needs LATER:
        #
        #     slice   0    1    2  |  3    4        F  0 -> 1 -> 2     3 -> 4
        #     document 0           |  1             B  0 <- 1 <- 2     3 <- 4
        own = piece or 0
        others = {
            Where.EARLIER: (own - 1,),
            Where.LATER: (own + 1,),
            Where.BEHIND: range(own + 1, len(schedule.cuts)),
        }
        document = schedule.document(item)
        return [(number, other) for other in others[need.where] if other in document]


@lru_cache(1)  # a table of several steps is simulated under several costs
def beyond_microbatch(schedule: Schedule) -> dict[Pass, list[Pass]]:
    """Return {pass: passes that it waits for and that are not of its own microbatch}.

    Passes that wait only for passes of their own microbatch are left out.
    """
    needs = Dependencies(schedule)
    found = {}
    for item in schedule.passes():
        if makers := needs.of(item, beyond=True):
            found[item] = makers
    return found


def wrong_documents(schedule: Schedule) -> str | None:
    """Return a sentence on an error in the table's `documents`; None if they are valid."""
    n = len(schedule.cuts)
    m = schedule.num_microbatches
    rows = schedule.documents
    if len(rows) not in (0, 1, m):
        return f"documents has {len(rows)} rows; it has one, or one for each of {m} microbatches"
    if any(rows) and n < 2:
        return (
            "documents begin at slices, but microbatches are not cut: leave out documents, "
            "or name several cuts"
        )
    # Slice 0 always begins a document, so a row that names it says the same thing twice.
    for row in rows:
        if list(row) != sorted({*row} & {*range(1, n)}):
            return (
                f"documents begin at slices {[*row]}: "
                f"name them in ascending order, from 1 to {n - 1}"
            )
    return None


def closed_prefix(schedule: Schedule) -> list[int]:
    """Return, for each rank, how many steps at the start of its row can run a second time.

    These steps depend on no other steps, of any rank, and they add to no gradient. They are the
    forwards at the start of a training step. Post-validation runs them again when it takes back an
    update.
    """
    needs = Dependencies(schedule)
    prefixes = []
    for row in schedule.ranks:
        prefixes.append([*takewhile(lambda step: all(can_repeat(x.kind) for x in step), row)])
    # A step outside the prefix removes the steps that depend on it, on any rank. Repeat until no
    # step is removed.
    while True:
        inside = {x for row in prefixes for step in row for x in step}

        def closed(step: Step, inside: set[Pass] = inside) -> bool:
            return all(inside.issuperset(needs.of(x)) for x in step)

        found = [[*takewhile(closed, row)] for row in prefixes]
        if found == prefixes:
            return [len(row) for row in prefixes]
        prefixes = found


def share_of_window(schedule: Schedule, n: int) -> tuple[frozenset[int], ...]:
    """Choose `n` microbatches (or slices) of every window. Return the chosen ones for each stage.

    The forwards of a stage are divided into windows, each of as many microbatches as the stage has
    in flight at most. The first n of each window are chosen, as Megatron-LM does with
    max_outstanding_backprops. With 3 in flight and n = 1, of microbatches 0 to 5 these are 0 and 3.
    Slices are numbered through all microbatches: of 4 slices each, slice 1 of microbatch 2 is
    number 9.
    """
    stages = schedule.placement.num_stages
    begun: list[list[int]] = [[] for _ in range(stages)]
    most = [0] * stages
    done = [0] * stages
    for item in schedule.passes():
        stage = item.stage
        if item.kind.is_forward:
            begun[stage].append(schedule.number(item))
            most[stage] = max(most[stage], len(begun[stage]) - done[stage])
        done[stage] += item.kind.is_backward
    chosen = []
    # Any 3 consecutive microbatches then have one chosen one, and never two.
    for order, window in zip(begun, most, strict=True):
        chosen.append(frozenset(m for i, m in enumerate(order) if i % window < n))
    return tuple(chosen)


def can_repeat(kind: Kind) -> bool:
    """Return whether a pass of this kind leaves the same state if it runs twice."""
    return kind.traits.evaluates or kind.traits.repeats


def is_beyond(kind: Kind, need: Need) -> bool:
    """Return whether a need of a pass reaches beyond the pass's own microbatch.

    This is so if the need refers to a whole stage, to other microbatches, or to a pass that not
    every microbatch has.

    Args:
        kind: the kind of the pass.
        need: the result that it needs.
    """
    return kind.traits.per_stage or need.optional or need.where not in _OF_MICROBATCH


def _carried(stage: int, step: int, schedule: Schedule) -> list[int]:
    """Return the numbers of the microbatches of a training step that run through a stage.

    These are all of them, or half of them if the placement has two chains, which are copies of the
    model.

    Args:
        step: number of the training step.
    """
    m = schedule.num_microbatches
    chain = stage // schedule.placement.chain
    return [i for i in range(step * m, (step + 1) * m) if schedule.chain_of(i) == chain]
