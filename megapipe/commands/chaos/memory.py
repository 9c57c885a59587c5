"""States in shared memory, as `megapipe chaos` loses and damages them."""

from __future__ import annotations

import os
import random
import shutil
import signal
from contextlib import suppress
from pathlib import Path

from megapipe.checkpoint.memory.slots import HEADER, SHARED
from megapipe.commands.chaos.broken_run import Launched, variables


def lose(run: Launched, draw: random.Random, *, pair: bool = False, flip: bool = False) -> str:
    """Kill a drawn rank and lose its memory, as if its machine were gone.

    Args:
        run: the launch to break.
        draw: chooses the rank.
        pair: do the same to the ranks that keep its state.
        flip: change a byte of each copy of its state that others keep.
    Returns: a text on it; empty if nothing is in memory.
    """
    folders = _folders(run)
    alive = {}
    for pid in run.ranks():
        local = variables(pid).get("LOCAL_RANK")
        if local is not None:
            alive[local] = pid
    if not folders.keys() & alive.keys():
        return ""
    first = draw.choice(sorted(folders.keys() & alive.keys()))
    gone = [first]
    # On one machine the local rank is the rank.
    kept = {path.stem.partition("-")[2] for path in folders[first].iterdir()}
    others = sorted(kept & folders.keys() - {first})
    changed = 0
    if pair:
        gone += others
    # Killed first: a living rank would write its state again.
    for local in gone:
        with suppress(KeyError, ProcessLookupError):
            os.kill(alive[local], signal.SIGKILL)
    if flip:
        for other in others:
            for path in folders[other].glob(f"*-{first}.*"):
                changed += _flip(path, draw)
    for local in gone:
        shutil.rmtree(folders[local], ignore_errors=True)
    text = f"SIGKILL to rank(s) {', '.join(gone)} and no more of their memory"
    return f"{text}; a byte changed in {changed} copies" if flip else text


def _folders(run: Launched) -> dict[str, Path]:
    """Return the folder in shared memory of each rank, by its local rank."""
    found = {}
    for pid in run.pids():
        for path in SHARED.glob(f"megapipe-{os.getuid()}-{pid}-*/*"):
            found[path.name] = path
    return found


def _flip(path: Path, draw: random.Random) -> bool:
    """Change one bit of a state in memory. Return False if the state has no bytes.

    Args:
        path: the state's file in shared memory.
        draw: chooses the bit.
    """
    size = path.stat().st_size - HEADER
    if size <= 0:
        return False
    with path.open("r+b") as file:
        at = HEADER + draw.randrange(size)
        file.seek(at)
        byte = file.read(1)[0]
        file.seek(at)
        file.write(bytes([byte ^ 1 << draw.randrange(8)]))
    return True
