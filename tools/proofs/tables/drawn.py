"""Tables that no catalogue has and `verify` allows: stages anywhere, passes in any order, chains of
unequal length.

A table is played with dice: as long as there is one, some pass whose inputs are there runs next.
Ranks that follow such a play never wait in a circle, so every table can be run.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from functools import lru_cache

from megapipe.schedule import (
    SCHEDULES,
    Kind,
    Pass,
    Placement,
    Schedule,
    ScheduleError,
    Step,
    build,
    verify,
)

STYLES = ("any", "lifo", "fifo")
"""Which of the backwards that may run: by the dice, of the latest forward, of the earliest."""


def drawn_table(seed: int, ranks: int, microbatches: int) -> Schedule:
    """The table of a seed: the same numbers, the same table."""
    dice = random.Random(seed)
    empty = Schedule(f"drawn-{seed}", _placement(dice, ranks), microbatches, ((),) * ranks)
    rows: list[list[Step]] = [[] for _ in range(ranks)]
    for item in _play(dice, empty):
        rows[empty.placement.rank_of[item.stage]].append((item,))
    plain = replace(empty, ranks=tuple(map(tuple, rows)))
    paired = replace(empty, ranks=tuple(tuple(_paired(dice, row)) for row in rows))
    # What the backward of a pair needs may follow from what its forward sends.
    return plain if refusal(paired) else paired


def any_table(dice: random.Random, p: int, least: int, chunks: Sequence[int]) -> Schedule:
    """Draw a table of dice, or one of the catalogue on p ranks.

    Args:
        least: number of microbatches of a schedule of the catalogue, which has at most 4p.
        chunks: numbers of stages per rank, for schedules that leave the number open.

    Raises: ScheduleError if a schedule does not allow the numbers.
    """
    if dice.random() < 0.2:
        return drawn_table(dice.randrange(10**9), min(p, 4), 2 * dice.randint(1, 6))
    name = dice.choice([name for name, entry in SCHEDULES.items() if not entry.searched])
    stages = dice.choice(chunks) if SCHEDULES[name].chunks is None else None
    return build(name, p, dice.randint(least, 4 * p), chunks=stages)


def at(rows: Iterable[Iterable[Step]], item: Pass) -> tuple[int, int] | None:
    """Return the rank and the step of a pass; None if no row has it."""
    places = ((r, i) for r, row in enumerate(rows) for i, step in enumerate(row) if item in step)
    return next(places, None)


def with_row(table: Schedule, rank: int, row: Iterable[Step]) -> Schedule:
    """Return the table with another row of a rank."""
    return replace(table, ranks=(*table.ranks[:rank], tuple(row), *table.ranks[rank + 1 :]))


def refusal(table: Schedule) -> list[str]:
    """Return the lines in which `verify` refuses a table; none if it allows it."""
    try:
        verify(table)
    except ScheduleError as error:
        return str(error).splitlines()
    return []


def _placement(dice: random.Random, ranks: int) -> Placement:
    """Every rank has a stage; the ends of the model are where a tied embedding can be summed."""
    mirrored = ranks % 2 == 0 and dice.random() < 0.4
    while True:
        chain = dice.randint(ranks, 2 * ranks)
        rank_of = [
            0,
            *(dice.randrange(ranks) for _ in range(chain - 2)),
            dice.choice((0, ranks - 1)),
        ][:chain]
        if set(rank_of) == set(range(ranks)):
            return Placement((*rank_of, *(ranks - 1 - rank for rank in rank_of if mirrored)), chain)


def _play(dice: random.Random, table: Schedule) -> Iterator[Pass]:
    place, every = table.placement, range(table.num_microbatches)
    style, eager, splits = (
        dice.choice(STYLES),
        dice.choice((0.2, 0.5, 1.0)),
        dice.choice((0.0, 0.5, 1.0)),
    )
    stages = range(place.num_stages)
    to_come = {
        s: [number for number in every if table.chain_of(number) == s // place.chain]
        for s in stages
    }
    if dice.random() < 0.5:
        for first in stages[:: place.chain]:
            dice.shuffle(to_come[first])
            # Both ends read their microbatches in one order.
            to_come[first + place.chain - 1] = list(to_come[first])
    begun: dict[int, list[int]] = {s: [] for s in stages}
    done: set[tuple[bool, int, int]] = set()  # is it a backward; stage and microbatch
    owed: list[Pass] = []

    def there(is_backward: bool, stage: int | None, numbers: Sequence[int]) -> list[int]:
        return [
            number for number in numbers if stage is None or (is_backward, stage, number) in done
        ]

    def forwards() -> Iterator[Pass]:
        for s in stages:
            ends = place.is_first(s) or place.is_last(s)
            yield from (
                Pass(Kind.F, s, n)
                for n in there(False, place.prev(s), to_come[s][:1] if ends else to_come[s])
            )

    def backwards() -> Iterator[Pass]:
        for s in stages:
            ready = there(True, place.next(s), begun[s])
            chosen = {"any": ready, "lifo": ready[-1:], "fifo": ready[:1]}[style]
            yield from (Pass(Kind.B if dice.random() < splits else Kind.BW, s, n) for n in chosen)

    while True:
        ahead, behind = list(forwards()), [*backwards(), *owed]
        if not (ahead or behind):
            return
        item = dice.choice(ahead if ahead and (not behind or dice.random() < eager) else behind)
        yield item
        if item.kind is Kind.W:
            owed.remove(item)
            continue
        done.add((item.kind.is_backward, item.stage, item.microbatch))
        (begun if item.kind.is_backward else to_come)[item.stage].remove(item.microbatch)
        if item.kind is Kind.F:
            begun[item.stage].append(item.microbatch)
        elif item.kind.is_split:
            owed.append(Pass(Kind.W, item.stage, item.microbatch))


def _paired(dice: random.Random, row: Sequence[Step]) -> Iterator[Step]:
    """Yield a row's steps, some forwards joined with the next backward of another microbatch or
    stage.
    """
    steps = iter(row)
    for step in steps:
        f = step[0]
        after = next(steps, None) if f.kind is Kind.F and dice.random() < 0.5 else None
        if after is not None and after[0].kind.is_backward and after[0].microbatch != f.microbatch:
            yield (f, after[0])
        else:
            yield from (one for one in (step, after) if one is not None)


@lru_cache(maxsize=256)
def joined(schedule: Schedule, seed: int) -> Schedule:
    """Return the table with neighbours in a row as pairs, where a die says so and no rank then
    deadlocks.
    """
    rng = random.Random(seed)
    for rank in range(len(schedule.ranks)):
        i = 0
        while i + 1 < len(schedule.ranks[rank]):
            row = schedule.ranks[rank]
            one, other = row[i : i + 2]
            if len(one) == len(other) == 1 and rng.random() < 0.6:
                tried = with_row(schedule, rank, (*row[:i], one + other, *row[i + 2 :]))
                if not refusal(tried):
                    schedule = tried
            i += 1
    return schedule
