"""A program with everything looked up that the executor needs of each pass."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import NamedTuple

from megapipe.pipeline_parallel.messages.messenger import receive_ahead
from megapipe.pipeline_parallel.messages.transport import Ahead
from megapipe.schedule import Exchange, Pass, Placement, Program
from megapipe.schedule.kinds import Lane, Where


class Call(NamedTuple):
    """A pass as the engine needs it.

    Attributes:
        takes: the passes whose results it uses, each with the rank that it is made on; none at an end of the model, and
            for W.
        gives: how often its result is used here, by passes and by messages.
        ends: is it the last pass of a microbatch on its stage?
        awaits: passes of other lanes that must have ended.
    """

    item: Pass
    takes: tuple[tuple[Pass, int], ...]
    gives: int
    ends: bool
    awaits: tuple[Pass, ...]


@lru_cache(maxsize=64)
def looked_up(
    program: Program, placement: Placement, rank: int, ahead: Ahead
) -> tuple[tuple[Call, ...] | Exchange, ...]:
    """The program with everything looked up that does not change from step to step."""
    items = receive_ahead(program, rank, ahead)
    passes = [p for item in items if not isinstance(item, Exchange) for p in item]
    messages = [m for item in items if isinstance(item, Exchange) for m in item.messages]
    made = {(p.kind.rule.makes[0], p.stage, p.microbatch): p for p in [*passes, *(m.made_by for m in messages)]}
    takes = {p: [made[what, stage, p.microbatch] for what, stage in placement.sources(p)] for p in passes}
    uses = Counter([*(p for taken in takes.values() for p in taken), *(m.made_by for m in messages if m.src == rank)])
    last = {p.stage: p for p in passes if not p.kind.rule.per_stage}
    beside = [p for p in passes if p.kind.rule.lane is not Lane.COMPUTE]

    def call(p: Pass) -> Call:
        taken = tuple((one, placement.rank_of[one.stage]) for one in takes[p])
        return Call(p, taken, uses[p], last.get(p.stage) == p, tuple(_awaited(p, beside)))

    return tuple(item if isinstance(item, Exchange) else tuple(map(call, item)) for item in items)


def _awaited(item: Pass, beside: Sequence[Pass]) -> Iterator[Pass]:
    """Of the passes on other lanes those whose results a pass needs: its stage's own, or any if it needs all."""
    for need in item.kind.rule.needs:
        own = need.where is Where.STEP
        yield from (p for p in beside if need.made in p.kind.rule.makes and (p.stage == item.stage or not own))
