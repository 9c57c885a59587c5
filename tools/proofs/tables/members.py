"""Swap the order of a shared channel on one member of a group: all ranks refuse such a table before
a step.

    python tools/proofs/tables/members.py --tables 300 --seed 1

Ranks of a group of experts, of tensor or of context parallelism stand at the same place of their
pipelines, run the same row of one table, and meet in collectives by its order alone: a member with
two steps of the row swapped would send the tokens of one microbatch among those of another, or wait
for ever. Tables are drawn, with pairs and without; the swapped one is valid by itself wherever two
steps can be found whose swap leaves it so. Every member compares what it would run with all others
over a store, as ranks do when they start. Ends with how many were refused, and of them were valid
alone.
"""

from __future__ import annotations

import sys
from argparse import ArgumentParser
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from random import Random

# A fresh clone runs it before anything is installed.
sys.path.insert(0, str(Path(__file__).parents[3]))

import contextlib

from torch.distributed import HashStore  # type: ignore[attr-defined]

from megapipe.config import Config
from megapipe.distributed.meeting.agreement import agree
from megapipe.errors import ConfigError
from megapipe.flags.parse import parse
from megapipe.plan import make_plan
from megapipe.schedule import Schedule, ScheduleError, verify
from megapipe.schedule.shapes.pairs.pairs import pairs
from megapipe.training.guards.ranks import facts
from tools.proofs.tables.paired import drawn, drawn_costs

MEMBERS = 3
FLAGS = (
    "--num-layers 2 --hidden-size 16 --num-attention-heads 2 --seq-length 16 "
    "--max-position-embeddings 16 "
    "--micro-batch-size 1 --global-batch-size 2 --train-iters 3 --lr 1e-3 --padded-vocab-size 128 "
    "--mock-data"
)


def main() -> None:
    """Draw a number of tables."""
    parser = ArgumentParser(description=__doc__)
    parser.add_argument("--tables", type=int, default=300)
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    alone = 0
    for table, other in swapped(args.tables, Random(args.seed)):
        said = meet([table] * (MEMBERS - 1) + [other])
        assert all(len(problems) == 1 for problems in said), (table.name, said)
        alone += is_valid(other)
    print(
        f"{args.tables} tables with a lane swapped on one member: all refused; {alone} of them are "
        "valid alone"
    )


def swapped(count: int, dice: Random) -> Iterator[tuple[Schedule, Schedule]]:
    """Tables, and each with two neighbouring steps of one rank in the other order."""
    while count:
        table = drawn(dice)
        if table is None or table.num_microbatches < 2:
            continue
        if dice.random() < 0.5:
            with contextlib.suppress(ScheduleError):
                table = pairs(table, drawn_costs(dice), tries=4)
        tries = [_swap(table, dice) for _ in range(8)]
        yield table, next(filter(is_valid, tries), tries[0])
        count -= 1


def _swap(table: Schedule, dice: Random) -> Schedule:
    rank = dice.randrange(len(table.ranks))
    row = table.ranks[rank]
    i = dice.randrange(len(row) - 1)
    row = (*row[:i], row[i + 1], row[i], *row[i + 2 :])
    return replace(table, ranks=(*table.ranks[:rank], row, *table.ranks[rank + 1 :]))


def is_valid(table: Schedule) -> bool:
    """Is it a table that a run would take?"""
    try:
        verify(table)
    except ScheduleError:
        return False
    return True


def meet(tables: list[Schedule]) -> list[list[str]]:
    """Return the refusal that each member reads when it would run one of these tables; nothing for
    a member that goes on.
    """
    config = parse(Config, FLAGS.split())
    plan, store = make_plan(config), HashStore()
    told = [facts(config, replace(plan, schedule=table), ()) for table in tables]

    def one(rank: int) -> list[str]:
        try:
            agree(store, rank, len(tables), told[rank])
        except ConfigError as error:
            return list(error.problems)
        return []

    with ThreadPoolExecutor(len(tables)) as pool:
        return list(pool.map(one, range(len(tables))))


if __name__ == "__main__":
    main()
