"""A model that does not fit in the memory of its device, in the user's words."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager

from megapipe.distributed.mesh import ProcessMesh
from megapipe.errors import ConfigError
from megapipe.plan import GIB, Plan


@contextmanager
def room(mesh: ProcessMesh, plan: Plan) -> Iterator[None]:
    """For a model: a device that is too small is a mistake in the flags. Raises: ConfigError."""
    try:
        yield
    except (RuntimeError, MemoryError) as error:  # torch has no class of its own for the host's memory
        if isinstance(error, RuntimeError) and not re.search("allocate memory|out of memory", str(error)):
            raise
        needed = plan.peak_bytes[mesh.pp.rank] / GIB
        raise ConfigError(
            f"rank {mesh.world.rank} has no memory for its stages, which need {needed:,.3g} GiB by the plan. Use more "
            "--pipeline-model-parallel-size or --tensor-model-parallel-size, or a smaller model."
        ) from None
