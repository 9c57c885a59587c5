"""A table whose loads begin a pass early, for features.py: no transform of the package makes one.

There a buffer of the host that a load still reads is lent to a copy of the next forward.
"""

from __future__ import annotations

from dataclasses import replace

from megapipe.schedule import Kind, Schedule, build
from tools.proofs.tables.moved import moved


def loads_ahead(num_ranks: int, num_microbatches: int) -> Schedule:
    """1F1B that copies all activations; the load of a backward begins before the forward and the
    copy that come before the backward.
    """
    table = moved(build("1f1b", num_ranks, num_microbatches), "out")
    rows = []
    for row in table.ranks:
        own = list(row)
        for n in range(2, len(own)):
            kinds = [step[0].kind for step in own[n - 2 : n + 1]]
            earlier = own[n][0].microbatch < own[n - 1][0].microbatch
            if kinds == [Kind.F, Kind.O, Kind.L] and earlier and n > 4:
                own[n - 2 : n + 1] = [own[n], own[n - 2], own[n - 1]]
        rows.append(tuple(own))
    return replace(table, ranks=tuple(rows))
