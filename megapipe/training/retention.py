"""Which checkpoints a run keeps: all, unless it is told otherwise; the newest always."""

from __future__ import annotations

import os
import shutil
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from megapipe.errors import CheckpointError
from megapipe.training import commit


def surplus(iterations: Sequence[int], every: int | None, last: int | None) -> list[int]:
    """Those of ascending iterations that are let go: neither a multiple of `every` nor among the newest `last` (1)."""
    older = iterations[: -(last or 1)]
    return [n for n in older if every is None or n % every] if every or last else []


def retain(newest: Path, every: int | None, last: int | None) -> list[int]:
    """Remove what is not kept, once the newest checkpoint's files are all there; none that is newer, or set aside.

    Returns: the iterations that were removed. What cannot be removed stays.
    """
    root, removed = newest.parent, []
    with suppress(OSError, CheckpointError):
        sizes = {name: entry["bytes"] for name, entry in commit.read_manifest(newest).items()}
        if sizes != {name: (newest / name).stat().st_size for name in sizes}:
            return []
        there = [n for n in commit.iterations_in(root) if n <= commit.iteration_of(newest)]
        for n in surplus(there, every, last):
            folder = commit.folder_of(root, n)
            gone = commit.aside(folder, "tmp")  # killed in between, it is no checkpoint and the next run clears it
            os.rename(folder, gone)
            removed.append(n)
            shutil.rmtree(gone, ignore_errors=True)
    return removed
