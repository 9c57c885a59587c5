"""Computation and communication within passes, and how much of the communication is exposed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import NamedTuple

from megapipe.schedule.core.pieces import Chain, Piece, pieces
from megapipe.schedule.costs import Costs
from megapipe.schedule.dependencies import Dependencies
from megapipe.schedule.kinds import COPIES, LAYERS, Kind, Lane
from megapipe.schedule.passes import Pass, Schedule, Step
from megapipe.schedule.simulate import Timeline

ARITHMETIC = "arithmetic"
LINK = "link"


class Stretch(NamedTuple):
    """A time in which a pass does arithmetic only, or communication only.

    Attributes:
        item: the pass.
        stream: "arithmetic" or "link", for communication.
        start, end: times in the timeline of the pass's table.
    """

    item: Pass
    stream: str
    start: float
    end: float


class Communication(NamedTuple):
    """The time of communication in the passes of all ranks, and the exposed part of it.

    Exposed communication is not hidden by arithmetic. `share` returns exposed / total.
    """

    total: float
    exposed: float

    def __str__(self) -> str:
        total = f"communication within passes: {self.total:.5g} over all ranks"
        return f"{total}, {self.share:.1%} of it exposed"

    @property
    def share(self) -> float:
        return self.exposed / self.total if self.total else 0.0


def communication(schedule: Schedule, costs: Costs) -> Communication:
    """Return how much communication is within the passes of a table, and how much is exposed.

    The time of a step is its overhead, its arithmetic and its exposed communication. A pass that
    runs alone hides none of its communication.
    """
    # A table has thousands of steps, but few different ones. Each is computed once.
    alike = dict[tuple[object, ...], list[Step]]()
    for step in filter(_has_lanes, schedule.steps()):
        # Microbatches may have different documents, so equal slices may differ in attention.
        alike.setdefault(tuple((x.kind, x.stage, schedule.part(x)) for x in step), []).append(step)
    total = exposed = 0.0
    for step, *others in alike.values():
        count = 1 + len(others)
        chains = [chain for _, chain in _chains(schedule, costs, step)]
        link = sum(chain.link for chain in chains)
        compute = sum(chain.compute for chain in chains)
        rest = costs.of_step(step, schedule.placement, schedule) - compute
        total += count * link
        # A given fb may be shorter than the arithmetic, and then all communication is hidden.
        exposed += count * min(link, max(0.0, rest - costs.overhead))
    return Communication(total, exposed)


class Copied(NamedTuple):
    """The time that one rank's copies between device and host take, in the unit of the costs.

    Attributes:
        out, back: total time of the copies to the host, and of the copies back.
        exposed: time for which passes wait for copies.
    """

    out: float
    back: float
    exposed: float


def copied(schedule: Schedule, costs: Costs, time: Timeline) -> list[Copied]:
    """Return each rank's total time of copies to the host and back, and of waits for copies.

    Args:
        time: the timeline of the table under the costs.
    """
    needs = Dependencies(schedule)
    place = schedule.placement
    found = list[Copied]()
    for rank, row in enumerate(schedule.ranks):
        took = Counter[Kind]()
        exposed = 0.0
        free = 0.0
        for step in row:
            begin = time.start[step[0]]
            end = time.end[step[0]]
            if (lane := step[0].kind.traits.lane) in COPIES:
                took[step[0].kind] += end - begin  # type: ignore[assignment]
            if lane is not Lane.COMPUTE:
                continue
            wanted = [x for item in step for x in needs.of(item) if x in time.end]
            if any(x.kind.traits.lane in COPIES for x in wanted):
                # Without the copy the pass would start once its rank is free and all other inputs
                # have arrived.
                ready = free
                for x in wanted:
                    if x.kind.traits.lane not in COPIES:
                        lag = costs.lag(place.rank_of[x.stage], rank, len(schedule.ranks))
                        ready = max(ready, time.end[x] + lag)
                exposed += max(0.0, begin - ready)
            free = end
        found.append(Copied(took[Kind.O], took[Kind.L], exposed))
    return found


def stretches(schedule: Schedule, costs: Costs, time: Timeline, rank: int) -> Iterator[Stretch]:
    """Yield the times of arithmetic and of communication within a rank's passes.

    Nothing is yielded if no pass has communication under these costs.

    Args:
        time: the timeline of the table under the costs.
    """
    if not costs.communicates:
        return
    for step in filter(_has_lanes, schedule.ranks[rank]):
        # The overhead is host time before the first kernel.
        start = time.start[step[0]] + costs.overhead
        end = time.end[step[0]]
        owned = _chains(schedule, costs, step)
        chains = [chain for _, chain in owned]
        played = [*_alone(chains)]
        if len(step) > 1:
            played = pieces(chains)
        # A given fb may be shorter than the pieces need.
        last = max(piece.end for piece in played)
        scale = 0.0
        if last:
            scale = min(1.0, (end - start) / last)
        for i, link, begin, stop in played:
            # A pass without communication has such pieces of no length.
            if stop > begin:
                lane = LINK if link else ARITHMETIC
                yield Stretch(owned[i][0], lane, start + begin * scale, start + stop * scale)


def _has_lanes(step: Step) -> bool:
    return all(x.kind in LAYERS for x in step)


def _chains(schedule: Schedule, costs: Costs, step: Step) -> list[tuple[Pass, Chain]]:
    parts = ((x, costs.of_slice(schedule.cuts, schedule.part(x))) for x in step)
    return [
        (x, chain)
        for x, part in parts
        for chain in part.chains(x.kind, x.stage, schedule.placement)
    ]


def _alone(chains: list[Chain]) -> Iterator[Piece]:
    """Yield the pieces of a pass that runs alone, one after another.

    For a BW whose input gradient (b) and weight gradient (w) alternate twice between communication
    (link) and arithmetic, the order is:

        b link | b compute | w compute | w link | b link | b compute | w compute | w link

    Args:
        chains: one chain for F, B or W; two for a BW: b and w.
    """
    now = 0.0
    for turn in range(max(chain.turns for chain in chains) or 1):
        for i, chain in enumerate(chains):
            turns = chain.turns or 1
            if turn >= turns:
                continue
            halves = [(False, chain.compute), (True, chain.link)]
            if chain.link_first:
                halves.reverse()
            for link, whole in halves:
                begin = now
                now += whole / turns
                yield Piece(i, link, begin, now)
