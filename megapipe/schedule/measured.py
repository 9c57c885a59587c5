"""Costs from steps that ran: what passes, the host between them and messages have taken."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import pairwise
from math import inf
from statistics import median
from typing import NamedTuple

from megapipe.schedule.costs import Costs
from megapipe.schedule.kinds import Kind
from megapipe.schedule.passes import Pass, Placement


class Ran(NamedTuple):
    """A pass of a step, from when its input was there to its end, in seconds of its host's clock."""

    item: Pass
    begin: float
    end: float


StepsRan = Sequence[Sequence[Sequence[Ran]]]
"""[step][pipeline rank]: the passes in the order in which they ran."""


def measured_costs(steps: StepsRan, place: Placement, counted: Costs) -> Costs:
    """Medians, in seconds.

    The overhead is the time between two passes where the second waits for no other rank. A link's latency is the least
    time in a step from an end to the begin of what needed it, the mean of both directions: that knows nothing of two
    hosts' clocks.

    Args:
        counted: says how a whole backward divides into B and W where nothing split was run, and what is held.
    """
    took: dict[tuple[Kind, int], list[float]] = defaultdict(list)
    between: list[float] = []
    least: dict[tuple[int, int], dict[int, float]] = defaultdict(dict)
    for step, ranks in enumerate(steps):
        ran = {x.item: x for row in ranks for x in row}
        for rank, row in enumerate(ranks):
            for last, x in pairwise((None, *row)):
                assert x is not None
                took[x.item.kind, place.position(x.item.stage)].append(x.end - x.begin)
                made = _made(x.item, place, ran)
                if made is not None and place.rank_of[made.item.stage] != rank:
                    of_link = least[place.rank_of[made.item.stage], rank]
                    of_link[step] = min(of_link.get(step, inf), x.begin - made.end)
                elif last is not None:
                    between.append(x.begin - last.end)
    overhead = median(between) if between else 0.0
    f, b, w = zip(*_stages(took, place, counted), strict=True)
    comm = tuple(max(0.0, _lag(least, *ends) - overhead) for ends in _links(place.num_ranks))
    return replace(counted, f=f, b=b, w=w, fb=None, comm=comm or 0.0, overhead=overhead)


def _stages(
    took: dict[tuple[Kind, int], list[float]], place: Placement, counted: Costs
) -> Iterator[tuple[float, float, float]]:
    """F, B and W at each position of the chain."""
    time = replace(counted, overhead=0.0).durations(place)
    for at in range(place.chain):
        f, b, w, whole = (median(took[kind, at]) if (kind, at) in took else None for kind in _KINDS)
        if b is None or w is None:
            share = time[Kind.B][at] / (time[Kind.B][at] + time[Kind.W][at] or 1.0)
            b, w = (whole or 0.0) * share, (whole or 0.0) * (1 - share)
        yield f or 0.0, b, w


_KINDS = (Kind.F, Kind.B, Kind.W, Kind.BW)


def _made(item: Pass, place: Placement, ran: dict[Pass, Ran]) -> Ran | None:
    """What made a pass's input; None at the ends of the model, for W, and where it was not timed."""
    source = place.prev(item.stage) if item.kind.is_forward else place.next(item.stage)
    if source is None or item.kind not in _KINDS or item.kind is Kind.W:
        return None
    kinds = (Kind.F,) if item.kind.is_forward else (Kind.B, Kind.BW)
    return next((ran[x] for kind in kinds if (x := Pass(kind, source, item.microbatch)) in ran), None)


def _links(ranks: int) -> list[tuple[int, int]]:
    return [(r, (r + 1) % ranks) for r in range(ranks if ranks > 2 else ranks - 1)]


def _lag(least: dict[tuple[int, int], dict[int, float]], one: int, two: int) -> float:
    """Of the link between two ranks; 0 if nothing went over it."""
    ways = [median(least[way].values()) for way in ((one, two), (two, one)) if least[way]]
    return sum(ways) / len(ways) if ways else 0.0
