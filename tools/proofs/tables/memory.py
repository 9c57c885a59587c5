"""Tables with O, L and R: drawn, verified, timed by another count of what ranks hold; and
misordered, each refused.

    python -m tools.proofs.tables.memory --cases 600 --seed 1

Tables are the catalogue's at p 2 to 8 and m p to 4p and such that no catalogue has, with drawn
costs, shares of microbatches and switches; two in five are cut in slices, with documents. Every one
is verified and holds what a count by hand says. A misordered one (a copy back before its copy out,
a use before it is back, a free after the use, a copy without its other end, a second forward before
the first, behind its use or before the keys that it reads are back, two ranks that disagree on a
lane they share) is refused in a line that names the pass. Ends with how many there were.
"""

from __future__ import annotations

from dataclasses import replace
from random import Random

from megapipe.flags.parse import run
from megapipe.schedule import Costs, Kind, Pass, Schedule, ScheduleError, Timeline, simulate, verify
from megapipe.schedule.families.offload.copies import with_offload, with_recompute
from megapipe.schedule.shapes.slices.slices import in_place
from tools.proofs.tables.drawn import any_table, at, with_row
from tools.proofs.tables.proof import Mistake, Proof, Wrong, misorder, most


def draw(dice: Random) -> tuple[Schedule, Costs] | None:
    """A table with passes of memory, and its costs; None where there is no such table."""
    p = dice.randint(2, 8)
    costs = Costs(
        f=dice.uniform(0.5, 2),
        b=dice.uniform(0.5, 2),
        w=dice.uniform(0.5, 2),
        comm=dice.choice((0.0, 0.1)),
        mem_w=dice.choice((0.0, 0.5, 1.0)),
        o=dice.uniform(0, 2),
        l=dice.uniform(0, 2),
        mem_o=dice.choice((None, 0.75)),
        mem_r=dice.choice((0.0, 0.125)),
        mem_k=dice.choice((0.0, 0.25)),
    )
    try:
        table = any_table(dice, p, least=p, chunks=(2,))
        if dice.random() < 0.4:
            n = dice.randint(1, 4)
            documents = tuple(sorted(dice.sample(range(1, n), dice.randint(0, n - 1))))
            table = in_place(table, tuple(dice.uniform(0.5, 2) for _ in range(n)), (documents,))
    except ScheduleError:
        return None
    ranks = len(table.ranks)
    switches = []
    if dice.random() < 0.5:
        switches = [range(r, min(r + 2, ranks)) for r in range(0, ranks, 2)]
    if dice.random() < 0.5:
        return with_offload(table, costs, share=dice.random(), switches=switches), costs
    every = sorted(
        {(x.stage, table.number(x)) for row in table.ranks for step in row for x in step}
    )
    again = set(dice.sample(every, dice.randint(0, len(every))))
    out = {x for x in every if x not in again and dice.random() < 0.7}
    table = with_recompute(table, costs, chosen=again)
    return with_offload(table, costs, chosen=out, switches=switches), costs


def check(table: Schedule, costs: Costs) -> None:
    """Raise ScheduleError or AssertionError for a table that is refused or holds something else."""
    verify(table, costs=costs)
    time = simulate(table, costs)
    for rank in range(len(table.ranks)):
        mine, clock = held_by_hand(table, costs, time, rank), time.peak[rank]
        assert abs(mine - clock) < 1e-6 * max(1, clock), (table.name, rank, mine, clock)


def held_by_hand(table: Schedule, costs: Costs, time: Timeline, rank: int) -> float:
    """Return the most that a rank holds: intervals of microbatches, summed where one begins."""
    place = table.placement
    share = place.num_ranks / place.chain
    keys = costs.mem_k if table.cuts else 0.0
    sizes = [
        costs.mem_b,
        costs.mem_w,
        costs.mem_b if costs.mem_o is None else costs.mem_o,
        costs.mem_r,
        keys,
    ]
    whole = [float(x) * share for x in sizes]  # type: ignore[arg-type]
    intervals: list[tuple[float, float, float]] = []

    def user(f: Pass) -> Pass:
        return b if (b := f._replace(kind=Kind.B)) in time.start else f._replace(kind=Kind.BW)

    for f in (x for step in table.ranks[rank] for x in step if x.kind is Kind.F):
        length = 1.0 if f.slice is None else table.cuts[f.slice] / sum(table.cuts)
        b_size, w_size, o_size, r_size, k_size = (x * length for x in whole)
        out, back, again, w = (f._replace(kind=k) for k in (Kind.O, Kind.L, Kind.R, Kind.W))
        used, begin = user(f), time.start[f]
        if table.cuts:
            # Keys stay from their forward to their backward, but while the last slice of the
            # document has them away; their gradients from that slice's backward on.
            b_size, o_size = b_size - k_size, o_size - k_size
            last = f._replace(slice=table.document(f)[-1])
            kept = time.start[again] if f == last and again in time.start else begin
            intervals.append((kept, time.end[used], k_size))
            if (gone := last._replace(kind=Kind.O)) in time.start:
                intervals.append((time.end[gone], time.start[gone._replace(kind=Kind.L)], -k_size))
            if f != last:
                intervals.append((time.start[user(last)], time.end[used], k_size))
        if again in time.start:
            intervals.append((begin, time.start[again], r_size))
            begin = time.start[again]
        intervals.append((begin, time.end[used], b_size))
        if out in time.start:
            intervals.append((time.end[out], time.start[back], -o_size))
        if w in time.start:
            intervals.append((time.end[used], time.end[w], w_size))
    return most(intervals)


