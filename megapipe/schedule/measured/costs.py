"""Costs from measured steps: times of passes, of messages, and of the host between passes."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import groupby
from math import inf
from statistics import median
from typing import Any, NamedTuple

from megapipe.schedule.costs import Costs, PerStage
from megapipe.schedule.kinds import COPIES, Kind, Lane
from megapipe.schedule.passes import Pass, Placement


class Ran(NamedTuple):
    """A measured pass, in seconds of its host's clock.

    Both passes of an overlapped pair have the same times.

    Attributes:
        begin: when its input had arrived.
        waited: how long its rank waited for that input.
    """

    item: Pass
    begin: float
    end: float
    waited: float = 0.0


StepsRan = Sequence[Sequence[Sequence[Ran]]]
"""[step][pipeline rank]: the passes in the order in which they ran."""


class Spent(NamedTuple):
    """The times of a rank's step, in seconds.

    Attributes:
        makespan: from its first wait for an input to its last end.
        span: from its first pass to its last end.
        busy: the sum of its passes.
        waited: waits for inputs between passes. The rest of `span` is host time.
    """

    makespan: float
    span: float
    busy: float
    waited: float

    @property
    def idle(self) -> float:
        """Return the idle time between its first and its last pass: the papers' bubble."""
        return self.span - self.busy


def spent(row: Sequence[Ran]) -> Spent:
    """Return the times of a rank's passes, summed. A validation counts as waiting."""
    groups = list(in_turn(row))
    first = groups[0][0]
    end = max(x.end for x in row)
    validated = sum(x.end - x.begin for x, *_ in groups if x.item.kind.traits.border)
    busy = sum(x.end - x.begin for x, *_ in groups) - validated
    waited = sum(max(x.waited for x in group) for group in groups[1:]) + validated
    return Spent(end - first.begin + first.waited, end - first.begin, busy, waited)


def in_turn(row: Sequence[Ran]) -> Iterator[tuple[Ran, ...]]:
    """Yield the passes one by one, overlapped pairs together."""
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
    overlapped pairs counts as half of a pair.

    Args:
        cuts: lengths of the table's slices. A slice is scaled to a microbatch by its share of the
            counted work.
        copies: measured O and L, if the table has them.
        counted: costs by the plan. They divide a fused backward into B and W if no split one ran,
            and they give the memory.
    """
    took = defaultdict[_At, list[float]](list)
    halves = defaultdict[_At, list[float]](list)
    between: list[float] = []
    pairs: list[float] = []
    least: dict[tuple[int, int], dict[int, float]] = defaultdict(dict)
    alone = replace(counted, overhead=0.0)
    parts = {n: None if n is None else (n, 0, len(cuts)) for n in (None, *range(len(cuts)))}
    work = {n: alone.of_slice(cuts, part).durations(place) for n, part in parts.items()}

    def whole(x: Ran) -> float:
        """Return the duration, scaled from a slice to a whole microbatch."""
        kind, stage, _, piece = x.item
        share = work[piece][kind][stage] / (work[None][kind][stage] or 1.0)
        return (x.end - x.begin) / (share or 1.0)

    for step, ranks in enumerate(steps):
        ran = {x.item: x for row in ranks for x in row}
        for rank, row in enumerate(ranks):
            last: Ran | None = None
            for group in in_turn(row):
                into = took if len(group) == 1 else halves
                for x in group:
                    into[x.item.kind, place.position(x.item.stage)].append(whole(x) / len(group))
                if len(group) > 1:
                    pairs.append(whole(group[0]))
                makers = [_made(x.item, place, ran) for x in group]
                made = [y for y in makers if y and place.rank_of[y.item.stage] != rank]
                for y in made:
                    of_link = least[place.rank_of[y.item.stage], rank]
                    of_link[step] = min(of_link.get(step, inf), group[0].begin - y.end)
                if last is not None and not made:
                    between.append(group[0].begin - last.end)
                last = group[0]
    for x in (x for ranks in copies for row in ranks for x in row):
        took[x.item.kind, place.position(x.item.stage)].append(whole(x))
    known = {**halves, **took}
    overhead = median(between) if between else 0.0
    f, b, w = zip(*_stages(known, place, counted), strict=True)
    comm = tuple(max(0.0, _lag(least, *ends) - overhead) for ends in _links(place.num_ranks))
    fb = median(pairs) * place.chain / place.num_ranks if pairs else None
    of_passes = sum(sum(work[None][kind][: place.chain]) for kind in (Kind.F, Kind.B, Kind.W))
    unit = sum((*f, *b, *w)) / (of_passes or 1.0)
    of_families = dict[str, Any]()
    for kind in Kind:
        name = kind.traits.costs
        if kind.traits.lane is Lane.DP:
            of_families[name] = _scaled(getattr(counted, name), unit)
        elif kind.traits.lane in COPIES:
            of_families[name] = _copies(took, kind, work[None][kind][: place.chain], unit)
        elif kind.traits.at:  # a share of what all ranks compute together
            of_families[name] = _shares(known, name)
    return replace(
        counted, f=f, b=b, w=w, fb=fb, comm=comm or 0.0, overhead=overhead, **of_families
    )


def _scaled(cost: PerStage, unit: float) -> PerStage:
    """Return a counted time in seconds, given the seconds of one unit of the counted costs."""
    if isinstance(cost, tuple):
        return tuple(x * unit for x in cost)
    return cost * unit


def _copies(
    took: Mapping[_At, list[float]], kind: Kind, counted: Sequence[float], unit: float
) -> PerStage:
    """Return the time of O or L at each position of the chain.

    A position without a measured copy has its counted time, scaled by the measured copies.

    Args:
        unit: seconds of a counted unit by the passes, used if no copy was measured.
    """
    timed = {at: median(took[kind, at]) for at in range(len(counted)) if (kind, at) in took}
    total = sum(counted[at] for at in timed)
    if total:
        unit = sum(timed.values()) / total
    if not any(counted) and not timed:
        return 0.0
    return tuple(timed.get(at, x * unit) for at, x in enumerate(counted))


def _shares(took: Mapping[_At, list[float]], name: str) -> float:
    """Return the time of a rank's share under this field of the costs; 0 if nothing is shared."""
    times = [x for (kind, _), row in took.items() if kind.traits.costs == name for x in row]
    return median(times) if times else 0.0


