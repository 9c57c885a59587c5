"""The rules of offload and recomputation: the order of O, L and R, and of shared copy streams."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from megapipe.schedule.kinds import COPIES, Kind
from megapipe.schedule.passes import Pass, Schedule, Shared

MOVES = frozenset({Kind.O, Kind.L, Kind.R})
"""Passes that offload activations, bring them back, or recompute them."""


def memory_problems(schedule: Schedule, seen: Mapping[Pass, int]) -> Iterator[str]:
    """Yield a sentence for each mistake in the copies (O, L) and recomputations (R) of a table.

    Args:
        seen: {pass: index of its step in its rank's row}.
    """
    rank_of = schedule.placement.rank_of
    for item, step in seen.items():
        if item.kind in MOVES:
            # A copy without its other end is one mistake; further ones would follow from it.
            for problem in _alone(item, seen) or _out_of_order(item, seen):
                yield f"rank {rank_of[item.stage]}, step {step}, {item}: {problem}"
    for lane in schedule.shared:
        yield from _shared_problems(schedule, lane, seen)
    # A rank in two shared streams of one direction would have two orders for the same copies.
    for i, lane in enumerate(schedule.shared):
        for before in schedule.shared[:i]:
            both = sorted(set(lane.ranks) & set(before.ranks))
            if both and lane.lane is before.lane:
                yield (
                    f"rank {both[0]} is in two shared streams {lane.lane}; join them in one, "
                    "as a rank has one order"
                )


def _alone(item: Pass, seen: Mapping[Pass, int]) -> list[str]:
    """Return [a sentence] if O or L lacks the other, or if R repeats an offloaded forward; else [].

    O copies activations to the host, and L copies them back.

    Args:
        item: an O, L or R.
        seen: {pass: index of its step in its rank's row}.
    """
    out = item._replace(kind=Kind.O)
    back = item._replace(kind=Kind.L)
    if item.kind is Kind.O and back not in seen:
        return [f"nothing brings it back; {back} is missing"]
    if item.kind is Kind.L and out not in seen:
        return [f"brings back what nothing has copied; {out} is missing"]
    if item.kind is Kind.R and out in seen:
        also = f"{out} at step {seen[out]} copies"
        return [f"computes again what {also}; one of the two is enough"]
    return []


def _out_of_order(item: Pass, seen: Mapping[Pass, int]) -> Iterator[str]:
    """Yield a sentence for an O, L or R that stands too early or too late in its row.

    O comes after its forward, L after its O, and L and R before their backward.

    Args:
        item: an O, L or R.
        seen: {pass: index of its step in its rank's row}.
    """
    # The order of one microbatch in its row is F O L B or F R B.
    kind = item.kind
    at = seen[item]
    kinds = Kind.F, Kind.O, Kind.B, Kind.BW
    f, out, b, bw = (item._replace(kind=other) for other in kinds)
    used = b if b in seen else bw
    if kind is not Kind.L and f in seen and at <= seen[f]:
        does = "repeats"
        if kind is Kind.O:
            does = "copies"
        yield f"stands before {f} at step {seen[f]}, which makes what it {does}"
    if kind is Kind.L and at <= seen[out]:
        yield f"stands before {out} at step {seen[out]}, whose copy it brings back"
    late = used in seen and seen[used] <= at
    if kind is Kind.O and late:
        yield f"frees what {used} at step {seen[used]} has used already"
    if kind is not Kind.O and late:
        gone = f"{f} has not kept"
        if kind is Kind.L:
            gone = f"{out} at step {seen[out]} has freed"
        yield f"comes too late: {used} at step {seen[used]} uses what {gone}"


def _shared_problems(schedule: Schedule, shared: Shared, seen: Mapping[Pass, int]) -> Iterator[str]:
    """Yield a sentence for each mistake in one stream of copies that several ranks share.

    The stream must have all copies of its ranks in one direction, in the order of each rank's row.

    Args:
        shared: the stream.
        seen: {pass: index of its step in its rank's row}.
    """
    rank_of = schedule.placement.rank_of
    ranks = ", ".join(map(str, shared.ranks))
    where = f"the {shared.lane} stream that ranks {ranks} share"
    all_ranks = set(range(schedule.placement.num_ranks))
    if shared.lane not in COPIES or not set(shared.ranks) <= all_ranks:
        names = " and ".join(sorted(COPIES))
        yield f"{where}: only streams {names} of ranks of the table are shared"
        return
    of_ranks = (x for x in seen if rank_of[x.stage] in shared.ranks)
    own = {x for x in of_ranks if x.kind.traits.lane is shared.lane}
    named = set(shared.order)
    if len(shared.order) != len(named) or named != own:
        wrong = sorted(own - named)
        wrong += [x for x in shared.order if x not in own or shared.order.count(x) > 1]
        look = ", ".join(map(str, wrong[:3]))
        yield f"{where}: its order must name each of their passes once; look at {look}"
        return
    # An order that a rank's own row contradicts would deadlock: the copy that the stream runs next
    # waits for a pass after the copy that the row posts next.
    last: dict[int, Pass] = {}
    for item in shared.order:
        rank = rank_of[item.stage]
        other = last.get(rank)
        if other is not None and seen[item] < seen[other]:
            yield (
                f"rank {rank}, step {seen[item]}, {item}: stands before {other} "
                f"at step {seen[other]}, and after it on {where}"
            )
        last[rank] = item


def computed_again(schedule: Schedule) -> frozenset[tuple[int, int]]:
    """Return each (stage, microbatch) whose forward is recomputed.

    If microbatches are cut into slices, it is (stage, number of the slice), counted through all
    microbatches.
    """
    if Kind.R not in schedule.kinds:
        return frozenset()
    again = (item for item in schedule.passes() if item.kind is Kind.R)
    return frozenset((item.stage, schedule.number(item)) for item in again)


def inputs(schedule: Schedule) -> Mapping[Pass, str]:
    """Return {forward that is recomputed: "r"}.

    The letter stands for the costs field `mem_r`: the stage's input, for a slice also its keys.
    The forward holds that much memory until its recomputation, and not `mem_b`.
    """
    again = computed_again(schedule)
    # Without recomputation, as in most tables, no pass is looked at.
    forwards = (x for x in schedule.passes() if again and x.kind.is_forward)
    return dict.fromkeys((x for x in forwards if (x.stage, schedule.number(x)) in again), "r")
