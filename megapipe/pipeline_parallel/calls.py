"""Look up everything that the executor needs of each pass of a program, once for all steps."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

from megapipe.pipeline_parallel.families import FAMILIES
from megapipe.pipeline_parallel.messages.messenger import receive_ahead
from megapipe.pipeline_parallel.messages.transport import Ahead
from megapipe.schedule import Exchange, Pass, Placement, Program, Schedule
from megapipe.schedule.dependencies import Dependencies
from megapipe.schedule.kinds import Lane


class Call(NamedTuple):
    """A pass of a rank, with all that the executor needs in order to run it.

    Attributes:
        item: the pass.
        number: the number with which the stage's method is called: of the microbatch or, if
            microbatches are cut, of the slice among all slices. For a pass on weights it is the
            number of the step.
        takes: the passes whose results are the pass's inputs, each as (pass, rank that runs it).
            This is () for W and for passes on weights. Unless ranks share the vocabulary, it is ()
            for the first stage's forward and the last stage's backward too.
        gives: how often the pass's result is used on this rank: once for each pass that takes it,
            and for each send.
        leaves: the results in `takes` that came from other ranks and that a later pass of this rank
            takes too. These results are not freed after this pass.
        ends: whether this is the stage's last pass of any microbatch on the compute stream. Passes
            on weights and on other streams do not count, and may follow.
        overlaps: whether the pass runs on another stream than compute, so at the same time as other
            passes.
        before: functions called with the stage before the pass begins; families of passes add them.
        after: functions called with the stage after the pass. If it runs together with another
            pass, they are called after both.
        awaits: passes on other streams that must end before this pass begins, and whose results it
            does not take.
    """

    item: Pass
    number: int
    takes: tuple[tuple[Pass, int], ...]
    gives: int
    leaves: frozenset[Pass]
    ends: bool
    overlaps: bool
    before: tuple[Callable[[Any], None], ...]
    after: tuple[Callable[[Any], None], ...]
    awaits: tuple[Pass, ...]


# Programs of a run: training and evaluation of each batch size, and of each table that it tries.
@lru_cache(maxsize=64)
def looked_up(
    program: Program, placement: Placement, rank: int, ahead: Ahead
) -> tuple[tuple[Call, ...] | Exchange, ...]:
    """Return one rank's program with each pass as a `Call`, which names the inputs of the pass.

    An item of the result is either a tuple of calls that run together, usually one, or an
    `Exchange`: messages that are posted together.

    Args:
        program: the rank's program.
        placement: the rank of each stage.
        rank: the pipeline rank.
        ahead: says which receives are posted before their place in the program.
    """
    items = receive_ahead(program, rank, ahead)
    passes = [p for item in items if not isinstance(item, Exchange) for p in item]
    messages = [m for item in items if isinstance(item, Exchange) for m in item.messages]
    arriving = [m.made_by for m in messages if m.src != rank]
    # Received tensors are in the program as messages alone: their passes run on other ranks.
    made = {(p.kind.traits.makes[0], *p[1:]): p for p in [*passes, *(m.made_by for m in messages)]}
    table = _table(passes, arriving, placement)
    takes: dict[Pass, list[Pass]] = {}
    for p in passes:
        links = table.links[p[:2]].takes
        takes[p] = [made[what, stage, *p[2:]] for what, stage in links]
    uses = Counter(m.made_by for m in messages if m.src == rank)
    for taken in takes.values():
        uses.update(taken)
    leaves = _taken_again_later(takes, set(arriving))
    # Later passes overwrite earlier ones, so each stage's last pass of a microbatch stays.
    last: dict[int, Pass] = {}
    overlapping: set[Pass] = set()
    for p in passes:
        if p.kind.traits.lane is not Lane.COMPUTE:
            overlapping.add(p)
        elif not p.kind.traits.per_stage:
            last[p.stage] = p
    needs = Dependencies(table)
    around = [family.around(table) for family in FAMILIES]

    # Some needs have no result that is handed over: a gather needs an update. Where the needed pass
    # runs on another stream, it must be waited for by name.
    def awaited(p: Pass) -> Iterator[Pass]:
        if not overlapping:
            return
        lane = p.kind.traits.lane
        for need in needs.of(p):
            other = need in overlapping and need.kind.traits.lane is not lane
            if other and need not in takes[p]:
                yield need

    def call(p: Pass) -> Call:
        return Call(
            item=p,
            number=table.number(p),
            takes=tuple((one, placement.rank_of[one.stage]) for one in takes[p]),
            gives=uses[p],
            leaves=leaves[p],
            ends=last.get(p.stage) == p,
            overlaps=p in overlapping,
            before=tuple(one.before[p] for one in around if p in one.before),
            after=tuple(one.after[p] for one in around if p in one.after),
            awaits=tuple(awaited(p)),
        )

    return tuple(item if isinstance(item, Exchange) else tuple(map(call, item)) for item in items)


def _taken_again_later(
    takes: Mapping[Pass, Sequence[Pass]], received: set[Pass]
) -> dict[Pass, frozenset[Pass]]:
    """Return {pass: the results of other ranks that it takes and a later pass takes too}.

    Args:
        takes: {pass: the passes whose results it takes}, in the order of the program.
        received: the passes of other ranks whose results arrive here.
    """
    found: dict[Pass, frozenset[Pass]] = {}
    later: set[Pass] = set()
    # From the end, so that `later` has the results that later passes take.
    for one in reversed(list(takes)):
        taken = received.intersection(takes[one])
        found[one] = frozenset(taken & later)
        later |= taken
    return found


def _table(passes: Sequence[Pass], sent: Sequence[Pass], placement: Placement) -> Schedule:
    """Return a schedule of one rank's passes, to look up the inputs and dependencies of each.

    Args:
        passes: this rank's passes, the first row of the schedule.
        sent: passes of other ranks whose results this rank receives, the second row.
        placement: the rank of each stage.
    """
    # The program does not say how many microbatches and slices the step has. Its passes do. Links
    # and needs depend on the numbers alone, so cuts of any length will do.
    numbers = [p.microbatch for p in passes if not p.kind.traits.per_stage]
    slices = 1 + max((p.slice for p in passes if p.slice is not None), default=-1)
    rows = tuple(tuple((p,) for p in row) for row in (passes, sent))
    return Schedule("", placement, 1 + max(numbers, default=0), rows, cuts=(1.0,) * slices)
