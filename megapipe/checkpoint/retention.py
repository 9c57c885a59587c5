"""Decide which checkpoints of a run are kept: all of them, unless flags say otherwise.

The newest checkpoint, and checkpoints of other runs, always stay by default.
"""

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
"""--save-retain-interval, --save-keep-last, and iterations that may be removed; None for all."""


def surplus(iterations: Sequence[int], every: int | None, last: int | None) -> list[int]:
    """Return the iterations whose checkpoints are to be removed.

    Multiples of `every` stay, and so do the newest `last`; the newest one always stays.

    Args:
        iterations: the iterations of all checkpoints in ascending order.
        every: --save-retain-interval, in iterations; None without the flag.
        last: --save-keep-last, a number of checkpoints; None without the flag.
    """
    if not every and not last:
        return []
    older = iterations[: -(last or 1)]
    return [n for n in older if every is None or n % every]


def retain(newest: Path, keep: Keep) -> list[int]:
    """Remove the checkpoints that `surplus` returns, if all files of the newest one are there.

    A checkpoint that cannot be removed stays.

    Args:
        newest: the folder of the checkpoint that was just saved. Later iterations stay.
        keep: (--save-retain-interval, --save-keep-last, iterations that may be removed). The first
            two are None without the flag; a last value of None allows all iterations.
    Returns: the iterations that were removed.
    """
    root = newest.parent
    removed: list[int] = []
    every, last, own = keep
    with suppress(OSError, CheckpointError):
        sizes = {name: entry["bytes"] for name, entry in commit.read_manifest(newest).items()}
        if sizes != {name: (newest / name).stat().st_size for name in sizes}:
            return []
        there = [n for n in commit.iterations_in(root) if n <= commit.iteration_of(newest)]
        for n in surplus(there, every, last):
            if own is not None and n not in own:
                continue
            folder = commit.folder_of(root, n)
            # Renamed first: if the process is killed meanwhile, the rest is no checkpoint, and the
            # next run removes it.
            gone = commit.aside(folder, "tmp")
            os.rename(folder, gone)
            removed.append(n)
            shutil.rmtree(gone, ignore_errors=True)
    return removed


def others(config: CheckpointConfig, own: Sequence[int]) -> str:
    """Return a line: which checkpoints of earlier runs are in --save, and whether they are removed.

    The line is empty if there are none, or if no flag removes any checkpoint.

    Args:
        config: the checkpoint flags.
        own: iterations that this run has saved or loaded.
    """
    flags = _flags(config)
    if not config.save or not flags:
        return ""
    there = [n for n in commit.iterations_in(Path(config.save)) if n not in own]
    if not there:
        return ""
    listed = ", ".join(map(str, there))
    head = (
        f"--save {config.save} has {len(there)} checkpoint(s) of earlier runs, iterations {listed}"
    )
    if config.save_remove_earlier:
        return f"{head}: all that {flags} does not keep will be removed (--save-remove-earlier)"
    return f"{head}: they stay. To let {flags} remove them too add --save-remove-earlier"


def removed_lines(removed: Sequence[int], config: CheckpointConfig) -> str:
    """Return a text with a line for each removed iteration, for the log."""
    end = f"from {config.save} ({_flags(config)})\n"
    return "".join(f"  removed checkpoint of iteration {n:7d} {end}" for n in removed)


def _flags(config: CheckpointConfig) -> str:
    """Return the flags that limit the number of checkpoints, as typed."""
    given = {
        "--save-retain-interval": config.save_retain_interval,
        "--save-keep-last": config.save_keep_last,
    }
    return " ".join(f"{flag} {value}" for flag, value in given.items() if value is not None)
