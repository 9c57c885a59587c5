"""A program with everything looked up that the executor needs of each pass."""

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
    """A pass as the engine needs it.

    Attributes:
        number: of its microbatch or step; where these are cut, of its slice among all.
        takes: the passes whose results it uses, each with the rank that it is made on; none at an end of the model, and
            for W.
        gives: how often its result is used here, by passes and by messages.
        leaves: what it takes of another rank that a later pass takes too.
        ends: is it the last pass of a microbatch on its stage?
        beside: does it run on another lane than compute?
        before, after: what families do on its stage before it begins, and after its step.
        awaits: passes beside it, of another lane than its own, that must have ended before it begins.
    """

    item: Pass
    number: int
    takes: tuple[tuple[Pass, int], ...]
    gives: int
    leaves: frozenset[Pass]
    ends: bool
    beside: bool
    before: tuple[Callable[[Any], None], ...]
    after: tuple[Callable[[Any], None], ...]
    awaits: tuple[Pass, ...]


@lru_cache(maxsize=64)
def looked_up(
    program: Program, placement: Placement, rank: int, ahead: Ahead
) -> tuple[tuple[Call, ...] | Exchange, ...]:
    """The program with everything looked up that does not change from step to step."""
    items = receive_ahead(program, rank, ahead)
    passes = [p for item in items if not isinstance(item, Exchange) for p in item]
    messages = [m for item in items if isinstance(item, Exchange) for m in item.messages]
    # Received tensors stand in the program as messages alone: the passes that made them are on other ranks.
    made = {(p.kind.traits.makes[0], *p[1:]): p for p in [*passes, *(m.made_by for m in messages)]}
    table = _table(passes, [m.made_by for m in messages if m.src != rank], placement)
    takes = {p: [made[what, s, *p[2:]] for what, s in table.links[p[:2]].takes] for p in passes}
    uses = Counter([*(p for taken in takes.values() for p in taken), *(m.made_by for m in messages if m.src == rank)])
    leaves = _not_for_the_last_time(takes, {m.made_by for m in messages if m.src != rank})
    # Later ones overwrite: what stays is each stage's last pass of a microbatch.
    last = {p.stage: p for p in passes if p.kind.traits.lane is Lane.COMPUTE and not p.kind.traits.per_stage}
    beside = {p for p in passes if p.kind.traits.lane is not Lane.COMPUTE}
    needs = Dependencies(table)
    around = [family.around(table) for family in FAMILIES]

    # A need on another lane whose result is not handed over, such as an update before a gather, is waited for by name.
    def awaited(p: Pass) -> Iterator[Pass]:
        for need in needs.of(p) if beside else ():
            if need in beside and need.kind.traits.lane is not p.kind.traits.lane and need not in takes[p]:
                yield need

    def call(p: Pass) -> Call:
        taken = tuple((one, placement.rank_of[one.stage]) for one in takes[p])
        before = tuple(one.before[p] for one in around if p in one.before)
        after = tuple(one.after[p] for one in around if p in one.after)
        own = last.get(p.stage) == p, p in beside
        return Call(p, table.number(p), taken, uses[p], leaves[p], *own, before, after, tuple(awaited(p)))

    return tuple(item if isinstance(item, Exchange) else tuple(map(call, item)) for item in items)


def _not_for_the_last_time(takes: Mapping[Pass, Sequence[Pass]], received: set[Pass]) -> dict[Pass, frozenset[Pass]]:
    """The results of other ranks that each pass takes and a later one too. takes: by pass, in their order."""
    found, later = {}, set[Pass]()
    for one in reversed(list(takes)):
        taken = received.intersection(takes[one])
        found[one] = frozenset(taken & later)
        later |= taken
    return found


def _table(passes: Sequence[Pass], sent: Sequence[Pass], placement: Placement) -> Schedule:
    """The passes of one rank in one step, and behind them those whose results it is sent, as a table."""
    numbers = [p.microbatch for p in passes if not p.kind.traits.per_stage]
    slices = 1 + max((p.slice for p in passes if p.slice is not None), default=-1)
    rows = tuple(tuple((p,) for p in row) for row in (passes, sent))
    return Schedule("", placement, 1 + max(numbers, default=0), rows, cuts=(1.0,) * slices)
