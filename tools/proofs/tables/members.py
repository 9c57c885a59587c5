"""Swap the order of a shared channel on one member of a group: all ranks refuse such a table before
a step.

    python -m tools.proofs.tables.members --cases 300 --seed 1

Ranks of a group of experts, of tensor or of context parallelism stand at the same place of their
pipelines, run the same row of one table, and meet in collectives by its order alone: a member with
two steps of the row swapped would send the tokens of one microbatch among those of another, or wait
for ever. Tables are drawn, with pairs and without; the swapped one is valid by itself wherever two
steps can be found whose swap leaves it so. Every member compares what it would run with all others
over a store, as ranks do when they start. Ends with how many were refused, and of them were valid
alone.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from random import Random

from torch.distributed import HashStore  # type: ignore[attr-defined]

from megapipe.config import Config
from megapipe.distributed.meeting.agreement import agree
from megapipe.errors import ConfigError
from megapipe.flags.parse import parse, run
from megapipe.plan import make_plan
from megapipe.schedule import Schedule, ScheduleError
from megapipe.schedule.shapes.pairs.pairs import pairs
from megapipe.training.guards.ranks import facts
from tools.proofs.shrink import Draws, Fuzzer
from tools.proofs.tables.drawn import refusal, with_row
from tools.proofs.tables.paired import drawn, drawn_costs

MEMBERS = 3
FLAGS = (
    "--num-layers 2 --hidden-size 16 --num-attention-heads 2 --seq-length 16 "
    "--max-position-embeddings 16 "
    "--micro-batch-size 1 --global-batch-size 2 --train-iters 3 --lr 1e-3 --padded-vocab-size 128 "
    "--mock-data"
)


@dataclass(frozen=True)
class Flags(Draws):
    """Swap two steps of a table on one member of a group, and see that all ranks refuse it."""

    cases: float = 300
    """Number of tables."""


def main(argv: Sequence[str]) -> None:
    """Draw a number of tables."""
    flags, alone = parse(Flags, argv), 0

    def refused(case: tuple[Schedule, Schedule]) -> list[str]:
        nonlocal alone
        table, other = case
        said = meet([table] * (MEMBERS - 1) + [other])
        alone += not refusal(other)
        return [] if all(len(problems) == 1 for problems in said) else [f"{table.name}: {said}"]

    fuzzer = Fuzzer("members", swapped, refused)
    fuzzer.prove(flags)
    print(
        f"{fuzzer.count} tables with a lane swapped on one member: all refused; {alone} of them "
        "are valid alone"
    )


def swapped(dice: Random) -> tuple[Schedule, Schedule] | None:
    """A table, and the same with two neighbouring steps of one rank in the other order."""
    table = drawn(dice)
    if table is None or table.num_microbatches < 2:
        return None
    if dice.random() < 0.5:
        with contextlib.suppress(ScheduleError):
            table = pairs(table, drawn_costs(dice), tries=4)
    tries = [_swap(table, dice) for _ in range(8)]
    return table, next((x for x in tries if not refusal(x)), tries[0])


def _swap(table: Schedule, dice: Random) -> Schedule:
    rank = dice.randrange(len(table.ranks))
    row = table.ranks[rank]
    i = dice.randrange(len(row) - 1)
    return with_row(table, rank, (*row[:i], row[i + 1], row[i], *row[i + 2 :]))


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
    run(main)