def _stages(
    took: Mapping[_At, list[float]], place: Placement, counted: Costs
) -> Iterator[tuple[float, float, float]]:
    """Yield the times of F, B and W at each position of the chain."""
    time = replace(counted, overhead=0.0).durations(place)
    for at in range(place.chain):
        f, b, w, whole = (median(took[kind, at]) if (kind, at) in took else None for kind in _KINDS)
        if b is None or w is None:
            share = time[Kind.B][at] / (time[Kind.B][at] + time[Kind.W][at] or 1.0)
            b = (whole or 0.0) * share
            w = (whole or 0.0) * (1 - share)
        yield f or 0.0, b, w


_KINDS = (Kind.F, Kind.B, Kind.W, Kind.BW)


def _made(item: Pass, place: Placement, ran: dict[Pass, Ran]) -> Ran | None:
    """Return the pass that made a pass's input.

    Returns None at the ends of the model, for W, and if that pass was not measured.
    """
    source = place.prev(item.stage) if item.kind.is_forward else place.next(item.stage)
    if source is None or item.kind not in _KINDS or item.kind is Kind.W:
        return None
    kinds = (Kind.F,) if item.kind.is_forward else (Kind.B, Kind.BW)
    makers = (Pass(kind, source, *item[2:]) for kind in kinds)
    return next((ran[maker] for maker in makers if maker in ran), None)


def _links(ranks: int) -> list[tuple[int, int]]:
    """Return the ranks of each link; more than two ranks form a ring."""
    count = ranks if ranks > 2 else ranks - 1
    return [(rank, (rank + 1) % ranks) for rank in range(count)]


def _lag(least: dict[tuple[int, int], dict[int, float]], one: int, two: int) -> float:
    """Return the latency of the link between two ranks; 0 if no message used it."""
    ways = [median(least[way].values()) for way in ((one, two), (two, one)) if least[way]]
    return sum(ways) / len(ways) if ways else 0.0
