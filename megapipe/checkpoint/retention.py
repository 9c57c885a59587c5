"""Retention of a run's checkpoints: all, unless it is told otherwise; always the newest, and those of other runs."""

from __future__ import annotations

import os
import shutil
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from megapipe.checkpoint import commit
from megapipe.errors import CheckpointError

if TYPE_CHECKING:
    from megapipe.config import CheckpointConfig

Keep = tuple[int | None, int | None, Sequence[int] | None]
"""--save-retain-interval, --save-keep-last, and the iterations that may be removed; None: all."""


def surplus(iterations: Sequence[int], every: int | None, last: int | None) -> list[int]:
    """Iterations, of ascending ones, that are let go: neither a multiple of `every` nor among the newest `last` (1)."""
    older = iterations[: -(last or 1)]
    return [n for n in older if every is None or n % every] if every or last else []


def retain(newest: Path, keep: Keep) -> list[int]:
    """Remove what is not kept, once the newest checkpoint's files are all there; none that is newer, or set aside.

    Returns: the iterations that were removed. What cannot be removed stays.
    """
    root, removed = newest.parent, []
    every, last, own = keep
    with suppress(OSError, CheckpointError):
        sizes = {name: entry["bytes"] for name, entry in commit.read_manifest(newest).items()}
        if sizes != {name: (newest / name).stat().st_size for name in sizes}:
            return []
        there = [n for n in commit.iterations_in(root) if n <= commit.iteration_of(newest)]
        for n in surplus(there, every, last):
            if own is None or n in own:
                folder = commit.folder_of(root, n)
                gone = commit.aside(folder, "tmp")  # killed in between, it is no checkpoint and the next run clears it
                os.rename(folder, gone)
                removed.append(n)
                shutil.rmtree(gone, ignore_errors=True)
    return removed


def others(config: CheckpointConfig, own: Sequence[int]) -> str:
    """A line on another run's checkpoints in --save; empty where there are none, or nothing is ever removed."""
    there = [n for n in commit.iterations_in(Path(config.save)) if n not in own] if config.save else []
    if not there or not _flags(config):
        return ""
    named = (
        f"--save {config.save} has {len(there)} checkpoint(s) of earlier runs, iterations {', '.join(map(str, there))}"
    )
    if config.save_remove_earlier:
        return f"{named}: those that {_flags(config)} does not keep will be removed (--save-remove-earlier)"
    return f"{named}: they stay. To let {_flags(config)} remove them too add --save-remove-earlier"


def told(removed: Sequence[int], config: CheckpointConfig) -> str:
    """A line for each."""
    return "".join(f"  removed checkpoint of iteration {n:7d} from {config.save} ({_flags(config)})\n" for n in removed)


def _flags(config: CheckpointConfig) -> str:
    given = {"--save-retain-interval": config.save_retain_interval, "--save-keep-last": config.save_keep_last}
    return " ".join(f"{flag} {value}" for flag, value in given.items() if value is not None)
