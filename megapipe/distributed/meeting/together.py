"""Work that ranks do together: an error on any of them is the same error on all, so that none waits for another."""

from __future__ import annotations

import errno
import shutil
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TypeVar

from megapipe.distributed.mesh import ProcessMesh
from megapipe.errors import CheckpointError

T = TypeVar("T")


def on_first(mesh: ProcessMesh, work: Callable[[], T]) -> T:
    """`work` on the first rank only; all get its result, a text or number, or its error."""
    first = mesh.world.rank == 0
    return mesh.world.gather_json(together(mesh, lambda: work() if first else None))[0]  # type: ignore[no-any-return]


def together(mesh: ProcessMesh, work: Callable[[], T], folder: Path | None = None) -> T:
    """`work` on every rank; an error on any becomes the same CheckpointError on all.

    An error that is none of the user's is raised as it is on the rank that has it.

    Args:
        folder: where it writes, which torch does not say when the disk is full.
    """
    problems: list[str] = []
    unexpected: Exception | None = None
    try:
        result = work()
    except CheckpointError as error:
        problems += error.problems
    except OSError as error:
        problems.append(f"{error.filename or folder or 'checkpoint'}: {error.strerror or error}{room(error, folder)}")
    except Exception as error:
        unexpected = error
        problems.append(f"on rank {mesh.world.rank}: {type(error).__name__}: {error}")
    found = dict.fromkeys(problem for row in mesh.world.gather_json(problems) for problem in row)
    if unexpected is not None:
        raise unexpected
    if found:
        raise CheckpointError(tuple(found))
    return result


def share_of(names: Iterable[str], mesh: ProcessMesh) -> list[str]:
    """The files that this rank reads for all."""
    return sorted(names)[mesh.world.rank :: mesh.world.size]


def room(error: BaseException, folder: Path | None) -> str:
    """The room that is left on a disk that is full, behind an error; empty for other errors."""
    full = isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
    if folder is None or not full or not folder.exists():
        return ""
    written = sum(path.stat().st_size for path in folder.iterdir())
    return f" ({written:,} bytes are written in {folder.name}, {shutil.disk_usage(folder).free:,} bytes are free)"
