"""Tables that no catalogue has and `verify` allows: stages anywhere, passes in any order, chains of
unequal length.

A table is played with dice: as long as there is one, some pass whose inputs are there runs next.
Ranks that follow such a play never wait in a circle, so every table can be run.
"""

from __future__ import annotations

import random
from argparse import ArgumentParser
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import lru_cache
from typing import Any

from megapipe.schedule import Kind, Pass, Placement, Schedule, ScheduleError, Step, verify

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
    try:
        verify(paired)
    except (
        ScheduleError
    ):  # what the backward of a pair needs may follow from what its forward sends
        return plain
    return paired


def prove(
    description: str | None,
    draw: Callable[[random.Random], tuple[Any, ...] | None],
    check: Callable[..., None],
    misorder: Callable[[random.Random, Schedule], list[str]],
) -> None:
    """Draw as many tables and misorders as the command line asks for, and print how many of each
    there were.

    draw: a table and what `check` is given behind it; None for no table.
    """
    parser = ArgumentParser(description=description)
    parser.add_argument("--tables", type=int, default=300)
    parser.add_argument("--misorders", type=int, default=300)
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    dice, held, refused = random.Random(args.seed), 0, Counter[str]()
    while held < args.tables:
        if (drawn := draw(dice)) is not None:
            check(*drawn)
            held += 1
    while refused.total() < args.misorders:
        if (drawn := draw(dice)) is not None:
            refused.update(misorder(dice, drawn[0]))
    print(f"{held} tables verified, held as counted by hand")
    print(
        f"{refused.total()} misorders, all refused by the line: "
        + ", ".join(f"{n} {x}" for x, n in refused.items())
    )


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
        at = 0
        while at + 1 < len(schedule.ranks[rank]):
            row = schedule.ranks[rank]
            one, other = row[at : at + 2]
            if len(one) == len(other) == 1 and rng.random() < 0.6:
                rows = (
                    *schedule.ranks[:rank],
                    (*row[:at], one + other, *row[at + 2 :]),
                    *schedule.ranks[rank + 1 :],
                )
                with suppress(ScheduleError):
                    verify(tried := replace(schedule, ranks=rows))
                    schedule = tried
            at += 1
    return schedule
