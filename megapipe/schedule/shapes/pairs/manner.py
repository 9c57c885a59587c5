"""Manners of play: how a rank chooses among what is ready, those that are tried first, and small changes of one."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import product
from math import inf
from random import Random


@dataclass(frozen=True)
class Manner:
    """A choice of ranks among what is ready.

    Attributes:
        wait: how long what is ready waits for a partner that is under way, in forwards of a stage.
        reach: how far down its forwards, and its backwards, a rank looks for one that is ready.
        forwards: two F of independent microbatches run together from this microbatch on, where there is no B.
        backwards: two B run together where there is no F.
        weights: an F runs with a W that is owed where there is no B.
        keep: so many W that are owed wait for a partner, where no F lacks the memory.
        spare: stages' activations that each rank leaves free of what it may hold.
    """

    wait: float
    reach: int
    forwards: float
    backwards: bool
    weights: bool
    keep: int
    spare: tuple[int, ...] = ()


GRID = [
    Manner(*x) for x in product((0.5, 2.0), (1, 8), (inf, 1.0), (False,), (False, True), (0, 1))
]


def changed(manner: Manner, ranks: int, random: Random) -> Manner:
    """A manner with one of its numbers changed."""
    kind = random.randrange(7)
    if kind == 0:
        return replace(manner, wait=manner.wait * random.choice((0.5, 0.7, 1.4, 2.0)))
    if kind == 1:
        return replace(manner, reach=random.choice((1, 2, 4, 8)))
    if kind == 2:
        return replace(manner, forwards=random.choice((inf, 1.0, 4.0, float(ranks))))
    if kind == 3:
        return replace(manner, backwards=not manner.backwards)
    if kind == 4:
        return replace(manner, weights=not manner.weights)
    if kind == 5:
        return replace(manner, keep=random.choice((0, 1, 2, 4)))
    spare, first = list(manner.spare or (0,) * ranks), random.randrange(ranks)
    for rank in range(first, random.randint(first, ranks - 1) + 1):
        spare[rank] = max(0, spare[rank] + random.choice((-1, 1, 1, 2)))
    return replace(manner, spare=tuple(spare))
