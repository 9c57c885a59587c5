"""Do work on all ranks so that an error on one rank becomes the same error on all.

Otherwise the other ranks would wait for the failed one.
"""

from __future__ import annotations

import errno
import shutil
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TypeVar

from megapipe.distributed.device import lacks_memory
from megapipe.distributed.mesh import ProcessMesh
from megapipe.errors import CheckpointError

T = TypeVar("T")


def on_first(mesh: ProcessMesh, work: Callable[[], T]) -> T:
    """Call `work` on the first rank only, and return its result on all ranks. Collective.

    Args:
        work: the function, whose result JSON must be able to represent.
    Raises: an error on all ranks if `work` raises, as `together` says.
    """
    first = mesh.world.rank == 0
    result = together(mesh, lambda: work() if first else None)
    return mesh.world.gather_json(result)[0]  # type: ignore[no-any-return]


def together(mesh: ProcessMesh, work: Callable[[], T], folder: Path | None = None) -> T:
    """Call `work` on every rank and return this rank's result. Collective.

    Args:
        work: the function.
        folder: the folder to which `work` writes, for the message about a full disk; or None.
    Raises: if `work` raises on any rank, the same CheckpointError on all ranks. Only a rank whose
        own error is neither a CheckpointError nor an OSError, nor a lack of memory, raises its own
        error unchanged.
    """
    problems: list[str] = []
    unexpected: Exception | None = None
    try:
        result = work()
    except CheckpointError as error:
        problems += error.problems
    except OSError as error:
        # torch raises an OSError without a file name.
        name = error.filename or folder or "checkpoint"
        problems.append(f"{name}: {error.strerror or error}{room(error, folder)}")
    except Exception as error:
        rank = mesh.world.rank
        if lacks_memory(error):
            problems.append(failure(folder or "checkpoint", rank, error))
        else:
            unexpected = error
            problems.append(f"on rank {rank}: {type(error).__name__}: {error}")
    # Every rank gathers, also a rank with an error: the others wait for it here.
    everyone = mesh.world.gather_json(problems)
    if unexpected is not None:
        raise unexpected
    found = dict.fromkeys(problem for own in everyone for problem in own)
    if found:
        raise CheckpointError(tuple(found))
    return result


def share_of(names: Iterable[str], mesh: ProcessMesh) -> list[str]:
    """Return the names of the files that this rank reads, if all ranks together read each once.

    Args:
        names: names of all files.
    """
    # Sorted, because ranks may list a folder in different orders.
    return sorted(names)[mesh.world.rank :: mesh.world.size]


def failure(folder: Path | str, rank: int, error: BaseException) -> str:
    """Return a text on the failure of a rank that saves or loads a folder."""
    text = str(error) or type(error).__name__
    if lacks_memory(error):
        # Further lines have advice on allocators.
        text = f"no memory for its tensors: {text.splitlines()[0]}"
    note = room(error, folder) if isinstance(folder, Path) else ""
    return f"{folder}, on rank {rank}: {text}{note}"


def room(error: BaseException, folder: Path | None) -> str:
    """Return a note on how much space is left on a folder's disk, to append to an error.

    The note is "" if the error is not about a full disk, or if the folder is None or missing.
    """
    # No space, a full quota, or a file larger than the file system allows.
    full = isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
    if folder is None or not full or not folder.exists():
        return ""
    written = sum(path.stat().st_size for path in folder.iterdir())
    free = shutil.disk_usage(folder).free
    return f" ({written:,} bytes are written in {folder.name}, {free:,} bytes are free)"
