"""The distributed optimizer's state in Megatron-LM's layout: flat rows of numbers.

Each model chunk of a rank has one row. Its parameters stand in reverse order, each at a multiple of
64 elements from the start of its bucket. Where buckets end is not always saved. The main parameters
must round to the weights, so each parameter is found by comparing numbers, never guessed.
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
    """The optimizer's state of one model chunk of a rank: a flat vector for each kind of state.

    The kinds are exp_avg, exp_avg_sq, and master for the float32 main parameters.

    Attributes:
        numel: the number of elements of each vector.
        read: (kind, start, stop) -> elements start..stop-1 of the kind's vector.
        orders: possible orders of the chunk's parameters in a vector, each a list of names.
    """

    numel: int
    read: Callable[[str, int, int], Tensor]
    orders: Sequence[Sequence[str]]


Weight = Callable[[str], Tensor]
"""Returns the whole weight of a name, in the shape in which megapipe saves it."""


@dataclass
class FlatState:
    """The optimizer's state by parameter, cut out of the flat vectors (`Row`) of all ranks.

    Call `find` once: it finds parameters by comparing with the weights. Then call `read`.

    Attributes:
        rows: for each tensor-parallel rank, a Row for each model chunk of all its pipeline ranks.
        layouts: {name: layout} of each saved parameter.
        tied: {name of a tied parameter: name of the parameter that owns the weight}.
        places: for each tensor-parallel rank, {name: (Row, index of the parameter's first
            element)}. `find` fills these.
    """

    rows: Sequence[Sequence[Row]]
    layouts: Mapping[str, Layout]
    tied: Mapping[str, str]
    places: list[dict[str, tuple[Row, int]]] = field(default_factory=list)

    def find(self, weight: Weight) -> None:
        """Find where every parameter begins in the rows, and fill `places`.

        Args:
            weight: returns the whole weight of a name, in its saved shape.
        Raises: CheckpointError if the main parameters of a row are not the model's weights in any
            of the row's possible orders.
        """
        for rank, rows in enumerate(self.rows):
            places: dict[str, tuple[Row, int]] = {}
            for row in rows:
                # Orders differ by version and kind of layers: numbers that fit decide.
                ways = (self._starts(row, order[::-1], rank, weight) for order in row.orders)
                starts = next((way for way in ways if way is not None), None)
                if starts is None:
                    raise CheckpointError(
                        "the distributed optimizer's main parameters are not the weights of the "
                        "model in any known order; convert the weights alone with --no-load-optim"
                    )
                # A tied weight stands in two rows with equal numbers; the first one is read.
                for name, start in starts.items():
                    places.setdefault(name, (row, start))
            self.places.append(places)

    def read(self, kind: str, name: str, layout: Layout) -> Tensor:
        """Return a parameter's whole state, in the shape in which megapipe saves it.

        Args:
            kind: exp_avg, exp_avg_sq or master (the float32 main parameter).
            name: megapipe's name of the parameter.
            layout: the parameter's layout, which gives that shape and each rank's slice.
        """
        # Tensor-parallel slices have one size, and each rank's row the slice of that rank.
        numel = math.prod(layout.local(Axis(size=len(self.rows))))
        parts = []
        for places in self.places:
            row, start = places[name]
            parts.append(row.read(kind, start, start + numel))
        return joined(parts, layout)

    def _starts(
        self, row: Row, names: Iterable[str], rank: int, weight: Weight
    ) -> dict[str, int] | None:
        """Return {parameter: index in the row at which it begins}.

        Returns None if the row's main parameters have another order.

        Args:
            names: the parameters in one possible order.
            rank: the tensor-parallel rank of the row.
            weight: returns the whole weight of a name, in its saved shape.
        """
        bucket = 0
        at = 0
        starts: dict[str, int] = {}
        for name in names:
            owner = self.tied.get(name, name)
            whole = weight(owner)
            mine = self.layouts[owner].mine(whole, Axis(rank, len(self.rows))).flatten()
            # In the bucket of the parameter before it, or at the start of the next bucket, which
            # follows without a gap.
            aligned = bucket + -(-(at - bucket) // ALIGN) * ALIGN
            if _holds(row, aligned, mine):
                start = aligned
            elif _holds(row, at, mine):
                start = at
                bucket = at
            else:
                return None
            starts[name] = start
            at = start + mine.numel()
        # The end of the row is padded, by less than a step of the alignment.
        return starts if at + ALIGN > row.numel else None


def _holds(row: Row, start: int, weight: Tensor) -> bool:
    """Return whether a row's main parameters, from `start` on, round to a weight's elements.

    Args:
        start: an index in the row.
        weight: [n], in the type of the model's weights.
    """
    stop = start + weight.numel()
    if stop > row.numel:
        return False
    return torch.equal(row.read("master", start, stop).to(weight.dtype), weight)
