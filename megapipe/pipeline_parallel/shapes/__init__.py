"""Say how tables of each shape run: with microbatches cut into slices, or with passes in pairs.

A new shape is a file here and a line in the functions that it concerns.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from megapipe.distributed.mesh import ProcessMesh
from megapipe.distributed.tokens import Documents
from megapipe.pipeline_parallel.microbatches import Microbatches
from megapipe.pipeline_parallel.shapes.pairs.pairs import Pairs
from megapipe.pipeline_parallel.shapes.slices import slices_of
from megapipe.schedule import Schedule, unpaired


def microbatches_of(
    table: Schedule,
    length: int | None,
    mesh: ProcessMesh,
    config: Any,
    documents: Callable[[int], Documents | None] | None = None,
) -> Callable[[], Microbatches]:
    """Return a function that makes a new `Microbatches` for a stage.

    The function makes `Slices`, a subclass, if the table cuts microbatches into slices.

    Args:
        table: the schedule.
        length: number of tokens of a sequence; None if sequences differ in length.
        mesh: this rank's mesh; its context-parallel ranks share the tokens of a sequence.
        config: may have `sequence_parallel`, with which tensor-parallel ranks share them too.
        documents: takes the number of a microbatch and returns its documents, so that slices are
            cut near their borders. None to cut all microbatches at the same tokens.
    Raises: ConfigError if the sequence cannot be cut as the table says, see `slices_of`.
    """
    return slices_of(table, length, mesh, config, documents) or Microbatches


together_on = Pairs
"""Called with a device, returns a function that runs the passes of a step of the table together."""


def as_run(table: Schedule, *, hides: bool) -> Schedule:
    """Return the table as ranks run it: with its overlapped pairs, or with each pass on its own.

    Args:
        hides: whether layers wait for collectives, so that the other pass of a pair can run during
            a wait. Otherwise each pass of a pair runs on its own.
    """
    # Otherwise the first of a pair sends its result before the second runs.
    return table if hides else unpaired(table)
