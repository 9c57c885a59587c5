"""Find out in which shape a table runs: with whole microbatches, or with slices of them.

A new shape is a file here and a line in `microbatches_of`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from megapipe.distributed.mesh import ProcessMesh
from megapipe.distributed.tokens import Documents
from megapipe.pipeline_parallel.microbatches import Microbatches
from megapipe.pipeline_parallel.shapes.slices import slices_of
from megapipe.schedule import Schedule


def microbatches_of(
    table: Schedule,
    length: int | None,
    mesh: ProcessMesh,
    config: Any,
    documents: Callable[[int], Documents | None] | None = None,
) -> Callable[[], Microbatches]:
    """Return a function that makes a stage's microbatches, cut by the table.

    Arguments and errors: see `slices_of`.
    """
    return slices_of(table, length, mesh, config, documents) or Microbatches
