"""Draw tables with AF, AB and RS, verify them, and time them by another count of gathered weights.

Misordered ones are refused.

    python -m tools.proofs.tables.weights --cases 600 --seed 1

Tables are the catalogue's at p 1 to 8 and m p to 4p and such that no catalogue has, with drawn
costs and ways to live, some with R or with O and L. Every one is verified and holds what a count by
hand says; none has more stages whole than it was told to, but where one step needs two. A
misordered one (a gather behind its first use, none before the first, one again before the last use
of the run, one under another's name, a sum before its last gradient or behind a later one, a
gradient that nothing sums, a reduction of the whole step beside) is refused in a line that names
the pass. Ends with how many of each there were.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import accumulate, pairwise
from random import Random

from megapipe.flags.parse import run
from megapipe.schedule import (
    Costs,
    Kind,
    Pass,
    Schedule,
    ScheduleError,
    Step,
    Timeline,
    simulate,
    verify,
)
from megapipe.schedule.families.offload.copies import with_offload, with_recompute
from megapipe.schedule.families.sharding.sharded import UnshardedStages, with_sharded_weights
from megapipe.schedule.kinds import Lane
from tools.proofs.tables.drawn import any_table, at, with_row
from tools.proofs.tables.proof import Mistake, Proof, Wrong, misorder, most

GATHERS, READS, ADDS = {Kind.AF, Kind.AB}, {Kind.F, Kind.B, Kind.BW, Kind.R}, {Kind.W, Kind.BW}


Row = list[Step]
Change = Callable[[Row, int, Pass], tuple[Row, Pass] | None]
"""Makes a mistake in a row, at a step with a pass. Returns the row and the pass to blame."""


def draw(dice: Random) -> tuple[Schedule, tuple[Costs, UnshardedStages]] | None:
    """Draw a table of sharded weights, its costs and the request; None if there is no table."""
    p = dice.randint(1, 8)
    sizes = {name: dice.uniform(0.1, 4) for name in ("mem_a", "mem_g")}
    times = {name: dice.uniform(0.5, 2) for name in ("f", "b", "w")} | {
        x: dice.uniform(0, 3) for x in ("a", "g")
    }
    costs = Costs(**times, **sizes, comm=dice.choice((0.0, 0.1)), mem_b=0, mem_w=0)
    try:
        table = any_table(dice, p, least=p, chunks=range(1, 7))
        if dice.random() < 0.3:
            table = with_recompute(table, costs, share=dice.random())
        elif dice.random() < 0.2:
            copies = replace(costs, o=dice.random(), l=dice.random())
            table = with_offload(table, copies, share=dice.random())
        living = UnshardedStages(dice.randint(1, 6), dice.randint(1, 6), ahead=dice.random() < 0.5)
        return with_sharded_weights(table, costs, living), (costs, living)
    except ScheduleError:
        return None


def check(table: Schedule, known: tuple[Costs, UnshardedStages]) -> None:
    """Raise ScheduleError or AssertionError for a table that is refused or holds something else."""
    costs, living = known
    verify(table, costs=costs)
    time, place = simulate(table, costs), table.placement
    for rank, row in enumerate(table.ranks):
        intervals = whole_by_hand(row, time)
        sizes = (costs.mem_a, costs.mem_g)
        of_weights, of_gradients = (
            float(x) * place.num_ranks / place.chain  # type: ignore[arg-type]
            for x in sizes
        )
        mine = most(
            [(a, b, of_weights if weights else of_gradients) for a, b, weights, _ in intervals]
        )
        assert abs(mine - time.peak[rank]) < 1e-6 * max(1, mine), (
            table.name,
            rank,
            mine,
            time.peak[rank],
        )
        places = max(
            living.weights, *(len({x.stage for x in step if x.kind in READS}) for step in row)
        )
        drops = {last for *_, weights, last in intervals if weights}
        changes = [sum(x.kind in GATHERS for x in step) - sum(x in drops for x in before)
                   for before, step in pairwise([(), *row])]  # fmt: skip
        assert max(accumulate(changes)) <= places, (table.name, rank, living)


def whole_by_hand(
    row: tuple[tuple[Pass, ...], ...], time: Timeline
) -> list[tuple[float, float, bool, Pass]]:
    """From when to when the weights (True) or the gradient of a stage are whole, and which pass is
    the last then.
    """
    flat, found = [x for step in row for x in step], []
    for stage in {x.stage for x in flat}:
        own = [x for x in flat if x.stage == stage]
        gathers = [i for i, x in enumerate(own) if x.kind in GATHERS]
        for begin, end in zip(gathers, [*gathers[1:], len(own)], strict=True):
            last = [x for x in own[begin:end] if x.kind in READS][-1]
            found.append((_posted(flat, own[begin], time), time.end[last], True, last))
        writes = [x for x in own if x.kind in ADDS | {Kind.B, Kind.RS}]
        cuts = [i for i, x in enumerate(writes) if x.kind is Kind.RS]
        for begin, end in zip([-1, *cuts], cuts, strict=False):
            # Until someone waits for the reduction: the next one of the rank, or the next gradient
            # of the stage.
            reduce, again = writes[end], [time.start[x] for x in writes[end + 1 : end + 2]]
            behind = [
                _posted(flat, x, time) for x in flat[flat.index(reduce) + 1 :] if x.kind is Kind.RS
            ]
            free = max(time.end[reduce], min([*behind[:1], *again], default=0.0))
            found.append((time.start[writes[begin + 1]], free, False, reduce))
    return found


def _posted(flat: list[Pass], item: Pass, time: Timeline) -> float:
    """Return the start of a pass on another stream: its place in the row, even if the link has to
    end another first.
    """
    before = [time.end[x] for x in flat[: flat.index(item)] if x.kind.traits.lane is Lane.COMPUTE]
    return max(before, default=0.0)


def wrong(dice: Random, table: Schedule) -> Wrong | None:
    """Return a mistake in the table, if it has a place for one."""
    return misorder(dice, table, GATHERS | {Kind.RS}, MISTAKES)


def _in_row(kinds: set[Kind], change: Change) -> Mistake:
    """Return the mistake that changes the row of a pass of these kinds."""

    def make(table: Schedule, item: Pass) -> tuple[Schedule, Pass] | None:
        there = at(table.ranks, item)
        assert there is not None
        rank, i = there
        made = change([*table.ranks[rank]], i, item) if item.kind in kinds else None
        return None if made is None else (with_row(table, rank, made[0]), made[1])

    return make


def _uses(row: Row, at: int, stage: int, kinds: set[Kind]) -> list[int]:
    """Return the steps after step `at` with passes of a stage of these kinds."""
    return [
        i
        for i in range(at + 1, len(row))
        if any(x.stage == stage and x.kind in kinds for x in row[i])
    ]


def _moved(row: Row, i: int, to: int) -> Row:
    """The row with its step i where step `to` is, which goes to the other side of it."""
    rest = [*row[:i], *row[i + 1 :]]
    return [*rest[:to], row[i], *rest[to:]]


def _behind_its_use(row: Row, i: int, gather: Pass) -> tuple[Row, Pass] | None:
    first = _uses(row, i, gather.stage, READS)[0]
    if gather._replace(kind=Kind.R) in row[first] and _uses(row[:i], -1, gather.stage, GATHERS):
        return None  # the run before goes on, and one of this name begins with the backward
    return _moved(row, i, first), gather


def _never_gathered(row: Row, i: int, gather: Pass) -> tuple[Row, Pass] | None:
    if any(x.stage == gather.stage and x.kind in GATHERS for step in row[:i] for x in step):
        return None  # the run before goes on: a table that holds more
    if not any(x.kind in GATHERS for step in [*row[:i], *row[i + 1 :]] for x in step):
        return None  # where no rank has others, weights live for ever
    use = next(
        x
        for x in row[_uses(row, i, gather.stage, READS)[0]]
        if x.stage == gather.stage and x.kind in READS
    )
    return [*row[:i], *row[i + 1 :]], use


def _again_before_the_drop(row: Row, i: int, gather: Pass) -> tuple[Row, Pass] | None:
    uses = _uses(row[:i], -1, gather.stage, READS)
    return (_moved(row, i, uses[-1]), gather) if uses else None


def _twice(row: Row, i: int, gather: Pass) -> tuple[Row, Pass]:
    return [*row[: i + 1], row[i], *row[i + 1 :]], gather


def _unread(row: Row, i: int, gather: Pass) -> tuple[Row, Pass]:
    """Gathered again by another name before anything has read it."""
    other = gather._replace(kind=Kind.AB if gather.kind is Kind.AF else Kind.AF)
    return [*row[: i + 1], (other,), *row[i + 1 :]], gather


def _misnamed(row: Row, i: int, gather: Pass) -> tuple[Row, Pass]:
    other = gather._replace(kind=Kind.AB if gather.kind is Kind.AF else Kind.AF)
    return [*row[:i], (other,), *row[i + 1 :]], other


def _before_its_gradient(row: Row, i: int, reduce: Pass) -> tuple[Row, Pass]:
    return _moved(row, i, _uses(row[:i], -1, reduce.stage, ADDS)[-1]), reduce


def _behind_a_later_one(row: Row, i: int, reduce: Pass) -> tuple[Row, Pass] | None:
    later = _uses(row, i, reduce.stage, ADDS)
    return (_moved(row, i, later[0]), reduce) if later else None


def _never_summed(row: Row, i: int, reduce: Pass) -> tuple[Row, Pass] | None:
    return None if _uses(row, i, reduce.stage, ADDS) else ([*row[:i], *row[i + 1 :]], reduce)


def _beside_the_step(row: Row, i: int, reduce: Pass) -> tuple[Row, Pass]:
    whole = Pass(Kind.G, reduce.stage, 0)
    return [*row, (whole,)], whole


MISTAKES: dict[str, Mistake] = {
    "gathers behind the first use": _in_row(GATHERS, _behind_its_use),
    "never gathered": _in_row(GATHERS, _never_gathered),
    "gathered again before the last use": _in_row(GATHERS, _again_before_the_drop),
    "gathered twice": _in_row(GATHERS, _twice),
    "gathered again unread": _in_row(GATHERS, _unread),
    "gathered by another's name": _in_row(GATHERS, _misnamed),
    "summed before the last gradient": _in_row({Kind.RS}, _before_its_gradient),
    "summed behind a later gradient": _in_row({Kind.RS}, _behind_a_later_one),
    "never summed": _in_row({Kind.RS}, _never_summed),
    "summed with the step too": _in_row({Kind.RS}, _beside_the_step),
}

if __name__ == "__main__":
    run(Proof("weights", draw, check, wrong).main)
