"""The rules of gathers and reductions of runs: before the first use, once, behind the last gradient, none forgotten."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from megapipe.schedule.families.sharding.runs import (
    GATHERS,
    REDUCES,
    SHARDS,
    Run,
    Sum,
    adds_gradients,
    reads_weights,
    runs,
    sums,
)
from megapipe.schedule.kinds import Kind
from megapipe.schedule.passes import Pass, Schedule


def weight_problems(schedule: Schedule, seen: Mapping[Pass, int]) -> Iterator[str]:
    """Mistakes of gathers and reductions, given the step of each pass in its row.

    Nothing is said of the order in which replicas meet: all of a data-parallel group run one table, and the collectives
    of a rank are one after another on one lane.
    """
    sharded, gathered = (
        not schedule.kinds.isdisjoint(SHARDS),
        not schedule.kinds.isdisjoint(GATHERS),
    )
    if not sharded:
        return
    yield from _beside(schedule, seen, gathered=gathered)
    for rank, row in enumerate(schedule.ranks):
        found = [(x, y) for run in runs(schedule, rank) for x, y in _of_run(run, seen)]
        found += [(x, y) for one in sums(schedule, rank) for x, y in _of_sum(one, seen)]
        found += _uncovered([x for step in row for x in step], gathered=gathered)
        yield from (f"rank {rank}, step {seen[item]}, {item}: {problem}" for item, problem in found)


def _beside(schedule: Schedule, seen: Mapping[Pass, int], *, gathered: bool) -> Iterator[str]:
    """Passes and placements that do not go with sharded weights."""
    place, own = (
        schedule.placement,
        "weights that are shares" if gathered else "gradients that are shares",
    )
    # What reduces or gathers once a step has nothing to do, and V asks for weights that are gone.
    apart = {Kind.G, Kind.V, *({Kind.A} if gathered else ())}
    for item in (
        next((x for x in seen if x.kind is kind), None) for kind in sorted(apart & schedule.kinds)
    ):
        assert item is not None
        at = f"rank {place.rank_of[item.stage]}, step {seen[item]}, {item}"
        yield f"{at}: does not go with {own} between runs"


def _of_run(run: Run, seen: Mapping[Pass, int]) -> Iterator[tuple[Pass, str]]:
    gather, passes = run
    if gather.kind is Kind.AF:
        named = gather._replace(kind=Kind.F)
    else:
        named = next((x for x in _backs(gather) if x in passes), _backs(gather)[-1])
    if not passes:
        behind = f"; {named} stands before it at step {seen[named]}" if named in seen else ""
        yield gather, f"nothing reads the weights before they are dropped{behind}"
    elif named not in passes:
        there = f"at step {seen[named]}, " if named in seen else ""
        first = _gather_for(passes[0])
        yield (
            gather,
            f"{named}, {there}is not in its run, which begins with {passes[0]}; this is {first}",
        )
    elif seen[passes[0]] < seen[named]:
        first = _gather_for(passes[0])
        yield (
            gather,
            f"its run begins with {passes[0]} at step {seen[passes[0]]}, before {named}; this is {first}",
        )


def _of_sum(one: Sum, seen: Mapping[Pass, int]) -> Iterator[tuple[Pass, str]]:
    reduce, _, passes = one
    named = next(
        (x for x in (reduce._replace(kind=k) for k in (Kind.W, Kind.BW)) if x in seen), None
    )
    if named is None:
        return  # its gradient is missing, which is said
    if seen[named] > seen[reduce]:
        yield reduce, f"stands before {named} at step {seen[named]}, whose gradient it sums"
    elif named not in passes:
        yield reduce, f"{named} at step {seen[named]} has been summed before"
    elif passes[-1] != named:
        last = passes[-1]
        name = last._replace(kind=Kind.RS)
        yield (
            reduce,
            f"{last} at step {seen[last]}, behind {named}, leaves a gradient too; this is {name}",
        )


def _uncovered(row: list[Pass], *, gathered: bool) -> Iterator[tuple[Pass, str]]:
    """The first pass of each stage that reads weights no gather has brought, the last gradient that nothing sums."""
    there, told, left = set[int](), set[int](), dict[int, Pass]()
    for item in row:
        if item.kind in GATHERS:
            there.add(item.stage)
        elif item.kind in REDUCES:
            left.pop(item.stage, None)
        if gathered and reads_weights(item.kind) and item.stage not in there | told:
            told.add(item.stage)
            yield (
                item,
                f"reads weights that nothing has gathered; {_gather_for(item)} is missing before it",
            )
        if adds_gradients(item.kind):
            left[item.stage] = item
    for item in left.values():
        yield item, f"nothing sums its gradient; {item._replace(kind=Kind.RS)} is missing behind it"


def _backs(gather: Pass) -> list[Pass]:
    return [gather._replace(kind=kind) for kind in (Kind.R, Kind.B, Kind.BW)]


def _gather_for(first: Pass) -> Pass:
    """The name of the gather before a run that begins so."""
    return first._replace(kind=Kind.AF if first.kind.is_forward else Kind.AB)
