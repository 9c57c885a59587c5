"""The distributed optimizer's state as Megatron-LM lays it out: of each model chunk of a rank one row of numbers.

Parameters follow each other backwards, each at a multiple of 64 from the begin of its bucket. Where buckets end is not
always written down; but the row of main parameters must round to the weights, so it is found, and never guessed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from megapipe.convert.megatron.names import joined
from megapipe.distributed.axis import Axis
from megapipe.distributed.layout import Layout
from megapipe.errors import CheckpointError

ALIGN = 64


@dataclass(frozen=True)
class Row:
    """The row of one model chunk of a rank.

    Attributes:
        read: (exp_avg, exp_avg_sq or master; start; stop) -> numbers.
        orders: ways in which its parameters may follow each other.
    """

    numel: int
    read: Callable[[str, int, int], Tensor]
    orders: Sequence[Sequence[str]]


Weight = Callable[[str], Tensor]
"""A weight of the model as we save it, whole."""


@dataclass
class FlatState:
    """State by name, from the rows of all ranks.

    Attributes:
        rows: by tensor-parallel rank those of all pipeline ranks and chunks.
        tied: parameters that repeat another's weight, and whose.
    """

    rows: Sequence[Sequence[Row]]
    layouts: Mapping[str, Layout]
    tied: Mapping[str, str]
    places: list[dict[str, tuple[Row, int]]] = field(default_factory=list)

    def find(self, weight: Weight) -> None:
        """Find every parameter. Raises: CheckpointError if the rows do not hold the weights of the model."""
        for rank, rows in enumerate(self.rows):
            found: dict[str, tuple[Row, int]] = {}
            for row in rows:
                ways = (self._starts(row, order[::-1], rank, weight) for order in row.orders)
                starts = next((way for way in ways if way is not None), None)
                if starts is None:
                    raise CheckpointError(
                        "the distributed optimizer's main parameters are not the weights of the model in any known "
                        "order; convert the weights alone with --no-load-optim"
                    )
                found = {name: (row, start) for name, start in starts.items()} | found  # a copy's are the same
            self.places.append(found)

    def read(self, kind: str, name: str, layout: Layout) -> Tensor:
        """A whole tensor in the shape in which we save it."""
        numel = math.prod(layout.local(Axis(size=len(self.rows))))
        places = [found[name] for found in self.places]
        return joined([row.read(kind, start, start + numel) for row, start in places], layout)

    def _starts(self, row: Row, names: Iterable[str], rank: int, weight: Weight) -> dict[str, int] | None:
        begin = at = 0
        starts: dict[str, int] = {}
        for name in names:
            owner = self.tied.get(name, name)
            layout = self.layouts[owner]
            whole = weight(owner)
            mine = layout.mine(whole, Axis(rank, len(self.rows))).flatten()
            aligned = begin - (begin - at) // ALIGN * ALIGN
            for start in dict.fromkeys((aligned, at)):
                stop = start + mine.numel()
                if stop <= row.numel and torch.equal(row.read("master", start, stop).to(mine.dtype), mine):
                    break
            else:
                return None
            begin = begin if start == aligned else at
            starts[name], at = start, stop
        return starts if at == row.numel or at + ALIGN > row.numel else None