def wrong(dice: Random, table: Schedule) -> Wrong | None:
    """Return a mistake in the table, if it has a place for one."""
    return misorder(dice, table, {Kind.O, Kind.L, Kind.R}, MISTAKES)


def _moved(table: Schedule, item: Pass, other: Pass, *, behind: bool) -> Schedule | None:
    """Return the table with one pass right before or after another; None where it lacks one."""
    rows = [list(row) for row in table.ranks]
    if (there := at(rows, item)) is None:
        return None
    rows[there[0]].pop(there[1])
    to = at(rows, other)
    assert to is not None
    rows[to[0]].insert(to[1] + behind, (item,))
    return replace(table, ranks=tuple(map(tuple, rows)))


def _mistake(kind: Kind, other: Kind | None, *, behind: bool) -> Mistake:
    """Move passes of a kind to one of another kind, or to the backward for None."""

    def make(table: Schedule, item: Pass) -> tuple[Schedule, Pass] | None:
        if item.kind is not kind:
            return None
        target = item._replace(kind=other or Kind.B)
        if other is None and not at(table.ranks, target):
            target = item._replace(kind=Kind.BW)
        made = _moved(table, item, target, behind=behind)
        return None if made is None else (made, item)

    return make


def _lost(kind: Kind, told: Kind) -> Mistake:
    def make(table: Schedule, item: Pass) -> tuple[Schedule, Pass] | None:
        there = at(table.ranks, item)
        if item.kind is not kind or there is None:
            return None
        rank, i = there
        row = table.ranks[rank]
        without = with_row(table, rank, (*row[:i], *row[i + 1 :]))
        return replace(without, shared=()), item._replace(kind=told)

    return make


def _crossed(table: Schedule, item: Pass) -> tuple[Schedule, Pass] | None:
    """Return the table with one rank's passes in another order on their stream than in its row."""
    lane = next((x for x in table.shared if item in x.order), None)
    rank_of = table.placement.rank_of
    own = [x for x in lane.order if rank_of[x.stage] == rank_of[item.stage]] if lane else []
    if lane is None or len(own) < 2:
        return None
    a, b = own[0], own[1]
    order = tuple({a: b, b: a}.get(x, x) for x in lane.order)
    shared = tuple(x._replace(order=order) if x is lane else x for x in table.shared)
    return replace(table, shared=shared), a


def _before_keys(table: Schedule, item: Pass) -> tuple[Schedule, Pass] | None:
    """A forward again before the keys of its document are back."""
    back = item._replace(kind=Kind.L, slice=table.document(item)[-1]) if table.cuts else item
    if item.kind is not Kind.R or back.kind is not Kind.L or at(table.ranks, back) is None:
        return None
    made = _moved(table, item, back, behind=False)
    return None if made is None else (made, item)


MISTAKES: dict[str, Mistake] = {
    "repeats before keys are back": _before_keys,
    "copies back before out": _mistake(Kind.L, Kind.O, behind=False),
    "uses before back": _mistake(Kind.L, None, behind=True),
    "copies out after the use": _mistake(Kind.O, None, behind=True),
    "copies out before the forward": _mistake(Kind.O, Kind.F, behind=False),
    "never brought back": _lost(Kind.L, Kind.O),
    "never copied": _lost(Kind.O, Kind.L),
    "repeats before the first": _mistake(Kind.R, Kind.F, behind=False),
    "repeats after the use": _mistake(Kind.R, None, behind=True),
    "ranks that disagree on a lane": _crossed,
}

if __name__ == "__main__":
    run(Proof("memory", draw, check, wrong).main)
