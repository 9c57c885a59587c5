"""Policies by which ranks choose among ready passes: a grid to try first, and random changes.

No policy is best for all tables and costs. A simulation of one takes milliseconds, so `together`
tries many and keeps the best.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import product
from math import inf
from random import Random


@dataclass(frozen=True)
class PairingPolicy:
    """A policy by which ranks choose which pass to run next, and together with which other pass.

    A pass is ready when it has its inputs.

    Attributes:
        wait: how long a ready pass waits for a partner that will be ready soon, in units of a
            forward of one stage.
        reach: a rank chooses among this number of its next forwards, and of its next backwards.
        forwards: from this microbatch on, two F of different microbatches run together if no B is
            ready; inf for never.
        backwards: whether two B run together if no F is ready.
        weights: whether an F runs together with a pending W if no B is ready.
        keep: this number of pending W waits for a partner, as long as no F lacks memory.
        spare: for each rank, how many activations of one stage and microbatch it leaves free below
            its memory limit; () for 0.
    """

    wait: float
    reach: int
    forwards: float
    backwards: bool
    weights: bool
    keep: int
    spare: tuple[int, ...] = ()


# wait, reach, forwards, backwards, weights, keep. From microbatch 1 on, or never (inf), two F run
# together.
GRID = [
    PairingPolicy(*x)
    for x in product((0.5, 2.0), (1, 8), (inf, 1.0), (False,), (False, True), (0, 1))
]


def changed(manner: PairingPolicy, ranks: int, random: Random) -> PairingPolicy:
    """Return a policy with one of its values changed at random.

    Args:
        manner: the policy by which ranks choose among passes and pairs.
        ranks: number of ranks.
        random: the source of random numbers.
    """
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
    spare = list(manner.spare or (0,) * ranks)
    first = random.randrange(ranks)
    for rank in range(first, random.randint(first, ranks - 1) + 1):
        # More often up than down, because most policies of the grid leave nothing free.
        spare[rank] = max(0, spare[rank] + random.choice((-1, 1, 1, 2)))
    return replace(manner, spare=tuple(spare))
