"""Costs from measured steps: times of passes, of messages, and of the host between passes."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import chain, groupby
from math import inf
from statistics import median
from typing import Any, NamedTuple

from megapipe.schedule.costs import Costs, PerStage
from megapipe.schedule.families.family import times
from megapipe.schedule.kinds import COPIES, LAYERS, Kind, Lane
from megapipe.schedule.passes import Pass, Placement


class MeasuredPass(NamedTuple):
    """A measured pass, in seconds of its host's clock.

    Both passes of an overlapped pair have the same times.

    Attributes:
        item: the pass.
        begin: when its input had arrived.
        end: when it ended.
        waited: how long its rank waited for that input.
    """

    item: Pass
    begin: float
    end: float
    waited: float = 0.0


StepsRan = Sequence[Sequence[Sequence[MeasuredPass]]]
"""[step][pipeline rank]: the passes in the order in which they ran."""


class Spent(NamedTuple):
    """The durations that summarise one rank's training step, in seconds.

    `idle` returns the papers' bubble.

    Attributes:
        makespan: from the start of the rank's first wait for an input to the end of its last pass.
        span: from the start of the rank's first pass to the end of its last pass.
        busy: the sum of the durations of the rank's passes.
        waited: waits for inputs between passes. The rest of `span` is host time.
    """

    makespan: float
    span: float
    busy: float
    waited: float

    @property
    def idle(self) -> float:
        """Return the idle time between the rank's first and last pass: the papers' bubble."""
        return self.span - self.busy


def spent(row: Sequence[MeasuredPass]) -> Spent:
    """Return how long a rank computed and how long it waited in one step.

    Args:
        row: the rank's measured passes of the step, in order. A validation (V) counts as waiting.
    """
    groups = list(in_turn(row))
    first = groups[0][0]
    end = max(x.end for x in row)
    # V computes next to nothing: it waits for the norms of all other ranks.
    validated = sum(x.end - x.begin for x, *_ in groups if x.item.kind.traits.border)
    busy = sum(x.end - x.begin for x, *_ in groups) - validated
    waited = 0.0
    for group in groups[1:]:
        waited += max(x.waited for x in group)
    span = end - first.begin
    return Spent(span + first.waited, span, busy, waited + validated)


def in_turn(row: Sequence[MeasuredPass]) -> Iterator[tuple[MeasuredPass, ...]]:
    """Yield the passes of a rank as groups: one pass, or the two passes of an overlapped pair.

    Args:
        row: measured passes of one rank in one step, in order.
    """
    return (tuple(group) for _, group in groupby(row, lambda x: (x.begin, x.end)))


_At = tuple[Kind, int]
"""(kind of pass, position in the chain)."""


def measured_costs(
    steps: StepsRan,
    place: Placement,
    counted: Costs,
    cuts: Sequence[float] = (),
    copies: StepsRan = (),
) -> Costs:
    """Return costs with the medians of measured steps, in seconds.

    The overhead is the time between two passes if the second waits for no other rank. A link's
    latency is the least time in a step from the end of a pass to the start of its receiver. The
    mean of both directions cancels the difference of the hosts' clocks. A pass that ran only in
    overlapped pairs counts as half of a pair. `Costs.fb` is the median time of a pair, None without
    pairs. Times of U and V are not measured, and stay as in `counted`.

    Args:
        steps: [step][pipeline rank] measured passes.
        place: the placement of the stages.
        counted: costs that the plan predicts. These costs give the memory, and divide a fused
            backward into B and W if no split one ran.
        cuts: lengths of the table's slices; () without slices. A slice with 1/4 of a microbatch's
            time in `counted` counts 4 times.
        copies: [step][pipeline rank] measured copies to the host (O) and back (L), if there are
            any.
    """
    took = defaultdict[_At, list[float]](list)
    halves = defaultdict[_At, list[float]](list)
    between: list[float] = []
    pairs: list[float] = []
    least: dict[tuple[int, int], dict[int, float]] = defaultdict(dict)
    alone = replace(counted, overhead=0.0)
    work: dict[int | None, dict[Kind, list[float]]] = {None: alone.durations(place)}
    # As if each microbatch were one document: a slice's place in the microbatch is known, where
    # documents begin is not.
    for n in range(len(cuts)):
        work[n] = alone.of_slice(cuts, (n, 0, len(cuts))).durations(place)

    def whole(x: MeasuredPass) -> float:
        """Return the seconds of a pass, scaled from its slice to a whole microbatch."""
        kind, stage, _, piece = x.item
        share = work[piece][kind][stage] / (work[None][kind][stage] or 1.0)
        return (x.end - x.begin) / (share or 1.0)

    for step, ranks in enumerate(steps):
        ran = {x.item: x for row in ranks for x in row}
        for rank, row in enumerate(ranks):
            last: MeasuredPass | None = None
            for group in in_turn(row):
                into = took if len(group) == 1 else halves
                for x in group:
                    into[x.item.kind, place.position(x.item.stage)].append(whole(x) / len(group))
                if len(group) > 1:
                    pairs.append(whole(group[0]))
                makers = [_made(x.item, place, ran) for x in group]
                made = [y for y in makers if y and place.rank_of[y.item.stage] != rank]
                # Most messages wait for a receiver that is busy. The least time of a step is the
                # one message whose receiver was ready.
                for y in made:
                    of_link = least[place.rank_of[y.item.stage], rank]
                    of_link[step] = min(of_link.get(step, inf), group[0].begin - y.end)
                # A pass that took a message may have waited for it, so it says nothing of the host.
                if last is not None and not made:
                    between.append(group[0].begin - last.end)
                last = group[0]
    for ranks in copies:
        for x in chain.from_iterable(ranks):
            took[x.item.kind, place.position(x.item.stage)].append(whole(x))
    # A pass that ran alone too is timed alone: a half of a pair includes what the other half did.
    known = {**halves, **took}
    overhead = 0.0
    if between:
        overhead = median(between)
    f, b, w = zip(*_stages(known, place, counted), strict=True)
    # The clock adds the overhead to the pass that receives, so the link must not have it too.
    comm = tuple(max(0.0, _lag(least, *ends) - overhead) for ends in links(place.num_ranks))
    fb = None
    if pairs:
        fb = median(pairs) * place.chain / place.num_ranks
    others = _of_families(known, place, counted, sum((*f, *b, *w)))
    return replace(counted, f=f, b=b, w=w, fb=fb, comm=comm or 0.0, overhead=overhead, **others)


def _of_families(
    took: Mapping[_At, list[float]], place: Placement, counted: Costs, seconds: float
) -> dict[str, Any]:
    """Return {field of `Costs`: seconds} for collectives, copies, and a shared vocabulary's passes.

    Args:
        took: {(kind, position of the stage in the model): measured seconds}.
        counted: costs by the plan, for kinds that are not measured.
        seconds: measured time of F, B and W of one microbatch through all stages.
    """
    time = replace(counted, overhead=0.0).durations(place)
    # Seconds of one unit of the plan's work, for kinds that were not measured by themselves.
    of_passes = sum(sum(time[kind][: place.chain]) for kind in (Kind.F, Kind.B, Kind.W))
    unit = seconds / (of_passes or 1.0)
    found = dict[str, Any]()
    for kind in Kind:
        name = kind.traits.costs
        if kind.traits.lane is Lane.DP:
            found[name] = times(unit, getattr(counted, name))
        elif kind.traits.lane in COPIES:
            found[name] = _copies(took, kind, time[kind][: place.chain], unit)
        elif kind.traits.at:  # a share of what all ranks compute together
            found[name] = _shares(took, name)
    return found


def _copies(
    took: Mapping[_At, list[float]], kind: Kind, counted: Sequence[float], unit: float
) -> PerStage:
    """Return the seconds of a copy to or from the host (O or L) at each stage of the model.

    The result is 0.0 if there are no copies. A stage without a measured copy has the time of the
    plan, scaled by the measured copies.

    Args:
        took: {(kind, position of the stage in the model): measured seconds}.
        kind: O or L.
        counted: the plan's time at each position.
        unit: seconds that a unit of the plan's time took in the measured passes. This number scales
            the plan's times if no copy was measured.
    """
    timed = {at: median(took[kind, at]) for at in range(len(counted)) if (kind, at) in took}
    total = sum(counted[at] for at in timed)
    # A copy's speed is the bus's, which the times of the passes do not show. So measured copies say
    # how long the others would take.
    if total:
        unit = sum(timed.values()) / total
    if not any(counted) and not timed:
        return 0.0
    return tuple(timed.get(at, x * unit) for at, x in enumerate(counted))


def _shares(took: Mapping[_At, list[float]], name: str) -> float:
    """Return the median seconds of a kind of pass over all stages; 0 if none ran.

    Args:
        took: {(kind, position of the stage in the model): measured seconds}.
        name: the field of `Costs` for the time of these passes, such as "s".
    """
    times = [x for (kind, _), row in took.items() if kind.traits.costs == name for x in row]
    return median(times or [0.0])


def _stages(
    took: Mapping[_At, list[float]], place: Placement, counted: Costs
) -> Iterator[tuple[float, float, float]]:
    """Yield the median seconds of (F, B, W) for each stage of one copy of the model.

    Args:
        took: {(kind, position of the stage in the model): measured seconds}.
        place: the placement of the stages.
        counted: costs by the plan, which divide a fused backward into B and W.
    """
    time = replace(counted, overhead=0.0).durations(place)
    for at in range(place.chain):
        f, b, w, whole = (median(took.get((kind, at), [0.0])) for kind in LAYERS)
        # Only fused backwards ran here: the plan says how B and W divide one.
        if (Kind.B, at) not in took or (Kind.W, at) not in took:
            share = time[Kind.B][at] / (time[Kind.B][at] + time[Kind.W][at] or 1.0)
            b = whole * share
            w = whole * (1 - share)
        yield f, b, w


def _made(item: Pass, place: Placement, ran: dict[Pass, MeasuredPass]) -> MeasuredPass | None:
    """Return the measured pass, on a neighbouring stage, whose output is the input of `item`.

    For a forward it is on the stage before, for a backward on the stage after. Returns None at the
    ends of the model, for W, and if that pass was not measured.

    Args:
        ran: {pass: its measurement} for all measured passes of the step.
    """
    if item.kind is Kind.F:
        source = place.prev(item.stage)
        kinds = [Kind.F]
    elif item.kind in (Kind.B, Kind.BW):
        source = place.next(item.stage)
        kinds = [Kind.B, Kind.BW]
    else:
        return None
    if source is None:
        return None
    makers = (Pass(kind, source, *item[2:]) for kind in kinds)
    return next((ran[maker] for maker in makers if maker in ran), None)


def arrivals(
    ranks: Sequence[Sequence[MeasuredPass]], place: Placement
) -> Iterator[tuple[tuple[int, int], MeasuredPass, float]]:
    """Yield ((sender, receiver), pass, lag) for each message between two ranks in a step.

    The pass is the receiver's, which takes the message as its input. The lag is the time in seconds
    from the end of the sender's pass to the start of the receiver's. Between two hosts the lag
    includes the difference of their clocks.

    Args:
        ranks: for each pipeline rank, its measured passes of the step.
    """
    ran = {x.item: x for row in ranks for x in row}
    for rank, row in enumerate(ranks):
        for x in row:
            made = _made(x.item, place, ran)
            if made is not None:
                sender = place.rank_of[made.item.stage]
                if sender != rank:
                    yield (sender, rank), x, x.begin - made.end


def host_times(ranks: Sequence[Sequence[MeasuredPass]]) -> dict[Pass, float]:
    """Return {pass: seconds of host time before it} for one step.

    Host time runs from the end of the rank's previous pass until it asks for the input of this one.
    The time is 0 for a rank's first pass. Both passes of an overlapped pair have the same time.

    Args:
        ranks: for each pipeline rank, its measured passes of the step.
    """
    found: dict[Pass, float] = {}
    for row in ranks:
        last: MeasuredPass | None = None
        for group in in_turn(row):
            time = 0.0
            if last is not None:
                time = max(0.0, group[0].begin - group[0].waited - last.end)
            found |= {x.item: time for x in group}
            last = group[0]
    return found


def links(ranks: int) -> list[tuple[int, int]]:
    """Return (rank, next rank) for each link between neighbours. More than two ranks form a ring.

    Args:
        ranks: number of pipeline ranks.
    """
    # Of two ranks the way around is the same link, and `Costs.comm` names it once.
    count = ranks
    if ranks <= 2:
        count -= 1
    return [(rank, (rank + 1) % ranks) for rank in range(count)]


def _lag(least: dict[tuple[int, int], dict[int, float]], one: int, two: int) -> float:
    """Return the latency of the link between two ranks, in seconds; 0 if no message used it.

    Args:
        least: {(sender, receiver): {step: least seconds of any message in that step}}.
        one, two: the two ranks.
    """
    # If the clocks differ by d, the measured lags are lag + d one way and lag - d the other way.
    ways = [median(least[way].values()) for way in ((one, two), (two, one)) if least[way]]
    return sum(ways) / max(1, len(ways))
