"""The rules of gathers and reductions: weights are gathered before use, gradients summed once."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from megapipe.schedule.families.sharding.runs import (
    GATHERS,
    REDUCES,
    SHARDS,
    Run,
    Sum,
    adds_gradients,
    gather_for,
    reads_weights,
    runs,
    sums,
)
from megapipe.schedule.kinds import Kind
from megapipe.schedule.passes import Pass, Schedule


def weight_problems(schedule: Schedule, seen: Mapping[Pass, int]) -> Iterator[str]:
    """Yield a sentence for each mistake in a table's gathers (AF, AB) and reductions (RS).

    The order in which replicas meet in collectives needs no check. All ranks of a data-parallel
    group run one table, and a rank runs its collectives one after another on one stream.

    Args:
        seen: {pass: index of its step in its rank's row}.
    """
    if schedule.kinds.isdisjoint(SHARDS):
        return
    # With RS alone (ZeRO-2) every rank keeps its weights, and nothing has to be gathered.
    gathered = not schedule.kinds.isdisjoint(GATHERS)
    yield from _excluded(schedule, seen, gathered=gathered)
    for rank, row in enumerate(schedule.ranks):
        # A run and a sum are within one row.
        found: list[tuple[Pass, str]] = []
        for run in runs(schedule, rank):
            found += _of_run(run, seen)
        for one in sums(schedule, rank):
            found += _of_sum(one, seen)
        found += _uncovered([x for step in row for x in step], gathered=gathered)
        for item, problem in found:
            yield f"rank {rank}, step {seen[item]}, {item}: {problem}"


def _excluded(schedule: Schedule, seen: Mapping[Pass, int], *, gathered: bool) -> Iterator[str]:
    """Yield a sentence for each kind of pass that cannot be in a table with sharding.

    These are G and V, and A if weights are sharded. G (reduce) and A (gather), once a step, would
    do nothing. V (validate) would need weights that are dropped.

    Args:
        seen: {pass: index of its step in its rank's row}.
        gathered: weights are sharded, not only gradients.
    """
    place = schedule.placement
    own = "gradients that are shares"
    excluded = {Kind.G, Kind.V}
    if gathered:
        own = "weights that are shares"
        excluded.add(Kind.A)
    for kind in sorted(excluded & schedule.kinds):
        item = next((x for x in seen if x.kind is kind), None)
        assert item is not None
        at = f"rank {place.rank_of[item.stage]}, step {seen[item]}, {item}"
        yield f"{at}: does not go with {own} between runs"


def _of_run(run: Run, seen: Mapping[Pass, int]) -> Iterator[tuple[Pass, str]]:
    """Yield (gather, sentence) if no pass reads the gathered weights, or if its number is wrong.

    A gather must have the number of the first pass that reads the weights.

    Args:
        run: the gather with the passes that read the gathered weights.
        seen: {pass: index of its step in its rank's row}.
    """
    gather, passes = run
    # The pass that the number of the gather means. A run of AB may begin with R, B or BW.
    if gather.kind is Kind.AF:
        named = gather._replace(kind=Kind.F)
    else:
        backs = [gather._replace(kind=kind) for kind in (Kind.R, Kind.B, Kind.BW)]
        named = next((x for x in backs if x in passes), backs[-1])
    if not passes:
        early = ""
        if named in seen:
            early = f"; {named} stands before it at step {seen[named]}"
        yield gather, f"nothing reads the weights before they are dropped{early}"
        return
    # A gather has the number of its run's first pass, so no two runs have the same name.
    first = gather_for(passes[0])
    if named not in passes:
        there = ""
        if named in seen:
            there = f"at step {seen[named]}, "
        begins = f"which begins with {passes[0]}; this is {first}"
        yield gather, f"{named}, {there}is not in its run, {begins}"
    elif seen[passes[0]] < seen[named]:
        begins = f"its run begins with {passes[0]} at step {seen[passes[0]]}"
        yield gather, f"{begins}, before {named}; this is {first}"


def _of_sum(one: Sum, seen: Mapping[Pass, int]) -> Iterator[tuple[Pass, str]]:
    """Yield (reduction, sentence) if its number is not the last microbatch that it sums.

    Args:
        one: the reduction with the passes whose gradients it sums.
        seen: {pass: index of its step in its rank's row}.
    """
    reduce, _, passes = one
    makers = (reduce._replace(kind=kind) for kind in (Kind.W, Kind.BW))
    named = next((x for x in makers if x in seen), None)
    if named is None:
        return  # its gradient is missing, which another rule reports
    # A gradient that comes after its sum would be lost: the full gradient is dropped there.
    if seen[named] > seen[reduce]:
        yield reduce, f"stands before {named} at step {seen[named]}, whose gradient it sums"
    elif named not in passes:
        yield reduce, f"{named} at step {seen[named]} has been summed before"
    elif passes[-1] != named:
        last = passes[-1]
        name = last._replace(kind=Kind.RS)
        where = f"{last} at step {seen[last]}, after {named}"
        yield reduce, f"{where}, leaves a gradient too; this is {name}"


def _uncovered(row: list[Pass], *, gathered: bool) -> Iterator[tuple[Pass, str]]:
    """Yield (pass, sentence) for each pass that lacks a gather before it or a reduction after it.

    The first pass of a stage that reads weights needs a gather before it. The last pass that adds
    to its weight gradient needs a reduction after it.

    Args:
        row: the passes of one rank, in order.
        gathered: weights are sharded, so passes that read them need a gather.
    """
    # Each stage is reported once: what follows an ungathered read has the same cause.
    there: set[int] = set()
    reported: set[int] = set()
    left: dict[int, Pass] = {}
    for item in row:
        if item.kind in GATHERS:
            there.add(item.stage)
        elif item.kind in REDUCES:
            left.pop(item.stage, None)
        if gathered and reads_weights(item.kind) and item.stage not in there | reported:
            reported.add(item.stage)
            missing = f"{gather_for(item)} is missing before it"
            yield item, f"reads weights that nothing has gathered; {missing}"
        if adds_gradients(item.kind):
            left[item.stage] = item
    # Gradients after a stage's last reduction.
    for item in left.values():
        yield item, f"nothing sums its gradient; {item._replace(kind=Kind.RS)} is missing after it"
