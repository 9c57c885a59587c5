"""The rules of passes that move activations out of the way: their order, and one order on a lane that is shared."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from megapipe.schedule.kinds import COPIES, Kind
from megapipe.schedule.passes import Pass, Schedule, Shared

MOVES = frozenset({Kind.O, Kind.L, Kind.R})
"""Passes that move activations out of the way: copies to the host and back, and second forwards."""


def memory_problems(schedule: Schedule, seen: Mapping[Pass, int]) -> Iterator[str]:
    """Mistakes of copies and second forwards, given the step of each pass in its row."""
    rank_of = schedule.placement.rank_of
    for item, step in seen.items():
        if item.kind in MOVES:
            # Nothing else is said of a copy that has no other end: what follows would follow from that.
            found = _alone(item, seen) or _out_of_order(item, seen)
            yield from (f"rank {rank_of[item.stage]}, step {step}, {item}: {problem}" for problem in found)
    for lane in schedule.shared:
        yield from _shared_problems(schedule, lane, seen)
    for i, lane in enumerate(schedule.shared):
        for before in schedule.shared[:i]:
            if both := sorted(set(lane.ranks) & set(before.ranks)) if lane.lane is before.lane else []:
                yield f"rank {both[0]} is in two shared lanes {lane.lane}; join them in one, as a rank has one order"


def _alone(item: Pass, seen: Mapping[Pass, int]) -> list[str]:
    kind, found = item.kind, []
    if kind is Kind.O and (back := item._replace(kind=Kind.L)) not in seen:
        found.append(f"nothing brings it back; {back} is missing")
    if kind is Kind.L and (out := item._replace(kind=Kind.O)) not in seen:
        found.append(f"brings back what nothing has copied; {out} is missing")
    if kind is Kind.R and (out := item._replace(kind=Kind.O)) in seen:
        found.append(f"computes again what {out} at step {seen[out]} copies; one of the two is enough")
    return found


def _out_of_order(item: Pass, seen: Mapping[Pass, int]) -> Iterator[str]:
    kind, at = item.kind, seen[item]
    f, out, b, bw = (item._replace(kind=k) for k in (Kind.F, Kind.O, Kind.B, Kind.BW))
    used = b if b in seen else bw
    if kind is not Kind.L and f in seen and at <= seen[f]:
        yield f"stands before {f} at step {seen[f]}, which makes what it {'copies' if kind is Kind.O else 'repeats'}"
    if kind is Kind.L and at <= seen[out]:
        yield f"stands before {out} at step {seen[out]}, whose copy it brings back"
    if kind is Kind.O and used in seen and seen[used] <= at:
        yield f"frees what {used} at step {seen[used]} has used already"
    if kind is not Kind.O and used in seen and seen[used] <= at:
        gone = f"{out} at step {seen[out]} has freed" if kind is Kind.L else f"{f} has not kept"
        yield f"comes too late: {used} at step {seen[used]} uses what {gone}"


def _shared_problems(schedule: Schedule, lane: Shared, seen: Mapping[Pass, int]) -> Iterator[str]:
    """A shared lane has all passes of its ranks, in an order that is each rank's own."""
    rank_of, ranks = schedule.placement.rank_of, ", ".join(map(str, lane.ranks))
    where = f"the lane {lane.lane} that ranks {ranks} share"
    if lane.lane not in COPIES or not set(lane.ranks) <= set(range(schedule.placement.num_ranks)):
        yield f"{where}: only lanes {' and '.join(sorted(COPIES))} of ranks of the table are shared"
        return
    own = {x for x in seen if x.kind.traits.lane is lane.lane and rank_of[x.stage] in lane.ranks}
    if len(lane.order) != len(set(lane.order)) or set(lane.order) != own:
        wrong = [*sorted(own - set(lane.order)), *(x for x in lane.order if x not in own or lane.order.count(x) > 1)]
        yield f"{where}: its order must name each of their passes once; look at {', '.join(map(str, wrong[:3]))}"
        return
    last: dict[int, Pass] = {}
    for item in lane.order:
        rank = rank_of[item.stage]
        if rank in last and seen[item] < seen[last[rank]]:
            yield (
                f"rank {rank}, step {seen[item]}, {item}: stands before {last[rank]} at step {seen[last[rank]]}, and "
                f"behind it on {where}"
            )
        last[rank] = item


def computed_again(schedule: Schedule) -> frozenset[tuple[int, int]]:
    """Stages and microbatches, or slices among all, whose forward runs twice."""
    if Kind.R not in schedule.kinds:
        return frozenset()
    return frozenset((x.stage, schedule.number(x)) for x in schedule.passes() if x.kind is Kind.R)


def inputs(schedule: Schedule) -> Mapping[Pass, str]:
    """Return the forwards that leave nothing but their input, mem_r."""
    again = computed_again(schedule)
    forwards = (x for x in schedule.passes() if again and x.kind.is_forward)
    return dict.fromkeys((x for x in forwards if (x.stage, schedule.number(x)) in again), "r")
